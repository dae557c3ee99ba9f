"""Metrics files, TensorBoard files, throughput and loss plots."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
import rich.console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config.train_config import LogConfig
from train.reporting import throughput
from train.reporting.ending import describe_end
from train.reporting.metrics import MetricsWriter, read_metrics
from train.reporting.progress import Progress
from train.reporting.throughput import ThroughputMeter, mfu

ROOT = Path(__file__).parents[3]


def log_steps(workdir, steps, *, resume_step):
    writer = MetricsWriter(workdir, resume_step=resume_step)
    for step in steps:
        writer.write(step, {"loss": 10 / step, "learning_rate": 1e-3})
    writer.close()


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_log_config_error_names_the_key():
    with pytest.raises(ValueError, match=r"log\.every_steps=0 must be at least 1; choose"):
        LogConfig(every_steps=0)


def test_write_keeps_every_bit_of_a_float(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=0)
    loss = (jnp.float32(1) / 3).item()
    norm = 2**0.5
    writer.write(1, {"loss": loss, "grad_norm": norm, "tokens": 7, "tokens_per_s": None})
    writer.close()
    (line,) = lines_of(tmp_path)
    assert line == {
        "step": 1,
        "loss": loss,
        "grad_norm": norm,
        "tokens": 7,
        "tokens_per_s": None,
    }


def test_write_of_nan_and_infinity_is_valid_json_and_reads_back(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=0)
    writer.write(1, {"loss": math.nan, "grad_norm": jnp.inf, "low": -jnp.inf})
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=refuse)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["loss"]) and line["grad_norm"] == math.inf and line["low"] == -math.inf


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}garbage\n', "\0\0\0\n"])
def test_resuming_logs_each_step_once(tmp_path, torn):
    undisturbed = tmp_path / "undisturbed"
    killed = tmp_path / "killed"
    log_steps(undisturbed, range(1, 7), resume_step=0)
    log_steps(killed, range(1, 5), resume_step=0)
    with open(killed / "metrics.jsonl", "a") as file:
        file.write(torn)
    log_steps(killed, range(3, 7), resume_step=2)
    assert lines_of(killed) == lines_of(undisturbed)
    assert sorted(os.listdir(killed)) == ["metrics.jsonl", "tensorboard"]


def test_starting_from_scratch_drops_all_lines(tmp_path):
    log_steps(tmp_path, range(1, 5), resume_step=0)
    log_steps(tmp_path, range(1, 3), resume_step=0)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_tensorboard_shows_each_step_once_after_resuming(tmp_path):
    log_steps(tmp_path, range(1, 6), resume_step=0)
    writer = MetricsWriter(tmp_path, resume_step=2)
    for step in range(3, 5):
        writer.write(step, {"loss": 100 + step, "learning_rate": math.nan, "skipped": None})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(1, 10), (2, 5), (3, 103), (4, 104)]
    assert set(events.Tags()["scalars"]) == {"loss", "learning_rate"}


def test_only_the_writer_writes(tmp_path):
    writer = MetricsWriter(tmp_path / "run", resume_step=0, is_writer=False)
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert not (tmp_path / "run").exists()


def test_kill_loses_no_line_and_neither_tensorflow_nor_torch_is_needed(tmp_path):
    program = f"""
import sys
for name in ("tensorflow", "torch"):
    sys.modules[name] = None  # importing it fails
from train.reporting.ending import describe_end
from train.reporting.metrics import MetricsWriter
writer = MetricsWriter({str(tmp_path)!r}, resume_step=0)
for step in range(1, 4):
    writer.write(step, {{"loss": float(step)}})
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert [line["loss"] for line in lines_of(tmp_path)] == [1, 2, 3]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [1, 2, 3]


def test_full_disk_does_not_end_the_run_and_loses_no_line(tmp_path, monkeypatch, caplog):
    writer = MetricsWriter(tmp_path, resume_step=0)
    assert writer._lines and writer._points
    with monkeypatch.context() as patch, open("/dev/full", "wb", buffering=0) as full:
        for written in (writer._lines, writer._points):
            patch.setattr(written._file, "_file", full)
        for step in range(1, 101):
            writer.write(step, {"loss": float(step)})
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    writer.write(101, {"loss": 101.0})
    writer.close()
    expected = [float(step) for step in range(1, 102)]
    assert [m["loss"] for m in read_metrics(tmp_path / "metrics.jsonl")] == expected
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == expected
    assert caplog.text.count("No space left on device") == 2  # once for each file


def show(is_terminal: bool, **metrics):
    out = io.StringIO()
    console = rich.console.Console(
        file=out, force_terminal=is_terminal, width=120, highlight=False, soft_wrap=True
    )
    with closing(Progress(200, console=console)) as progress:
        progress.update(1, {"loss": 9.5, "learning_rate": 1e-5, "tokens_per_s": None})
        progress.update(20, metrics)
        progress.evaluation(20, {"eval_loss": 6.25, "eval_perplexity": 518.01})
    return out.getvalue()


METRICS = dict(
    loss=6.125,
    learning_rate=3e-4,
    grad_norm=1.5,
    step_time_s=0.5,
    tokens_per_s=12345.6,
    mfu=0.412,
)


def test_progress_in_a_file_is_one_aligned_line_per_step():
    lines = show(False, **METRICS).splitlines()
    assert len(lines) == 3 and "\x1b" not in "".join(lines)
    assert re.sub(" +", " ", lines[1]) == (
        "step 20/200 loss 6.1250 lr 3.00e-04 grad 1.500 12,346 tok/s MFU 41.2% ETA 0:01:30"
    )
    assert lines[0].startswith("step   1/200  loss 9.5000")
    assert lines[0].index("lr ") == lines[1].index("lr ")
    assert lines[2] == "step  20/200  eval_loss 6.2500  eval_perplexity 518.01"


def test_progress_on_a_terminal_is_a_live_bar():
    text = show(True, **METRICS)
    assert "\x1b[" in text and "━" in text
    assert "loss 6.1250" in text and "MFU 41.2%" in text and "ETA 0:01:30" in text
    assert "eval_loss 6.2500" in text


def test_progress_in_a_notebook_is_a_line_per_step(monkeypatch, capsys):
    monkeypatch.setattr(rich, "get_console", lambda: SimpleNamespace(is_jupyter=True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # as in IPython
    with closing(Progress(10)) as progress:
        progress.update(1, {"loss": 1.0})
    printed = capsys.readouterr().out
    assert printed.startswith("step  1/10  loss 1.0000") and "\x1b" not in printed


def test_progress_leaves_out_unknown_values_and_can_be_silent(capsys):
    assert "MFU" not in show(False, loss=1.0)
    with closing(Progress(10, is_shown=False)) as progress:
        progress.update(1, METRICS)
        progress.evaluation(1, {"eval_loss": 1.0, "eval_perplexity": 2.0})
    assert capsys.readouterr().out == ""


def test_mfu_is_the_fraction_of_all_devices_peak():
    assert mfu(4e12, num_devices=8, peak_flops_per_s=1e12) == 0.5
    assert mfu(4e12, num_devices=8, peak_flops_per_s=None) is None


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand: clock.now += seconds."""
    clock = SimpleNamespace(now=100.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(throughput, "time", fake)
    return clock


def test_throughput_counts_neither_the_first_step_nor_pauses(clock):
    meter = ThroughputMeter(units_per_step=1000)
    clock.now += 30  # compiling
    meter.step(None)
    assert meter.lap() == {"step_time_s": 30, "data_wait_s": None, "tokens_per_s": None}
    for _ in range(4):
        with meter.waiting():
            clock.now += 0.125
        clock.now += 0.375
        meter.step(None)
    with meter.paused():
        clock.now += 60  # an evaluation
    assert meter.lap() == {"step_time_s": 0.5, "data_wait_s": 0.125, "tokens_per_s": 2000}
    clock.now += 2
    meter.step(None)
    assert meter.lap() == {"step_time_s": 2, "data_wait_s": 0, "tokens_per_s": 500}


def test_throughput_leaves_the_first_step_out_of_a_lap_of_several(clock):
    meter = ThroughputMeter(units_per_step=1000)
    for duration_s in (30, 1, 1):
        with meter.waiting():
            clock.now += duration_s
        meter.step(None)
    assert meter.lap() == {"step_time_s": 1, "data_wait_s": 1, "tokens_per_s": 1000}


def test_throughput_counts_steps_of_several_sizes(clock):
    meter = ThroughputMeter(units_per_step=100)
    meter.step(None)
    clock.now += 1
    meter.step(None)
    meter.units_per_step = 500
    clock.now += 2
    meter.step(None)
    assert meter.lap() == {"step_time_s": 1.5, "data_wait_s": 0, "tokens_per_s": 200}


def test_throughput_waits_for_the_steps_it_counts():
    class Slow:
        def block_until_ready(self):
            time.sleep(0.05)

    meter = ThroughputMeter(units_per_step=1)
    meter.step(jnp.zeros(()))
    meter.step(Slow())
    step_time_s = meter.lap()["step_time_s"]
    assert step_time_s is not None and step_time_s >= 0.05


def test_end_of_a_run_names_its_losses_and_the_command_that_shows_them(monkeypatch):
    metrics = {"loss": 2.5, "grad_norm": 1.0, "eval_wiki_loss": 3.25, "eval_loss": math.nan}
    options: Any = {"step": 50, "num_steps": 1000, "metrics": metrics, "goodput": 0.875}
    text = describe_end(Path("my runs/a"), **options)
    assert text.splitlines() == [
        "ended   step 50 of 1,000, loss 2.5000, eval_wiki_loss 3.2500, goodput 87.5%",
        "report  python -m train.report 'my runs/a' --out=report.html",
    ]
    monkeypatch.setattr(sys, "argv", ["taibai train"])
    assert "report  taibai report 'my runs/a'" in describe_end(Path("my runs/a"), **options)
