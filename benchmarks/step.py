r"""Measures a training step: `python -m benchmarks.step --config=FILE [--peer=torch] [--json]`.

Batches are random and stay in memory: the time of a step does not depend on the contents of texts
or images, and does not include reading them. Any key of the config can be set, as in train.main:

    python -m benchmarks.step --config=configs/gpt2.py --peer=torch \
        --config.model.embed_dim=256 --config.data.sequence_length=256

If a GPU's memory does not hold all contenders, time each in a process of its own with --only.
--profile=DIR also writes the compiled step and the times of its kernels there.
"""

import dataclasses
import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import report
from benchmarks.harness.batches import random_batch
from benchmarks.harness.kernel_times import profiled
from benchmarks.harness.timing import NUM_WARM_UP_STEPS, Contender, interleave, ratios
from distributed import startup
from fields.paths import local_path
from predict.machines.datasheets import peak_flops_per_s
from predict.program.collective_table import summary
from predict.program.communication import collectives
from predict.program.memory import memory
from sharding.batches import place_batch
from train.config import config_files
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.reporting.throughput import mfu
from train.run.assemble import assemble_run
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

CONTENDERS = ("ours", "torch_eager", "torch_compiled")
_PROFILED_STEPS = 3


@refuses_bad_input(ImportError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.step")
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument(
        "--peer", choices=("torch",), help="also time the same model in this framework"
    )
    parser.add_argument(
        "--no_compile", action="store_true", help="do not time the peer with torch.compile"
    )
    parser.add_argument("--only", choices=CONTENDERS, help="time only this contender")
    parser.add_argument("--profile", type=local_path, help="directory for a profile of our step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps of each contender per round"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds, in each of which all contenders take turns"
    )
    args, others = parser.parse_known_args(argv)
    if args.steps < 1 or args.rounds < 1:
        raise ValueError(f"--steps={args.steps} --rounds={args.rounds} must be at least 1")
    if args.peer or args.only not in (None, "ours"):  # leave GPU memory to the peer
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    names = CONTENDERS if args.peer else ("ours",)
    figures = measure(
        make_run(args.config, Overrides.parse(others)),
        names=(args.only,) if args.only else names,
        with_compiled=not args.no_compile,
        num_rounds=args.rounds,
        num_steps=args.steps,
        profile=args.profile,
    )
    figures = {"command": command_line("benchmarks.step", argv)} | figures
    if jax.process_index() == 0:
        print(json.dumps(figures, allow_nan=False) if args.json else report.as_text(figures))
    return 0


def make_run(config: str, overrides: Overrides | Sequence[str]) -> Run:
    """Return the run of a config, without loading its data.

    Args:
        config: path of the config file, with or without an argument.
        overrides: parsed, or strings `section.key=value`.

    Returns:
        The run, on the mesh of its config.
    """
    validated = validate_config(config_files.load(config, overrides))
    jax.config.update("jax_enable_x64", validated.precision.compute == "float64")
    mesh = startup.start(validated.mesh)
    validated = dataclasses.replace(validated, mesh=validated.mesh.filled_in(mesh.size))
    if validated.data.reads_images:
        return assemble_run(validated, mesh)
    bytes_only = validated.data.tokenizer == "bytes"
    vocab_size = validated.model_fields.get("vocab_size")
    vocab_size = vocab_size or (257 if bytes_only else validated.data.vocab_size)
    return assemble_run(validated, mesh, vocab_size=vocab_size)


def measure(
    run: Run,
    *,
    names: Sequence[str],
    with_compiled: bool,
    num_rounds: int,
    num_steps: int,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Measure the step of a run and of its peers.

    Args:
        run: run to measure.
        names: CONTENDERS to measure.
        with_compiled: whether to measure torch.compile.
        num_rounds: number of turns of each contender.
        num_steps: number of timed steps in a turn.
        profile: directory for the compiled step and the times of its kernels; None: no profile.

    Returns:
        All figures, as plain numbers and strings.

    Raises:
        ValueError: the peer cannot do the same work as the run, or its work differs from ours.
    """
    peer_names = [name for name in names if name != "ours"]
    if peer_names:
        from benchmarks.harness import peers  # only a peer needs torch

        peers.check(run)
    batch = random_batch(run)
    figures: dict[str, Any] = {
        "versions": report.versions(with_torch=bool(peer_names)),
        "hardware": report.hardware(run.mesh),
        "work": report.work(run),
        "rounds": num_rounds,
        "steps_per_round": num_steps,
    }
    contenders = {"ours": contender_of(run, batch)} if "ours" in names else {}
    if peer_names:
        first_loss = contenders["ours"].first_loss if contenders else None
        figures["equality"], peer_contenders, skipped = peers.torch_contenders(
            run, batch, first_loss, peer_names, with_compiled=with_compiled
        )
        contenders |= peer_contenders
        figures |= {name: {"skipped": reason} for name, reason in skipped.items()}
    steps = {name: contender.step for name, contender in contenders.items()}
    times = interleave(steps, num_rounds=num_rounds, num_steps=num_steps)
    for name, each in contenders.items():
        figures[name] = _speed(run, times[name].summary())
        figures[name] |= {"compile_time_s": each.compile_time_s, "first_loss": each.first_loss}
    if peer_names and len(contenders) == 1:
        figures[peer_names[0]] |= peers.peak_memory()
    if "ours" in names:
        figures["ours"] |= program(run)
        others = [name for name in contenders if name != "ours"]
        figures["speed_ratios"] = {name: ratios(times["ours"], times[name]) for name in others}
        if profile is not None:
            _profile(run, contenders["ours"], profile)
    return figures


def program(run: Run) -> dict[str, Any]:
    """Return the memory per device, as planned and as used, and the step's collectives."""
    collective_rows = summary(collectives(run.compile_train_step(), run.mesh))
    used = run.mesh.devices.flat[0].memory_stats() or {}
    peak = {"peak_memory_bytes": used["peak_bytes_in_use"]} if "peak_bytes_in_use" in used else {}
    return peak | {
        "memory": dataclasses.asdict(memory(run.compile_train_step())),
        "collectives": [dataclasses.asdict(row) for row in collective_rows],
    }


def contender_of(
    run: Run, batch: dict[str, np.ndarray], states: dict[Any, Any] | None = None
) -> Contender:
    """Return the compiled step of a run as a contender that has warmed up.

    Args:
        batch: global batch of every step, as from `random_batch`.
        states: training states by layout, which this function extends. Runs with the same layout
            take turns updating one state, which saves memory. None: the run has its own state.
    """
    states = {} if states is None else states
    start_s = time.perf_counter()
    train_step = run.compile_train_step()
    compile_time_s = time.perf_counter() - start_s
    rows = run.rows
    size = run.config.data.global_batch_size
    local = {name: array[rows] for name, array in batch.items()}
    placed = place_batch(local, rows, run.batch_layout, size)
    leaves = jax.tree.leaves(run.state_layout.abstract)
    layout = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
    first, metrics = train_step(run.state_layout.initial(), placed)
    states.setdefault(layout, first)

    def step() -> float:
        states[layout], metrics = train_step(states[layout], placed)
        jax.block_until_ready(states[layout])
        return float(metrics["loss"])

    for _ in range(NUM_WARM_UP_STEPS):
        step()
    return Contender(step=step, compile_time_s=compile_time_s, first_loss=float(metrics["loss"]))


def _profile(run: Run, ours: Contender, directory: Path) -> None:
    """Write the program of the step and the times of its kernels into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    text = run.compile_train_step().as_text() or ""
    (directory / "step.hlo.txt.gz").write_bytes(gzip.compress(text.encode()))
    with profiled(directory) as read:
        for _ in range(_PROFILED_STEPS):
            ours.step()
    kernels = [dataclasses.asdict(kernel) for kernel in read(_PROFILED_STEPS)]
    (directory / "kernels.json").write_text(json.dumps(kernels, indent=1) + "\n", encoding="utf-8")


def _speed(run: Run, step_time_s: dict[str, float]) -> dict[str, Any]:
    units_per_s = run.units_per_step / step_time_s["median"]
    flops_per_s = units_per_s * run.flops_per_unit
    kind = run.mesh.devices.flat[0].device_kind
    peak = peak_flops_per_s(kind, run.config.precision.compute)
    return {
        "step_time_s": step_time_s,
        f"{run.unit}s_per_s": units_per_s,
        "model_flops_per_s": flops_per_s,
        "mfu": mfu(flops_per_s, run.mesh.size, peak),
    }


if __name__ == "__main__":
    run_command(main)
