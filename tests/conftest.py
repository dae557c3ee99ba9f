"""Eight simulated CPU devices for every test, chosen before jax looks for any."""

import os

os.environ["XLA_FLAGS"] = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300"
    " --xla_cpu_collective_timeout_seconds=300"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now, before a test of the command line could choose another number

import pytest  # noqa: E402

from tests.runs import write_corpus  # noqa: E402


@pytest.fixture(scope="session")
def corpus_overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that train on a little text of their own, with their own cache."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))
