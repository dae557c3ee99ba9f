"""Training from Python: twice in one process, in an event loop or a thread, without traces."""

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.runs import CONFIG, TINY, arguments
from train import build_run, loop, train
from train.config.overrides import Overrides
from train.lifecycle.stop_signals import SIGNALS
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_steps")

FLOAT = {"precision.compute": "float64", "precision.params": "float64"}
SQUARE = {"mesh.data": 2, "mesh.model": 2}


@pytest.fixture(scope="module")
def overrides(corpus_overrides) -> dict[str, Any]:
    short = (
        "model.num_layers=2",
        "train.num_steps=6",
        "eval.every_steps=3",
        "checkpoint.every_steps=4",
    )
    parsed = Overrides.of((*TINY, *short, *corpus_overrides)).command_line
    return {override.key: override.value for override in parsed}


def run(workdir: Path, overrides: dict[str, Any], **more: Any):
    return train(build_run(CONFIG, {**overrides, **more}, workdir=workdir))


def traces() -> tuple[Any, ...]:
    """Return the signal handlers, threads and open files of this process."""
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # threads that were told to end do so at once
    handlers = [signal.getsignal(name) for name in SIGNALS]
    threads = {thread.name for thread in threading.enumerate()}
    return handlers, threads, len(os.listdir("/proc/self/fd"))


def values(history: list[dict[str, Any]]) -> list[tuple]:
    return [(line["step"], line.get("loss"), line.get("eval_loss")) for line in history]


@pytest.mark.thorough
def test_a_process_trains_twice_on_other_meshes_without_traces(overrides, tmp_path):
    async def notebook():  # runs in an event loop, as the cells of a notebook do
        one = run(tmp_path / "one", overrides)
        before = traces()
        square = run(tmp_path / "square", {**overrides, **SQUARE})
        assert traces() == before
        return one, square

    one, square = asyncio.run(notebook())
    assert one.step == square.step == int(one.state.step) == 6
    for name in ("loss", "eval_loss"):
        expected = one.values(name)
        assert len(expected) == {"loss": 6, "eval_loss": 2}[name]
        assert square.values(name) == pytest.approx(expected, rel=1e-4)  # float32
    assert not [*tmp_path.glob("*/lock")]


@pytest.mark.thorough
def test_values_equal_those_of_the_command_and_a_second_call_resumes(
    overrides, corpus_overrides, tmp_path
):
    texts = [f"{key}={value}" for key, value in overrides.items()]
    assert main(arguments(tmp_path / "command", texts)) == 0
    expected = values(read_metrics(tmp_path / "command" / "metrics.jsonl"))
    short = run(tmp_path / "python", overrides, **{"train.num_steps": 4, "eval.every_steps": 3})
    assert short.step == 4
    with ThreadPoolExecutor(1) as thread:  # a thread that may not set signal handlers
        result = thread.submit(run, tmp_path / "python", overrides).result()
    found = [line for line in values(result.history) if line[0] != 4 or line[1] is not None]
    assert result.step == 6 and values(read_metrics(tmp_path / "python" / "metrics.jsonl"))
    assert found == expected


@pytest.mark.thorough
def test_an_interrupted_run_releases_its_workdir_and_resumes(overrides, tmp_path, monkeypatch):
    undisturbed = run(tmp_path / "undisturbed", overrides)
    before = traces()

    def interrupt(self):
        if self.step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop._TrainingLoop, "evaluate_if_due", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", overrides, **{"eval.every_steps": 0})
    assert traces() == before and not (tmp_path / "run" / "lock").exists()
    resumed = run(tmp_path / "run", overrides)
    assert resumed.values("loss") == undisturbed.values("loss")


@pytest.mark.thorough
def test_errors_are_raised_and_settings_of_jax_stay(overrides, tmp_path):
    with pytest.raises(ValueError, match="mesh data=4 × model=4 needs 16 devices but 8 are"):
        run(tmp_path, overrides, **{"mesh.data": 4, "mesh.model": 4})
    with pytest.raises(
        ValueError, match="mesh.dta: unknown key; the nearest known key is mesh.data"
    ):
        run(tmp_path, overrides, **{"mesh.dta": 3})
    config: Any = jax.config
    assert not config.jax_enable_x64
    result = run(tmp_path, overrides, **{"train.num_steps": 1, **FLOAT})
    assert not config.jax_enable_x64
    assert np.isfinite(result.values("eval_loss")[1])
