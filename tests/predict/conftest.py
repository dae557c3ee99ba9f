"""The mesh of tests that compile a program for 8 simulated devices."""

import jax
import pytest

from sharding.mesh import MeshConfig, make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(pipeline=2, data=2, model=2), jax.devices())
