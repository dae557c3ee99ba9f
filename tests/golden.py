"""Records golden runs, to show that a change of the code changes no result.

Results are bitwise equal only on the same machine. Every config trains for 30 steps at its default
size. The runs are started only by the command line, so that this file works before and after the
code is reorganized:

    python -m tests.golden record /tmp/before       # with the old code
    python -m tests.golden record /tmp/after        # with the changed code
    python -m tests.golden compare /tmp/before /tmp/after
    python -m tests.golden resume /tmp/before       # from its checkpoints of step 20, in a copy

`record` keeps the runs and writes `golden.json`: losses, gradient norms and evaluations of every
step, and the SHA-256 of the final state (parameters and optimizer).
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: also without a GPU

import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

ROOT = Path(__file__).parents[1]
NUM_STEPS = 30
RESUME_STEP = 20
OVERRIDES = (
    f"train.num_steps={NUM_STEPS}",
    f"checkpoint.every_steps={RESUME_STEP}",
    "log.every_steps=1",
    "eval.every_steps=10",
    "eval.num_batches=2",
    "data.num_threads=1",
)

#: config -> (the run that `init_from` names, further overrides); in an order in which they can run.
RUNS = {
    "bert": ("", ()),
    "chat": ("", ()),
    "gpt2": ("", ()),
    "gpt2_3d": ("", ()),
    "llama": ("", ()),
    "mae": ("", ()),
    "moco": ("", ()),
    "opt": ("", ()),
    "resmlp": ("", ()),
    "roberta": ("", ()),
    "swin": ("", ()),
    "t5": ("", ()),
    "vit": ("", ()),
    "bert_classify": ("bert", ("data.paths={directory}/reviews.jsonl", "model.num_labels=2")),
    "dpo": ("chat", ()),
    "opt_finetune": ("opt", ("data.sequence_length=128",)),
    "vit_finetune": ("mae", ()),
    "vit_probe": ("moco", ()),
}


def main() -> int:
    """Return 1 if any result differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("action", choices=("record", "compare", "resume"))
    parser.add_argument("directory", type=Path, help="runs to write, or to compare with")
    parser.add_argument("other", type=Path, nargs="?", help="for compare: the second recording")
    parser.add_argument("--only", nargs="*", choices=tuple(RUNS), help="these configs only")
    args = parser.parse_args()
    names = args.only or list(RUNS)
    directory = args.directory.absolute()
    if args.action == "record":
        directory.mkdir(parents=True, exist_ok=True)
        _write_reviews(directory / "reviews.jsonl")
        results = {}
        for name in names:
            _train(directory, name, directory / name)
            results[name] = _read(directory / name)
            print(f"{name}: {len(results[name]['metrics'])} lines of metrics", flush=True)
            (directory / "golden.json").write_text(json.dumps(results, indent=1))
        return 0

    expected = json.loads((directory / "golden.json").read_text())
    if args.action == "compare":
        found = json.loads((args.other / "golden.json").read_text())
    else:
        found = {name: _resume(directory, name) for name in names}
    differing = [name for name in names if not _is_equal(name, expected[name], found.get(name))]
    print(f"{len(names) - len(differing)} of {len(names)} equal to the bit")
    return 1 if differing else 0


def _train(directory: Path, name: str, workdir: Path) -> None:
    source, more = RUNS[name]
    overrides = [*OVERRIDES, *(text.format(directory=directory) for text in more)]
    if source:
        overrides.append(f"init_from={directory / source}")
    flags = [f"--config.{override}" for override in overrides]
    command = [sys.executable, "-m", "train.main", f"--config=configs/{name}.py"]
    with open(directory / f"{name}.log", "a") as log:
        subprocess.run(
            [*command, f"--workdir={workdir}", *flags],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )


def _resume(directory: Path, name: str) -> dict:
    """Continue from the checkpoint of RESUME_STEP, in a copy of the recorded run."""
    with tempfile.TemporaryDirectory() as scratch:
        workdir = Path(scratch) / name
        shutil.copytree(directory / name, workdir)
        shutil.rmtree(workdir / "checkpoints" / str(NUM_STEPS))
        _train(directory, name, workdir)
        return _read(workdir)


def _read(workdir: Path) -> dict:
    timed = ("_s", "_per_s", "mfu")
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        {key: value for key, value in line.items() if not key.endswith(timed)} for line in lines
    ]
    state = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(NUM_STEPS) / "state")
    return {"metrics": metrics, "state_sha256": _digest(state)}


def _digest(tree: object) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _is_equal(name: str, expected: dict, found: dict | None) -> bool:
    if expected == found:
        return True
    print(f"{name} differs" if found else f"{name} is missing")
    pairs = zip(expected["metrics"], found["metrics"], strict=False) if found else ()
    first = next(((a, b) for a, b in pairs if a != b), None)
    if first is not None:
        print(f"  expected {first[0]}\n  found    {first[1]}")
    return False


def _write_reviews(file: Path) -> None:
    """Write labelled texts: whether a line of this module's own source is indented."""
    lines = [line for line in Path(json.__file__).read_text().splitlines() if line.strip()] * 4
    rows = ({"text": line.strip(), "label": int(line.startswith(" "))} for line in lines)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
