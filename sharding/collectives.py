"""Sums over mesh axes that are handled by hand."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding import hardware


def psum(tree: Any, axes: tuple[str, ...]) -> Any:
    """Returns `tree` summed over `axes`, in its own dtypes; as it is if there are none.

    On CPUs what is narrower than float32 is summed in float32: XLA's promotion of such sums aborts
    there on meshes that are manual in part ("Invalid binary instruction opcode copy").
    """
    if not axes:
        return tree
    is_cpu = hardware.current().runs_on_cpu

    def summed(x: jax.Array) -> jax.Array:
        if is_cpu and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
            return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)
        return jax.lax.psum(x, axes)

    return jax.tree.map(summed, tree)
