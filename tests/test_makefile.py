"""Which requirements `make setup` installs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.runs import ROOT


def dry_run(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return the commands that `make -n` prints in a folder that has nothing installed."""
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, directory)
    return subprocess.run(
        ["make", "-n", *arguments],
        cwd=directory,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("choice", "file"), [("CUDA=1", "requirements.txt"), ("CUDA=0", "requirements-cpu.txt")]
)
@pytest.mark.parametrize("target", ["setup", "train"])
def test_cuda_chooses_the_requirements(choice, file, target, tmp_path):
    commands = dry_run(tmp_path, target, choice).stdout
    assert re.findall(r"pip install .* -r (\S+)", commands) == [file]


def test_driver_of_the_machine_decides_by_default(tmp_path):
    has_driver = Path("/proc/driver/nvidia/version").exists()
    file = "requirements.txt" if has_driver else "requirements-cpu.txt"
    # A module system may set a variable of this name.
    done = dry_run(tmp_path, "setup", CUDA="/usr/local/cuda")
    assert re.findall(r"pip install .* -r (\S+)", done.stdout) == [file], done.stderr


def test_other_values_are_refused(tmp_path):
    done = dry_run(tmp_path, "setup", "CUDA=yes")
    assert done.returncode == 2 and not done.stdout
    assert "CUDA=yes must be 1, for NVIDIA GPUs, or 0, for CPUs" in done.stderr
