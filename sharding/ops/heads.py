"""Attention over a mesh: every device computes some of the heads.

XLA cannot partition a custom kernel, such as cuDNN's attention. Attention therefore runs inside a
`shard_map` over the axes that are still automatic, with the heads split over `model`.

Groups of devices of `context` (sequence.py) may also exchange parts of their sequence for heads:
an all-to-all before attention, and one after it. With groups of h devices:

    outside attention   [B, T, N / model, H]              T tokens of a device
    inside attention    [B, T · h, N / (model · h), H]    T · h tokens of a group

In a generation, `context` is automatic. Its devices are then one such group, and XLA inserts the
all-to-alls.

B batch, T query seq, S key seq, N heads, K key-value heads, H head dim.

Source: Jacobs et al. 2023 (arXiv:2309.14509), DeepSpeed-Ulysses, section 3.1.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.logical import automatic_axes
from sharding.mesh import AnyMesh
from sharding.ops.sequence import AXIS, SequenceSplit


def over_heads(
    function: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias: Any,
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Call `function(q, k, v, bias, segments)` with each device computing its own heads.

    Outside a mesh, or if no mesh axis is automatic, the function is called directly. If an axis
    does not divide the heads, all its devices compute the same heads. Key-value heads that the axes
    do not divide are repeated until they do.

    Args:
        function: takes the arrays with the heads of one device, and returns `[B, T, N, H]` for
            these heads.
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        bias: of the logits: a tree of arrays whose second dim is N heads or 1, or None.
        segments: int32[B, T] and int32[B, S], segment ids of queries and keys, or None.

    Returns:
        The attention output of all heads, `[B, T, N, H]`.
    """
    heads_axes = (*automatic_axes("heads"), *automatic_axes("act_branch"))
    axes = (*heads_axes, *(a for a in automatic_axes("seq") if a not in heads_axes))
    if not axes:
        return function(q_BTNH, k_BSKH, v_BSKH, bias, segments)
    mesh = jax.sharding.get_abstract_mesh()
    split, repeats = _split_heads(q_BTNH.shape[2], k_BSKH.shape[2], axes, mesh)
    if repeats > 1:
        k_BSKH = jnp.repeat(k_BSKH, repeats, axis=2)
        v_BSKH = jnp.repeat(v_BSKH, repeats, axis=2)
    heads = PartitionSpec(None, None, split or None)
    heads_of_bias = PartitionSpec(None, split or None)
    whole = PartitionSpec()
    bias_specs = jax.tree.map(lambda x: heads_of_bias if x.shape[1] > 1 else whole, bias)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(heads, heads, heads, bias_specs, whole),
        out_specs=heads,
        axis_names=set(axes),
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, bias, segments)


def _split_heads(
    num_heads: int, num_kv_heads: int, axes: Sequence[str], mesh: Any
) -> tuple[tuple[str, ...], int]:
    """Return (axes that split the heads, how often key-value heads are repeated before)."""
    split: tuple[str, ...] = ()
    for axis in axes:
        if num_heads % math.prod(mesh.shape[a] for a in (*split, axis)) == 0:
            split = (*split, axis)
    count = math.prod(mesh.shape[axis] for axis in split)
    return split, count // math.gcd(count, num_kv_heads)


def heads_on_one_device(
    num_heads: int, num_kv_heads: int, axes: Sequence[str], mesh: AnyMesh
) -> tuple[int, int]:
    """Return the number of heads and of key-value heads that `over_heads` gives to a device.

    Args:
        num_heads: N.
        num_kv_heads: K.
        axes: automatic mesh axes of the heads.
    """
    split, repeats = _split_heads(num_heads, num_kv_heads, axes, mesh)
    count = math.prod(mesh.shape[axis] for axis in split)
    return num_heads // count, num_kv_heads * repeats // count


def tokens_for_heads(x_BTNH: jax.Array, split: SequenceSplit) -> jax.Array:
    """Exchange heads for tokens within a group of devices.

    Args:
        x_BTNH: tokens of this device; its group's size divides N.
        split: how sequences are divided.

    Returns:
        The tokens of the group, and the N / h heads of this device, `[B, T · h, N / h, H]`.
    """
    return _exchange(x_BTNH, split, split_dim=2, joined_dim=1)


def heads_for_tokens(x_BTNH: jax.Array, split: SequenceSplit) -> jax.Array:
    """Exchange tokens for heads: the inverse of `tokens_for_heads`."""
    return _exchange(x_BTNH, split, split_dim=1, joined_dim=2)


def _exchange(x: jax.Array, split: SequenceSplit, *, split_dim: int, joined_dim: int) -> jax.Array:
    groups = split.groups if split.ring_size > 1 else None
    return jax.lax.all_to_all(x, AXIS, split_dim, joined_dim, axis_index_groups=groups, tiled=True)


def group_tokens(x_BT: jax.Array, split: SequenceSplit) -> jax.Array:
    """Gather an array of tokens, such as segment ids, over a group of devices."""
    groups = split.groups if split.ring_size > 1 else None
    return jax.lax.all_gather(x_BT, AXIS, axis=1, axis_index_groups=groups, tiled=True)


def heads_of_device(x: jax.Array, split: SequenceSplit) -> jax.Array:
    """Return the part of an array `[·, N, ...]` that belongs to the heads of `tokens_for_heads`."""
    count = x.shape[1] // split.group_size
    start = jax.lax.axis_index(AXIS) % split.group_size * count
    return jax.lax.dynamic_slice_in_dim(x, start, count, 1)
