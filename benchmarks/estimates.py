"""Compares the estimated memory of steps with the memory of the compiled steps.

    python -m benchmarks.estimates --out=benchmarks/results/cpu_estimates.json
    python -m benchmarks.estimates --target=h100 --out=benchmarks/results/h100_estimates.json
    python -m benchmarks.estimates --docs

The first command compiles for CPUs: every case is a shipped config at its default size, with a
vocabulary of 8,192 tokens. The second compiles for GPUs, but does not need a GPU; gpu_estimates.py
has the cases. The third writes the tables of docs/memory.md from the results of both. Results with
another version of jax are stored next to these, as h100_estimates_jax_VERSION.json.

The compiler reports the memory of a compiled step: arguments, results and temporaries, with reused
memory counted once. No step is run.

If only the estimate has changed, `--keep-compiled` reads the compiled sizes from the file and
compiles only the cases that are missing there.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import docs_page, gpu_estimates, report
from fields.paths import local_path
from predict.machines.targets import TARGETS
from predict.program.memory import memory
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.assemble import assemble_run
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

VOCAB_SIZE = 8192
_CONFIGS = Path(__file__).parents[1] / "configs"
_RESULTS = Path(__file__).parent / "results"
_DOCS = Path(__file__).parents[1] / "docs" / "memory.md"

#: Name of a case -> config file and overrides.
CASES = {
    "gpt2": ("gpt2",),
    "gpt2, nothing kept": ("gpt2", "train.remat=stage,full"),
    "gpt2, large batch": ("gpt2", "data.global_batch_size=128"),
    "gpt2, bfloat16": ("gpt2", "precision.compute=bfloat16"),
    "gpt2, 8 microbatches, names kept": (
        "gpt2",
        "train.num_microbatches=8",
        "train.remat=stage,qkv,mlp",
        "data.global_batch_size=64",
    ),
    "gpt2, data=8": ("gpt2", "mesh.data=8"),
    "gpt2, data=8, ZeRO 1": ("gpt2", "mesh.data=8", "memory.zero_stage=1"),
    "gpt2, data=8, ZeRO 2": ("gpt2", "mesh.data=8", "memory.zero_stage=2"),
    "gpt2, data=8, ZeRO 3": ("gpt2", "mesh.data=8", "memory.zero_stage=3"),
    "gpt2, data=2, model=4": ("gpt2", "mesh.data=2", "mesh.model=4"),
    "gpt2, 2×2×2": ("gpt2_3d",),
    "gpt2, pipeline=4, all kept": (
        "gpt2",
        "mesh.pipeline=4",
        "train.num_microbatches=8",
        "train.remat=none",
        "model.num_layers=8",
    ),
    "gpt2, pipeline=4, zero bubble": (
        "gpt2",
        "mesh.pipeline=4",
        "train.num_microbatches=8",
        "model.num_layers=8",
        "pipeline.schedule=zero_bubble",
    ),
    "opt, fsdp=8, dots kept": ("opt", "mesh.fsdp=8", "train.remat=stage,dots"),
    "llama": ("llama",),
    "llama, fsdp=2, data=2, model=2, ZeRO 2": (
        "llama",
        "mesh.fsdp=2",
        "mesh.data=2",
        "mesh.model=2",
        "memory.zero_stage=2",
    ),
    "llama, context=2, data=2, model=2": (
        "llama",
        "mesh.context=2",
        "mesh.data=2",
        "mesh.model=2",
    ),
    "bert": ("bert",),
    "bert, 2×2×2": (
        "bert",
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.model=2",
        "train.num_microbatches=4",
    ),
    "t5": ("t5",),
    "t5, pipeline=2, data=4, ZeRO 3": (
        "t5",
        "mesh.pipeline=2",
        "mesh.data=4",
        "train.num_microbatches=4",
        "memory.zero_stage=3",
    ),
}


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = command_parser("benchmarks.estimates")
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    parser.add_argument(
        "--target", choices=TARGETS, help="kind of GPU to compile for (default: CPUs)"
    )
    parser.add_argument(
        "--keep-compiled", action="store_true", help="compile only cases that are missing in --out"
    )
    parser.add_argument(
        "--only", default="", help="run only cases whose names match this regular expression"
    )
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/memory.md")
    args = parser.parse_args(argv)
    if args.docs:
        docs_page.write_tables(_DOCS, tables())
        return 0
    command = command_line("benchmarks.estimates", argv)
    if args.target:
        _compare_on_gpus(args, command)
    else:
        _compare_on_cpus(args, command)
    return 0


def _compare_on_cpus(args: argparse.Namespace, command: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    figures: dict[str, Any] = {}
    names = [name for name in CASES if re.search(args.only, name)]
    for name in names:
        run = make_run(name)
        figures[name] = measure(run)
        print(docs_page.row(_row(name, figures[name])))
    whole = {
        "command": command,
        "hardware": report.hardware(run.mesh),
        "versions": report.versions(),
        "cases": {name: {"config": CASES[name], **figures[name]} for name in names},
    }
    report.write_json(args.out, whole)


def _compare_on_gpus(args: argparse.Namespace, command: str) -> None:
    """Compare the cases of gpu_estimates.py, and write the results to the file after each one."""
    jax.config.update("jax_platforms", "cpu")  # only the compiler of CUDA's plugin is needed
    before = {}
    if args.out and args.out.exists():
        before = report.read_json(args.out)["cases"]
    figures_by_case = dict(before)
    whole = {
        "command": command,
        "target": args.target,
        "versions": report.versions(),
        "cases": figures_by_case,
    }
    cases = gpu_estimates.cases()
    for case in cases:
        if not re.search(args.only, case.name):
            continue
        known = before.get(case.name)
        is_same = known is not None and known["overrides"] == list(case.overrides)
        if not (args.keep_compiled and is_same and known is not None and "compiled" in known):
            known = None
        figures_by_case[case.name] = gpu_estimates.measure(case, args.target, known)
        jax.clear_caches()
        shown = figures_by_case[case.name]
        print(f"{case.name}: {shown.get('ratio', shown.get('refused'))}", flush=True)
        whole["cases"] = {
            c.name: figures_by_case[c.name] for c in cases if c.name in figures_by_case
        }
        report.write_json(args.out, whole)
    for name in gpu_estimates.out_of_bounds(figures_by_case):
        print(f"out of bounds: {name}: {figures_by_case[name]['ratio']}")


def tables() -> dict[str, str]:
    """Return the tables of docs/memory.md, from the current results."""
    on_cpus = report.read_json(_RESULTS / "cpu_estimates.json")
    rows = [["config", "estimated", "compiled", "ratio"]]
    rows += [_row(name, figures) for name, figures in on_cpus["cases"].items()]
    on_gpus = [
        f"With jax {results['versions']['jax']}:\n\n{gpu_estimates.tables(results['cases'])}"
        for results in h100_results()
    ]
    return {"cpu estimates": docs_page.markdown(rows), "h100 estimates": "\n\n".join(on_gpus)}


def h100_results() -> list[dict[str, Any]]:
    """Return the contents of the result files for H100s, one per version of jax."""
    paths = sorted(_RESULTS.glob("h100_estimates*.json"))
    return [report.read_json(path) for path in paths]


def make_run(name: str) -> Run:
    """Return the run of a case, on the first simulated devices."""
    config, *overrides = CASES[name]
    validated = validate_config(load(str(_CONFIGS / f"{config}.py"), overrides))
    return assemble_run(validated, validated.make_mesh(jax.devices()), vocab_size=VOCAB_SIZE)


def measure(run: Run) -> dict[str, Any]:
    """Return the bytes on a device: estimated, in total and by label, compiled, and their ratio."""
    compiled = memory(run.compile_train_step()).in_all
    assert compiled is not None
    return {
        "estimated": run.estimate_memory().device_bytes,
        "compiled": compiled,
        "ratio": round(run.estimate_memory().device_bytes / compiled, 3),
        "labels": dict(run.estimate_memory().device),
    }


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    estimated, compiled = (figures[key] / 1e6 for key in ("estimated", "compiled"))
    return [name, f"{estimated:.1f}", f"{compiled:.1f}", f"{figures['ratio']:.2f}"]


if __name__ == "__main__":
    run_command(main)
