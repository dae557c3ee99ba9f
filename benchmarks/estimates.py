"""Compares the memory that steps are estimated to take with what they take as compiled.

    python -m benchmarks.estimates --out=benchmarks/results/cpu_estimates.json

Every case is a shipped config at its default size, with a vocab of 8,192 tokens. What a compiled
step takes is what its compiler says: its arguments, its results and its temporaries, what is reused
counted once. Nothing runs.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks import report
from sharding.audit import memory
from sharding.mesh import make_mesh
from train.config import resolve
from train.config_files import load
from train.setup import Run, prepare

VOCAB_SIZE = 8192
_CONFIGS = Path(__file__).parents[1] / "configs"

#: Config file and overrides.
CASES = {
    "gpt2": ("gpt2",),
    "gpt2, nothing kept": ("gpt2", "train.remat=full"),
    "gpt2, large batch": ("gpt2", "data.global_batch_size=128"),
    "gpt2, bfloat16": ("gpt2", "precision.compute=bfloat16"),
    "gpt2, 8 microbatches, names kept": (
        *("gpt2", "train.num_microbatches=8", "train.remat=qkv,mlp"),
        "data.global_batch_size=64",
    ),
    "gpt2, data=8": ("gpt2", "mesh.data=8"),
    "gpt2, data=8, ZeRO 1": ("gpt2", "mesh.data=8", "memory.zero_stage=1"),
    "gpt2, data=8, ZeRO 2": ("gpt2", "mesh.data=8", "memory.zero_stage=2"),
    "gpt2, data=8, ZeRO 3": ("gpt2", "mesh.data=8", "memory.zero_stage=3"),
    "gpt2, data=2, model=4": ("gpt2", "mesh.data=2", "mesh.model=4"),
    "gpt2, 2×2×2": ("gpt2_3d",),
    "gpt2, pipeline=4, all kept": (
        *("gpt2", "mesh.pipeline=4", "train.num_microbatches=8", "pipeline.remat=none"),
        "model.num_layers=8",
    ),
    "gpt2, pipeline=4, zero bubble": (
        *("gpt2", "mesh.pipeline=4", "train.num_microbatches=8", "model.num_layers=8"),
        "pipeline.schedule=zero_bubble",
    ),
    "opt, fsdp=8, dots kept": ("opt", "mesh.fsdp=8", "train.remat=dots"),
    "llama": ("llama",),
    "llama, fsdp=2, data=2, model=2, ZeRO 2": (
        *("llama", "mesh.fsdp=2", "mesh.data=2", "mesh.model=2", "memory.zero_stage=2"),
    ),
    "llama, context=2, data=2, model=2": (
        *("llama", "mesh.context=2", "mesh.data=2", "mesh.model=2"),
    ),
    "bert": ("bert",),
    "bert, 2×2×2": (
        *("bert", "mesh.pipeline=2", "mesh.data=2", "mesh.model=2", "train.num_microbatches=4"),
    ),
    "t5": ("t5",),
    "t5, pipeline=2, data=4, ZeRO 3": (
        *("t5", "mesh.pipeline=2", "mesh.data=4", "train.num_microbatches=4"),
        "memory.zero_stage=3",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Prints the figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimates", allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    figures: dict[str, Any] = {}
    for name in CASES:
        run = make_run(name)
        figures[name] = measure(run)
        print(as_text(name, figures[name]))
    arguments = sys.argv[1:] if argv is None else argv
    whole = {
        "command": shlex.join(["python", "-m", "benchmarks.estimates", *arguments]),
        "hardware": report.hardware(run.mesh),
        "versions": report.versions(),
        "cases": {name: {"config": CASES[name], **figures[name]} for name in CASES},
    }
    if args.out:
        args.out.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n")
    return 0


def make_run(name: str) -> Run:
    """Returns the run of a case, on the first devices."""
    config, *overrides = CASES[name]
    resolved = resolve(load(str(_CONFIGS / f"{config}.py"), overrides))
    return prepare(resolved, make_mesh(resolved.mesh, jax.devices()), vocab_size=VOCAB_SIZE)


def measure(run: Run) -> dict[str, Any]:
    """Returns bytes on a device: estimated in all and by label, as compiled, and their ratio."""
    compiled = memory(run.train_step).in_all
    assert compiled is not None
    return {
        "estimated": run.estimate.device_bytes,
        "compiled": compiled,
        "ratio": round(run.estimate.device_bytes / compiled, 3),
        "labels": dict(run.estimate.device),
    }


def as_text(name: str, figures: dict[str, Any]) -> str:
    """Returns one row of the table."""
    estimated, compiled = (figures[key] / 1e6 for key in ("estimated", "compiled"))
    return f"| {name} | {estimated:.1f} | {compiled:.1f} | {figures['ratio']:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
