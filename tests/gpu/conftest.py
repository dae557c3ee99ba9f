"""Skips tests that need XLA's GPU compiler if it is not installed (`make test-compiler` does so).

These tests compile for described GPUs; no GPU is needed.
"""

import pytest

from sharding.analysis.targets import has_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="jax[cuda12] is not installed; run make test-compiler")
    for item in items:
        if "gpu_compiler" in item.keywords and not has_compiler():
            item.add_marker(skip)
