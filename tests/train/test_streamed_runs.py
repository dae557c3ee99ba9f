"""Runs on streamed text: kills, other meshes and several processes do not change their losses."""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.data.text.streaming.watching import watching
from tests.launch.launcher import variables
from tests.runs import CONFIG, FLOAT64, ROOT, TINY, arguments, losses, make_run, reference_losses
from tests.stores import BUCKET, S3Server, running_server
from train.config.config_files import load
from train.config.schema import validate_config
from train.lifecycle.exit_codes import FINISHED
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.drawn(2, among="thorough")

STREAMED = (
    *TINY,
    "data.streaming=True",
    "data.validation_fraction=0",
    "data.shuffle_window=8",
    "train.num_steps=120",
    "checkpoint.every_steps=20",
    "eval.every_steps=40",
)
NUM_SHARDS = 12
_LONGEST_S = 300.0


def shards() -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of shards of 1 to 3 KB of text."""
    text = Path(json.__file__).with_name("decoder.py").read_text()
    for number in range(NUM_SHARDS):
        part = text[number * 800 : number * 800 + 1000 + 160 * number]
        lines = "".join(json.dumps({"text": line}) + "\n" for line in part.splitlines() if line)
        yield f"{number:02d}.jsonl.gz", gzip.compress(lines.encode())


@pytest.fixture
def local_shards(tmp_path) -> tuple[str, ...]:
    for name, content in shards():
        (tmp_path / name).write_bytes(content)
    return (f"data.paths={tmp_path}/*.jsonl.gz", f"data.cache_dir={tmp_path}/cache")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as server:
        for name, content in shards():
            server.put(f"texts/{name}", content)
        server.put("held_out.txt", b"Some text that the runs are evaluated on.\n" * 20)
        yield server


def run(server: S3Server, workdir: Path, *settings: str, cache: str) -> subprocess.Popen:
    """Start a run on the shards in the store."""
    paths = (
        f"data.paths=s3://{BUCKET}/texts/*.jsonl.gz",
        f"data.validation_paths=s3://{BUCKET}/held_out.txt",
        f"data.cache_dir={workdir.parent / cache}",
    )
    command = ["train.main", *arguments(workdir, (*STREAMED, *paths, *settings))]
    with open(f"{workdir}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=variables(**server.variables),
            stdout=log,
            stderr=log,
        )


def trajectory(workdir: Path) -> dict[tuple[int, str], float]:
    """Return the losses of steps and of evaluations."""
    return {
        (line["step"], key): line[key]
        for line in read_metrics(workdir / "metrics.jsonl")
        for key in ("loss", "eval_loss")
        if key in line
    }


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_killed_run_on_a_store_has_the_same_losses_with_a_small_cache(server, tmp_path):
    """To the bit. The tokens of all shards take more than the cache, whose bound always holds."""
    undisturbed = tmp_path / "undisturbed"
    assert run(server, undisturbed, cache="whole").wait(_LONGEST_S) == FINISHED
    tokens = [*(tmp_path / "whole" / "streams").glob("*.tokens")]
    sizes = [file.stat().st_size for file in tokens]
    bound = 5 * (max(sizes) + 1000 + 2**10)
    assert len(tokens) == NUM_SHARDS and sum(sizes) > bound
    killed = tmp_path / "killed"
    settings = (f"data.cache_gb={bound / 1e9}", "data.num_workers=3")
    with watching(tmp_path / "small" / "streams") as measured:
        process = run(server, killed, *settings, cache="small")
        while not (killed / "checkpoints" / "20").exists():
            assert process.poll() is None, Path(f"{killed}.log").read_text()
            time.sleep(0.01)
        process.kill()
        process.wait()
        resumed = run(server, killed, *settings, cache="small")
        assert resumed.wait(_LONGEST_S) == FINISHED, Path(f"{killed}.log").read_text()
    assert "resuming from there" in (log := Path(f"{killed}.log").read_text())
    assert f"streamed from {NUM_SHARDS} shards" in log and "epochs  unknown" in log
    assert trajectory(killed) == trajectory(undisturbed)
    assert len(trajectory(killed)) == 120 + 3
    assert sum(sizes) / 3 < max(measured) <= bound


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["2x2x2", "data=8"])
def test_losses_on_another_mesh_equal_one_device(mesh, local_shards):
    meshes = {
        "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
        "data=8": ("mesh.data=8", "train.num_microbatches=1"),
    }
    with jax.enable_x64(True):
        base = (*STREAMED, *local_shards, *FLOAT64)
        expected = reference_losses(base, 6)
        # Rounding of sums in float64, as in tests/train/meshes/test_parity.py.
        np.testing.assert_allclose(
            losses(*make_run((*base, *meshes[mesh])), 6), expected, rtol=1e-9, atol=0
        )


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_two_processes_equal_one_device(local_shards, tmp_path):
    base = (*STREAMED, *local_shards, *FLOAT64, "train.num_steps=12", "data.cache_gb=5e-5")
    launch = ["-m", "launch.local", "--processes=2", "--devices_per_process=4", "--"]
    command = [sys.executable, *launch, sys.executable, "-m", "train.main"]
    command += arguments(tmp_path / "run", (*base, "mesh.data=4", "mesh.model=2"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LONGEST_S)
    assert done.returncode == 0, done.stdout + done.stderr
    values = [m["loss"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in m]
    with jax.enable_x64(True):
        np.testing.assert_allclose(values, reference_losses(base, 12), rtol=1e-9, atol=0)


def test_epochs_of_streamed_text_are_refused():
    settings = [each for each in STREAMED if not each.startswith("train.num_steps")]
    with pytest.raises(
        ValueError, match="train.num_epochs=2.0: with data.streaming=True, the length"
    ):
        validate_config(load(CONFIG, [*settings, "data.paths=a.txt", "train.num_epochs=2"]))
