"""Sums over manual mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding import hardware


def psum(tree: Any, axes: tuple[str, ...]) -> Any:
    """Return `tree` summed over `axes`, in its own dtypes; unchanged if `axes` is empty.

    On CPUs, floats narrower than float32 are summed in float32. XLA's own promotion of such sums
    aborts on CPUs if the mesh is only partly manual ("Invalid binary instruction opcode copy").
    """
    if not axes:
        return tree
    is_cpu = hardware.current().runs_on_cpu

    def summed(x: jax.Array) -> jax.Array:
        if is_cpu and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
            return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)
        return jax.lax.psum(x, axes)

    return jax.tree.map(summed, tree)
