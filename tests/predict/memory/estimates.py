"""Estimates small functions for tests."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from predict.memory.jaxpr import open_jaxpr
from predict.memory.memory_estimate import Estimate, estimate
from sharding.mesh import MeshConfig, make_mesh

KIB = 1024
P = PartitionSpec


def estimate_of(function, *args, mesh=None, platform="gpu") -> Estimate:
    """Estimate a function of float32 arguments, given as a shape or as (shape, partition spec)."""
    mesh = mesh or make_mesh(MeshConfig(), jax.devices())
    structs = []
    for arg in args:
        shape, spec = arg if isinstance(arg[0], tuple) else (arg, P())
        sharding = NamedSharding(mesh, spec)
        structs.append(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*structs)
    program = open_jaxpr(traced.jaxpr, structs)
    labels = ["parameters"] * len(structs)
    return estimate(program, labels, mesh.shape, platform=platform)
