"""`mesh.auto=True` in a run: equal losses, a plan that is kept, and a new one for new devices."""

import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from sharding.mesh import AXES
from tests.runs import CONFIG, FLOAT64, ROOT, TINY
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.drawn(2, among="thorough")

#: A small space, so that few steps are compiled.
FIXED = (
    "train.num_microbatches=2",
    "train.remat=none",
    "memory.zero_stage=0",
    "pipeline.schedule=1f1b",
    "mesh.model=2",
)


def run(workdir, overrides, *, devices: int, num_steps: int) -> str:
    """Train in a process that finds this many CPU devices; return its log."""
    flags = [f"--config.{each}" for each in (*TINY, *FLOAT64, *overrides)]
    command = [sys.executable, "-m", "train.main", f"--config={CONFIG}", f"--workdir={workdir}"]
    command += [*flags, f"--config.train.num_steps={num_steps}"]
    command += ["--config.checkpoint.every_steps=2"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(workdir) -> list[float]:
    entries = read_metrics(workdir / "metrics.jsonl")
    return [entry["loss"] for entry in entries if "loss" in entry]


def mesh_in(workdir) -> dict:
    return yaml.safe_load((workdir / "config.yaml").read_text())["mesh"]


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_planned_run_has_the_losses_of_one_device_and_resumes_with_a_new_plan(
    corpus_overrides, tmp_path
):
    one = tmp_path / "one"
    run(one, corpus_overrides, devices=1, num_steps=6)
    auto = (*corpus_overrides, "mesh.auto=True", *FIXED)
    workdir = tmp_path / "auto"

    log = run(workdir, auto, devices=8, num_steps=3)
    assert "chooses the mesh for 8 × cpu" in log
    first = mesh_in(workdir)
    assert first["auto"] and first["model"] == 2
    sizes = {axis: first[axis] for axis in AXES}
    assert np.prod([*sizes.values()]) == 8

    log = run(workdir, auto, devices=8, num_steps=4)
    assert "kept from the workdir" in log and "compiles" not in log
    assert mesh_in(workdir) == first

    log = run(workdir, auto, devices=4, num_steps=6)
    assert "it is for 8 devices, and 4 were found" in log
    assert np.prod([mesh_in(workdir)[axis] for axis in sizes]) == 4
    np.testing.assert_allclose(losses(workdir), losses(one), rtol=0, atol=1e-9)


@pytest.mark.thorough
def test_plans_use_all_devices_if_they_exceed_the_batch_or_data_is_fixed(
    corpus_overrides, tmp_path
):
    fixed = [each for each in FIXED if each != "mesh.model=2"]
    auto = (*corpus_overrides, "mesh.auto=True", *fixed, "mesh.data=2", "data.global_batch_size=4")
    run(tmp_path, auto, devices=8, num_steps=2)
    section = mesh_in(tmp_path)
    sizes = {axis: section[axis] for axis in AXES}
    assert sizes["data"] == 2 and np.prod([*sizes.values()]) == 8


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_batch_size_of_a_deepspeed_json_counts_all_devices(corpus_overrides, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 8}')
    overrides = [each for each in TINY if "global_batch_size" not in each]
    flags = [f"--config.{each}" for each in (*overrides, *corpus_overrides, *FIXED)]
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "train.main", f"--config={CONFIG}", f"--workdir={workdir}"]
    command += [f"--deepspeed={file}", *flags, "--config.mesh.auto=True"]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [*command, "--config.train.num_steps=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env=variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = yaml.safe_load((workdir / "config.yaml").read_text())
    # mesh.model=2 and train.num_microbatches=2 are fixed on the command line: 2 replicas.
    assert config["data"]["global_batch_size"] == 8 * 2 * 2
