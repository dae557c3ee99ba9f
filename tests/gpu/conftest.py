"""Skips tests that need XLA's GPU compiler if it is not installed (`make test-compiler` does so).

These tests compile for described GPUs; no GPU is needed.
"""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from predict.machines.targets import has_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="jax[cuda12] is not installed; run make test-compiler")
    for item in items:
        if "gpu_compiler" in item.keywords and not has_compiler():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_compilation_cache(compiled_programs):
    """Compile every program anew: jax cannot load one from its cache for GPUs that are absent."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks only once whether its cache is enabled
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
