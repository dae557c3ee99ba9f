"""Skips tests that run on a real GPU if there is none (`make test-device` runs them)."""

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="there is no GPU here; run make test-device where there is one")
    for item in items:
        if "gpu_device" in item.keywords and jax.default_backend() != "gpu":
            item.add_marker(skip)
