"""Tests of launch/train.sbatch on a real SLURM cluster of two nodes.

Each node runs one process with four simulated devices.
"""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import slurm
from tests.runs import ROOT, TINY, write_corpus
from train.reporting.metrics import METRICS_FILE, read_metrics

# Each job starts several times, with two processes per start, which takes long on a slow machine.
pytestmark = pytest.mark.timeout(1800)
NUM_STEPS = 60
OVERRIDES = (
    *TINY,
    f"train.num_steps={NUM_STEPS}",
    "checkpoint.every_steps=10",
    "train.failure_timeout_s=60",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = slurm.install()
    if reason is not None:
        pytest.skip(f"SLURM cannot be installed: {reason}")
    with slurm.start(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def submit(cluster, corpus, workdir, *options, changes=()):
    """Submit a run of NUM_STEPS steps on a 2×2×2 mesh."""
    overrides = [f"--config.{override}" for override in (*OVERRIDES, *corpus, *changes)]
    return cluster.submit(
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--gpu-bind=none",
        f"--output={workdir}.log",
        *options,
        str(ROOT / "launch" / "train.sbatch"),
        f"--config={ROOT}/configs/gpt2_3d.py",
        f"--workdir={workdir}",
        *overrides,
        directory=ROOT,
        TAIBAI_PYTHON=sys.executable,
        TAIBAI_DEVICES_PER_PROCESS="4",
        SLURM_WAIT="10",
        JAX_PLATFORMS="cpu",
    )


def steps(workdir: Path) -> list[tuple[int, float]]:
    path = workdir / METRICS_FILE
    entries = read_metrics(path) if path.exists() else []
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def finish(job, workdir: Path) -> str:
    """Wait for a job to succeed, and return its log."""

    def has_ended():
        job.start_now()
        return job.has_ended

    log = Path(f"{workdir}.log")
    try:
        slurm.wait_until(has_ended, "the end of the job", timeout_s=900)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.fields}\n{log.read_text()[-3000:]}") from None
    assert job.fields["JobState"] == "COMPLETED", log.read_text()[-3000:]
    return log.read_text()


def wait_for_step(workdir: Path, step: int, requeued_job=None) -> None:
    def is_reached():
        if requeued_job is not None:
            requeued_job.start_now()
        return steps(workdir)[-1:] >= [(step, -math.inf)]

    slurm.wait_until(is_reached, f"step {step}", 400)


@pytest.fixture(scope="module")
def undisturbed(cluster, corpus, tmp_path_factory):
    """The losses of a run without interruptions."""
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    log = finish(submit(cluster, corpus, workdir), workdir)
    assert "on 8 cpu device(s), 2 process(es)" in log
    losses = steps(workdir)
    assert [step for step, _ in losses] == list(range(1, NUM_STEPS + 1))
    assert losses[-1][1] < losses[0][1]
    return losses


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_requeued_and_killed_job_continues_with_the_same_losses(
    cluster, corpus, undisturbed, tmp_path
):
    workdir = tmp_path / "run"
    job = submit(cluster, corpus, workdir)
    wait_for_step(workdir, 5)
    job.requeue()
    slurm.wait_until(
        lambda: job.fields["Restarts"] == "1" and not job.step_daemons(), "the requeue", 120
    )
    wait_for_step(workdir, steps(workdir)[-1][0] + 3, job)
    assert kill(f"train.main.*--workdir={workdir}", most=1)
    log = finish(job, workdir)
    assert "SIGTERM: finishing this step, saving, and stopping" in log
    assert "restarting from the last checkpoint" in log
    assert steps(workdir) == undisturbed


@pytest.mark.slow
@pytest.mark.thorough
def test_step_daemon_killed_with_its_process_does_not_end_the_job(
    cluster, corpus, undisturbed, tmp_path
):
    workdir = tmp_path / "run"
    job = submit(cluster, corpus, workdir)
    wait_for_step(workdir, 12)
    daemon = job.step_daemons("[0-9]")[-1]  # numbered steps only, without the batch script's
    process = subprocess.run(["pgrep", "-P", str(daemon)], capture_output=True, text=True).stdout
    for pid in (daemon, int(process)):
        os.kill(pid, signal.SIGKILL)
    log = finish(job, workdir)
    assert "restarting from the last checkpoint" in log
    assert steps(workdir) == undisturbed


@pytest.mark.slow  # SLURM checks time limits once a minute
@pytest.mark.thorough
def test_time_limit_saves_and_requeues_the_job(cluster, corpus, tmp_path):
    workdir = tmp_path / "run"
    # SLURM checks time limits once a minute, so the run has to last longer.
    slow = ("train.num_steps=1000", "eval.every_steps=1", "checkpoint.every_steps=1")
    job = submit(cluster, corpus, workdir, "--time=60", changes=slow)
    wait_for_step(workdir, 5)
    # The script asks for a signal two minutes before the time limit, so SLURM signals it soon.
    job.set_time_limit(job.minutes_run + 2)
    slurm.wait_until(lambda: job.fields["Restarts"] == "1", "the end of its time", timeout_s=300)
    job.set_time_limit(60)
    num_saved = len(steps(workdir))
    wait_for_step(workdir, num_saved + 3, job)
    job.cancel()
    slurm.wait_until(lambda: not job.step_daemons(), "the end of all processes", timeout_s=120)
    assert "requeueing the job" in Path(f"{workdir}.log").read_text()
    done = [step for step, _ in steps(workdir)]
    assert done == list(range(1, len(done) + 1))
    evaluated = [m["step"] for m in read_metrics(workdir / METRICS_FILE) if "eval_loss" in m]
    assert evaluated in (done, done[:-1])


def kill(pattern: str, most: int) -> list[int]:
    """Kill at most `most` Python processes with SIGKILL, and return their process ids."""
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()
    own = [int(p) for p in found if "python" in Path(f"/proc/{p}/comm").read_text()][:most]
    for pid in own:
        os.kill(pid, signal.SIGKILL)
    return own
