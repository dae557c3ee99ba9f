"""Lets the tests of estimates count arrays only: no gaps, no workspaces."""

import pytest


@pytest.fixture(autouse=True)
def only_arrays(monkeypatch):
    monkeypatch.setattr("sharding.estimate.memory_estimate.GAPS_SHARE", 0)
    monkeypatch.setattr("sharding.estimate.memory_estimate.GPU_GAPS_SHARE", 0)
    monkeypatch.setattr("sharding.estimate.kernels.WORKSPACE_BYTES", 0)
    monkeypatch.setattr("sharding.estimate.kernels.SLICED_WORKSPACE_BYTES", 0)
