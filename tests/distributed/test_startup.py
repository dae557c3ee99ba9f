"""Which devices jax is made to look for, and the checks of their number and platform."""

import types
from typing import Any

import jax
import pytest

from distributed import startup
from sharding.mesh import MeshConfig


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that describes a machine: jax's plugins, and whether it has a GPU."""

    def describe(*plugins: str, has_gpu: bool = False, platforms: str | None = None) -> None:
        for plugin in (*plugins, "__pycache__"):
            (tmp_path / plugin).mkdir()
        found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        specs = {"jax_plugins": found if plugins else None, "libtpu": None}
        monkeypatch.setattr("importlib.util.find_spec", specs.__getitem__)
        monkeypatch.setattr(startup, "_has_nvidia_gpu", lambda: has_gpu)
        jax.config.update("jax_platforms", platforms)

    config: Any = jax.config
    before = config.jax_platforms
    yield describe
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("plugins", "has_gpu", "platforms", "expected"),
    [
        (("xla_cuda12",), False, None, "cpu"),
        (("xla_cuda12",), True, None, None),
        (("xla_cuda12",), False, "cuda", "cuda"),
        (("xla_cuda12", "xla_rocm7"), False, None, None),
        ((), False, None, None),
    ],
)
def test_cpus_are_used_if_the_plugin_finds_no_gpu(machine, plugins, has_gpu, platforms, expected):
    machine(*plugins, has_gpu=has_gpu, platforms=platforms)
    startup.skip_absent_gpus()
    config: Any = jax.config  # its fields are added when jax is imported
    assert config.jax_platforms == expected


@pytest.mark.parametrize("value", ["x", "0", "1000000"])
def test_number_of_simulated_devices_is_checked(value, monkeypatch):
    monkeypatch.setenv("TAIBAI_DEVICES_PER_PROCESS", value)
    with pytest.raises(ValueError, match=f"PROCESS='{value}' must be an integer from 1 to 512"):
        startup.start(MeshConfig())


def test_unknown_platform_is_refused(monkeypatch):
    def fail():
        raise RuntimeError("'foo' is not in the list of known backends")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(ValueError, match="JAX_PLATFORMS=.* names an unknown platform .*; correct"):
        startup.start(MeshConfig())
