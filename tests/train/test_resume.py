"""Resuming: the same losses to the bit after any stop; on another mesh, up to rounding."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.runs import CONFIG, FLOAT64, ROOT, TINY, arguments, make_run
from train import loop
from train.config.config_files import load
from train.config.schema import validate_config
from train.lifecycle.phases import Phases
from train.lifecycle.restore import restore_or_initialize
from train.lifecycle.stop_signals import StopSignals
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_steps")

CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
KILLED = (*TINY, *CUBE, "train.num_steps=12", "checkpoint.every_steps=3", "eval.every_steps=4")


def command(workdir: Path, overrides) -> list[str]:
    flags = [f"--config.{override}" for override in overrides]
    return [
        sys.executable,
        "-m",
        "train.main",
        f"--config={CONFIG}",
        f"--workdir={workdir}",
        *flags,
    ]


def run_and_kill(workdir: Path, overrides, after_step: int) -> None:
    """Start a run in a process, and kill it as soon as it has logged step `after_step`."""
    process = subprocess.Popen(
        command(workdir, overrides),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and any(m["step"] >= after_step for m in read_metrics(metrics)):
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


#: Logged metrics that vary between runs.
TIMES = ("step_time_s", "data_wait_s", "tokens_per_s")


def trajectory(workdir: Path) -> dict[int, tuple]:
    """Return step -> all logged metrics except times."""
    steps: dict[int, tuple] = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        kept = {k: v for k, v in entry.items() if k not in TIMES}
        steps[entry["step"]] = (*steps.get(entry["step"], ()), tuple(sorted(kept.items())))
    return steps


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_killed_run_logs_equal_values_to_the_bit(corpus_overrides, tmp_path):
    overrides = (*KILLED, *corpus_overrides)
    assert main(arguments(tmp_path / "undisturbed", overrides)) == 0
    killed = tmp_path / "killed"
    run_and_kill(killed, overrides, after_step=1)  # before the first checkpoint
    run_and_kill(killed, overrides, after_step=5)  # between two checkpoints
    run_and_kill(killed, overrides, after_step=9)  # while a checkpoint is being written
    assert main(arguments(killed, overrides)) == 0
    expected = trajectory(tmp_path / "undisturbed")
    assert sorted(expected) == list(range(1, 13))
    assert trajectory(killed) == expected


def train(overrides, workdir: Path, num_steps: int, stop: int | None = None) -> list[float]:
    """Train in this process; return the losses.

    With `stop`, the run is configured for `num_steps` but ends early.
    """
    run, corpus = make_run((*overrides, f"train.num_steps={num_steps}"))
    if stop is not None:
        shorter = validate_config(load(CONFIG, [*overrides, f"train.num_steps={stop}"]))
        run = dataclasses.replace(run, config=shorter)
    start = restore_or_initialize(run, corpus, workdir)
    phases = Phases()
    signals = StopSignals()
    logs = loop.open_logs(run, start.step, workdir, phases)
    loop.train(run, corpus, start, workdir, logs, saves=True, phases=phases, signals=signals)
    return [m["loss"] for m in read_metrics(workdir / "metrics.jsonl") if "loss" in m]


@pytest.mark.slow(only=["float32"])
@pytest.mark.thorough
@pytest.mark.parametrize("x64", [True, False], ids=["float64", "float32"])
def test_checkpoint_of_2x2x2_continues_on_other_meshes(x64, corpus_overrides, tmp_path):
    base = (*TINY, *corpus_overrides, *(FLOAT64 if x64 else ()))
    tolerance = 1e-9 if x64 else 1e-4
    with jax.enable_x64(x64):
        expected = train((*base, *CUBE), tmp_path / "whole", 12)
        for name, mesh in {"one": (), "3D": ("mesh.model=8", "tensor.mode=3d")}.items():
            train((*base, *CUBE), tmp_path / name, 12, stop=5)
            continued = train((*base, *mesh), tmp_path / name, 12)
            np.testing.assert_allclose(continued, expected, rtol=tolerance, atol=0)


@pytest.mark.thorough
def test_examples_equal_an_undisturbed_run_on_8_then_4_then_8_devices(
    corpus_overrides, tmp_path, monkeypatch
):
    base = (*TINY, *corpus_overrides, "model.num_layers=1")
    seen = []
    next_batch = loop._TrainingLoop.next_batch

    def next_and_remember(self):
        placed = next_batch(self)
        seen.append({name: self._local_batch[name].tolist() for name in ("index", "tokens")})
        return placed

    monkeypatch.setattr(loop._TrainingLoop, "next_batch", next_and_remember)
    train((*base, "mesh.data=8"), tmp_path / "whole", 12)
    expected = list(seen)
    assert sum((batch["index"] for batch in expected), []) == list(range(12 * 16))
    seen.clear()
    train((*base, "mesh.data=8"), tmp_path / "run", 12, stop=3)
    train((*base, "mesh.fsdp=4"), tmp_path / "run", 12, stop=8)
    train((*base, "mesh.data=8"), tmp_path / "run", 12)
    assert seen == expected


UNEVEN = ("mesh.pipeline=4", "train.num_microbatches=8", "pipeline.layers_per_stage=1,2,1,0")
CHUNKS = (
    "mesh.pipeline=2",
    "mesh.fsdp=2",
    "pipeline.schedule=zbv",
    "pipeline.chunks=2",
    "pipeline.share_vocab=true",
    "train.remat=none",
)


@pytest.mark.thorough
def test_checkpoint_does_not_depend_on_stages_and_chunks(corpus_overrides, tmp_path):
    base = (*TINY, *corpus_overrides, *FLOAT64)
    with jax.enable_x64(True):
        expected = train(base, tmp_path / "whole", 12)
        train((*base, *UNEVEN), tmp_path / "many", 12, stop=3)
        train((*base, *CHUNKS), tmp_path / "many", 12, stop=6)
        train((*base, *UNEVEN), tmp_path / "many", 12, stop=9)
        continued = train(base, tmp_path / "many", 12)
    np.testing.assert_allclose(continued, expected, rtol=1e-9, atol=0)


@pytest.mark.thorough
def test_chunks_resume_to_the_bit(corpus_overrides, tmp_path):
    base = (*TINY, *corpus_overrides, *CHUNKS)
    expected = train(base, tmp_path / "whole", 6)
    train(base, tmp_path / "stopped", 6, stop=3)
    assert train(base, tmp_path / "stopped", 6) == expected
