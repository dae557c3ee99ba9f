"""Eight simulated CPU devices for every test, chosen before jax looks for any."""

import gc
import logging
import os
import platform

import jax
import pytest

from sharding.distributed.startup import CPU_XLA_FLAGS
from tests.runs import write_corpus

# The machine code of tests runs for a moment, and making it took two thirds of all time. What XLA
# makes of a program before that, its collectives, memory and FLOPs, is the same.
_FLAGS = {**CPU_XLA_FLAGS, "xla_backend_optimization_level": 0}
if platform.machine() == "x86_64":
    # The emitters before those of today compile twice as fast. They fuse a product with a sum where
    # the processor can, in one program and not in another, so that the last bit of an initial value
    # would hang on the mesh: plain AVX cannot.
    _FLAGS["xla_cpu_max_isa"] = "AVX"
    if jax.__version_info__ < (0, 11):  # later ones have no others
        _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
os.environ["XLA_FLAGS"] = " ".join(f"--{name}={value}" for name, value in _FLAGS.items())
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# The lines of code that each operation came from are a tenth of making a program.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Millions of objects are what jax keeps of programs, to be looked through again and again.
gc.set_threshold(100_000, 20, 100)
jax.devices()  # now, before a test of the command line could choose another number


@pytest.fixture(scope="session")
def corpus_overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that train on a little text of their own, with their own cache."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps what is compiled, so that tests with a program in common compile it once.

    Each process keeps its own: jax may read a file that another process is still writing.
    """
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True)
def log_handlers():
    """Takes away the handlers that a command line set up: they hold on to a closed stream."""
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long tests first, so that no worker is left alone with them at the end."""
    long = ("slurm", "stopping", "resume", "parity", "main", "step")
    items.sort(key=lambda item: not item.path.stem.endswith(long))
