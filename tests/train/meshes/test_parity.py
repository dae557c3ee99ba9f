"""Parity: the same config has the same initial parameters and losses on every mesh."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.runs import (
    CONFIG,
    FLOAT64,
    ROOT,
    TINY,
    digest,
    losses,
    make_run,
    reference_digest,
    reference_losses,
)

NUM_STEPS = 20
MESHES = {
    "data=8": ("mesh.data=8",),
    "model=4": ("mesh.model=4",),
    "pipeline=4 1f1b": ("mesh.pipeline=4", "train.num_microbatches=4"),
    "pipeline=4 gpipe": ("mesh.pipeline=4", "pipeline.schedule=gpipe"),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2", "train.num_microbatches=4"),
    "vocab over fsdp": (
        "mesh.fsdp=2",
        "mesh.model=2",
        "rules.vocab=['model', 'fsdp']",
        "rules.embed=none",
    ),
    "fsdp 2x2x2": ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.model=2"),
    "context 2x2x2": ("mesh.pipeline=2", "mesh.context=2", "mesh.data=2"),
    "remat": ("train.remat=stage,full", "mesh.pipeline=2"),
    "unrolled ZeRO 3": (
        "mesh.data=2",
        "mesh.context=2",
        "mesh.model=2",
        "memory.zero_stage=3",
        "train.remat=none",
        "train.unroll=True",
    ),
    "unrolled microbatches": (
        "mesh.fsdp=4",
        "train.num_microbatches=2",
        "train.remat=stage,full",
        "train.unroll=True",
    ),
    # Simulated devices must begin with the same one of a send and the gathers of the next stage.
    "2D zero bubble": (
        "mesh.pipeline=2",
        "mesh.model=4",
        "tensor.mode=2d",
        "pipeline.schedule=zero_bubble",
        "train.num_microbatches=4",
    ),
    "3D": ("mesh.model=8", "tensor.mode=3d"),
    "2D stationary": ("mesh.data=2", "mesh.model=4", "tensor.mode=2d_stationary"),
    "whole tokens 2x2x2": (
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.model=2",
        "train.num_microbatches=4",
        "rules.act_tokens=none",
        "train.remat=none",
    ),
}
#: Meshes that CI also trains in float32, which cover every axis; `-m slow` adds the others.
IN_FLOAT32 = {"2x2x2", "vocab over fsdp", "context 2x2x2"}
#: Rounding errors in float64 are about 1e-16 per sum. 20 steps of Adam amplify them, but bugs cause
#: far larger differences.
FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-4


@pytest.mark.thorough(but=["2x2x2"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_equal_one_device_float64(mesh, corpus_overrides):
    with jax.enable_x64(True):
        base = (*TINY, *corpus_overrides, *FLOAT64)
        expected = reference_losses(base, NUM_STEPS)
        run, corpus = make_run((*base, *MESHES[mesh]))
        np.testing.assert_allclose(
            losses(run, corpus, NUM_STEPS), expected, rtol=FLOAT64_TOLERANCE, atol=0
        )
        assert expected[-1] < 0.9 * expected[0]


@pytest.mark.thorough(but=["data=8", "pipeline=4 gpipe"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_initial_parameters_equal_one_device_to_the_bit(mesh, corpus_overrides):
    base = (*TINY, *corpus_overrides)
    run, _ = make_run((*base, *MESHES[mesh]))
    assert digest(run.state_layout.initial().params) == reference_digest(base)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[pytest.mark.slow] * (mesh not in IN_FLOAT32)) for mesh in MESHES],
)
def test_losses_equal_one_device_float32(mesh, corpus_overrides):
    base = (*TINY, *corpus_overrides)
    found = losses(*make_run((*base, *MESHES[mesh])), NUM_STEPS)
    expected = reference_losses(base, NUM_STEPS)
    np.testing.assert_allclose(found, expected, rtol=FLOAT32_TOLERANCE, atol=0)


def launch(*command: str) -> str:
    """Run a command as 2 processes with 4 devices each; return its output."""
    script = [sys.executable, "-m", "launch.local", "--processes=2", "--devices_per_process=4"]
    done = subprocess.run(
        [*script, "--", sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_two_processes_start_from_the_same_bits(corpus_overrides):
    base = (*TINY, *corpus_overrides)
    printed = launch("-m", "tests.print_digest", *base, *MESHES["2x2x2"])
    assert f"digest {reference_digest(base)}\n" in printed


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.slow(only=["float32"])
@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_two_processes_equal_one_device(precision, corpus_overrides, tmp_path):
    base = (*TINY, *corpus_overrides, *(FLOAT64 if precision == "float64" else ()))
    flags = [f"--config.{o}" for o in (*base, *MESHES["2x2x2"])]
    launch("-m", "train.main", f"--config={CONFIG}", f"--workdir={tmp_path}", *flags)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    values = [line["loss"] for line in lines if "loss" in line]
    with jax.enable_x64(precision == "float64"):
        expected = reference_losses(base, NUM_STEPS)
    tolerance = FLOAT64_TOLERANCE if precision == "float64" else FLOAT32_TOLERANCE
    np.testing.assert_allclose(values, expected, rtol=tolerance, atol=0)
