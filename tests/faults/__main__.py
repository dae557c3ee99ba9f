"""Injects faults into small runs, and compares them bit for bit with an undisturbed run.

    python -m tests.faults --kills=100 --out=benchmarks/results/cpu_faults.json
    python -m tests.faults --kills=100 --out=benchmarks/results/cpu_faults.json --add --seed=1
    python -m tests.faults --kinds='kill*,read errors*' --kills=10

The second command adds another 100 kills to the results of the first one. The last one selects
kinds of faults by patterns.

A tiny GPT-2 with dropout trains on a simulated 2×2×2 mesh, in one process and in two. Faults hit it
in random order and at random moments: kills, signals, frozen processes, damaged checkpoints and
caches, reads that fail, hard links in the place of files, a full disk, a log that cannot be
written, a lost launcher, a learning rate that ruins the parameters, a clock that jumps. After each
fault, the same command restarts the run, until it finishes.

Each run must keep these promises. If one is broken, the exit code is 1 and the run's directory is
kept:

- Losses, gradient norms and evaluations equal the undisturbed run's, and each is logged once.
- Every checkpoint that passes verification loads, and equals the undisturbed run's.
- A kill damages no checkpoint, and a finished run leaves no half-written files behind.
- A checkpoint that cannot be read is neither skipped nor lost.
- A file outside of the run is not written through a hard link.
- Exit codes are as documented in train/lifecycle/exit_codes.py, and no process outlives its
  launcher.
"""

import argparse
import dataclasses
import fnmatch
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import report
from distributed import startup
from tests.faults.campaign import Results, impossible_kinds, run_all, summary
from tests.faults.kinds import KINDS
from tests.faults.restart_overhead import restart_overhead
from tests.faults.runs import MESH, NUM_STEPS, OVERRIDES, prepare
from tests.faults.start import say
from untrusted.files import write_text


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, 1 if a promise was broken, or 2 after an error."""
    args = _parser().parse_args(argv)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        kinds = chosen_kinds(args.kinds)
        before = _checked(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    jax.config.update("jax_platforms", "cpu")
    mesh = startup.start(MESH)
    scratch = Path(tempfile.mkdtemp(prefix="taibai_faults_"))
    begin_s = time.monotonic()
    setting = prepare(scratch)
    skipped = impossible_kinds(setting, kinds)
    kinds = [kind for kind in kinds if kind not in skipped]
    for kind, reason in skipped.items():
        say(f"{kind}: skipped, because {reason}")
    overhead = restart_overhead(setting) if args.overhead else None
    results = Results.from_json(before["results"]) if before else Results()

    def figures() -> dict[str, Any]:
        part = {
            "command": shlex.join(["python", "-m", "tests.faults", *arguments]),
            "seed": args.seed,
            "versions": report.versions(),
            "hardware": report.hardware(mesh),
            "wall_s": time.monotonic() - begin_s,
        }
        return {
            "parts": [*before.get("parts", []), part],
            "run": {"config": "configs/gpt2.py", "steps": NUM_STEPS, "overrides": OVERRIDES},
            "skipped": skipped,
            "restart_overhead_s": overhead or before.get("restart_overhead_s"),
            **summary(results),
            "results": dataclasses.asdict(results),
        }

    def save() -> None:
        if args.out:
            write_text(args.out, json.dumps(figures(), indent=2, allow_nan=False) + "\n")

    run_all(setting, kinds, args.kills, args.seed, results, save)
    save()
    print(as_text(figures()))
    if results.broken:
        print(f"error: some promises were broken; see {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


def chosen_kinds(text: str) -> list[str]:
    """Return the kinds of faults that match one of the patterns, such as `kill*`, in `--kinds`."""
    patterns = [pattern for pattern in text.split(",") if pattern]
    for pattern in patterns:
        if not fnmatch.filter(KINDS, pattern):
            raise ValueError(
                f"--kinds={text}: {pattern!r} matches none of the kinds {', '.join(KINDS)}"
            )
    return [kind for kind in KINDS if any(fnmatch.fnmatchcase(kind, each) for each in patterns)]


def _checked(args: argparse.Namespace) -> dict[str, Any]:
    """Check the arguments, and return the figures that a campaign adds to, which may be empty."""
    if args.kills < 1:
        raise ValueError(f"--kills={args.kills} must be at least 1")
    if not args.add:
        return {}
    if not (args.out and args.out.is_file()):
        raise ValueError(f"--add requires an existing file, but --out={args.out}")
    before = json.loads(args.out.read_text(encoding="utf-8"))
    if args.seed in [part["seed"] for part in before["parts"]]:
        raise ValueError(f"--seed={args.seed} is already in {args.out}; choose another seed")
    return before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", allow_abbrev=False)
    parser.add_argument(
        "--kills",
        type=int,
        default=100,
        help="number of kills at random moments; other faults are added in proportion",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument(
        "--kinds", default="*", help="kinds of faults or patterns of them, separated by commas"
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="also measure starts with a cold and a warm compilation cache; takes minutes",
    )
    parser.add_argument(
        "--out", type=Path, help="write the figures to this JSON file, after each run"
    )
    parser.add_argument(
        "--add", action="store_true", help="add to the figures in --out, with another seed"
    )
    return parser


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as a readable text."""
    minutes = sum(part["wall_s"] for part in figures["parts"]) / 60
    lines = [
        f"{figures['faults']} faults in {figures['runs']} runs of {figures['starts']} starts, "
        f"{minutes:.0f} min; {figures['failures']} broken promises",
        "",
        f"{'':32}{'faults':>7}{'failures':>10}{'restart s':>11}{'all gone after s':>18}",
    ]
    for kind, tally in figures["kinds"].items():
        noticed = [tally["noticed_s_median"], tally["noticed_s_max"]]
        lines.append(
            f"{kind:32}{tally['faults']:>7}{tally['failures']:>10}"
            f"{_number(tally['restart_to_first_new_step_s']):>11}"
            f"{'–'.join(map(_number, noticed)) if noticed[0] else '-':>18}"
        )
    lines += [f"{kind:32}skipped: {reason}" for kind, reason in figures["skipped"].items()]
    lines += ["", "restart: median from start to first new step; all gone after: median–longest"]
    save_s = figures["save_s"]["median"]
    stall_s = figures["save_stall_s"]["median"]
    if save_s is not None and stall_s is not None:
        lines.append(f"a save takes {save_s:.2f} s, of which training waits for {stall_s:.2f} s")
    if figures["restart_overhead_s"]:
        cold, warm = (figures["restart_overhead_s"][cache]["median"] for cache in ("cold", "warm"))
        lines.append(
            f"first step after {cold:.1f} s with a cold compilation cache, {warm:.1f} warm"
        )
    lines += [f"{one['workdir']}: after {one['fault']}: {one['what']}" for one in figures["broken"]]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
