"""Tests that compile for GPUs, without one: `make test-compiler` installs the compiler for them."""

import pytest

from sharding.analysis.targets import has_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="jax[cuda12] is not installed; run make test-compiler")
    for item in items:
        if "gpu_compiler" in item.keywords and not has_compiler():
            item.add_marker(skip)
