"""Lets the tests of estimates count arrays only: no gaps, no workspaces."""

import pytest


@pytest.fixture(autouse=True)
def only_arrays(monkeypatch):
    monkeypatch.setattr("predict.memory.memory_estimate.GAPS_SHARE", 0)
    monkeypatch.setattr("predict.memory.memory_estimate.GPU_GAPS_SHARE", 0)
    monkeypatch.setattr("predict.memory.kernels.WORKSPACE_BYTES", 0)
    monkeypatch.setattr("predict.memory.kernels.SLICED_WORKSPACE_BYTES", 0)
