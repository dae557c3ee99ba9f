"""Fixtures for tests of checkpoints: open ones, saved ones, and copies to be damaged."""

import shutil
from pathlib import Path

import pytest

from checkpoint.manager import Checkpoints
from tests.checkpoint.states import KEEP, make_mesh, make_state


@pytest.fixture
def open_checkpoints():
    """A function that opens `Checkpoints`, which are closed after the test."""
    opened = []

    def open_(directory, config=KEEP):
        opened.append(Checkpoints(directory, config))
        return opened[-1]

    yield open_
    for checkpoints in opened:
        checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Checkpoints 1 and 2, saved on a 2×2×2 mesh. Tests that change them must work on a copy."""
    directory = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    checkpoints = Checkpoints(directory, KEEP)
    for step in (1, 2):
        state = make_state(step, make_mesh(2, 2, 2))
        checkpoints.save(step, state, {"position": step}, config=f"train: {{num_steps: {step}}}")
    checkpoints.close()
    return directory


@pytest.fixture
def damaged_copy(two_steps, tmp_path):
    def copy(name="copy"):
        return Path(shutil.copytree(two_steps, tmp_path / name))

    return copy
