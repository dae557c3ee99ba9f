"""Attention over a mesh: every device computes some of the heads for the whole sequence.

XLA cannot partition a custom kernel, such as cuDNN's attention. Attention therefore runs inside a
`shard_map` over the axes that are still automatic, with the heads split over `model` and also over
`context`. Everywhere else the sequence is split over `context`, so XLA inserts an all-to-all before
attention, which exchanges parts of the sequence for heads, and one after it:

    outside attention   [B, T / context, N / model, H]
    inside attention    [B, T, N / (model · context), H]

B batch, T query seq, S key seq, N heads, K key-value heads, H head dim.

Source: Jacobs et al. 2023 (arXiv:2309.14509), DeepSpeed-Ulysses, section 3.1.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.logical import automatic_axes


def over_heads(
    function: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias_BNTS: jax.Array | None,
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
        bias_BNTS: additive bias of the logits, with N heads or 1, or None.
        segments: int32[B, T] and int32[B, S], segment ids of queries and keys, or None.

    Returns:
        The attention output of all heads, `[B, T, N, H]`.
    """
    heads_axes = automatic_axes("heads")
    axes = (*heads_axes, *(a for a in automatic_axes("seq") if a not in heads_axes))
    if not axes:
        return function(q_BTNH, k_BSKH, v_BSKH, bias_BNTS, segments)
    mesh = jax.sharding.get_abstract_mesh()
    num_heads = q_BTNH.shape[2]
    num_kv_heads = k_BSKH.shape[2]
    split: tuple[str, ...] = ()
    for axis in axes:
        if num_heads % math.prod(mesh.shape[a] for a in (*split, axis)) == 0:
            split = (*split, axis)
    count = math.prod(mesh.shape[axis] for axis in split)
    repeats = count // math.gcd(count, num_kv_heads)
    if repeats > 1:
        k_BSKH = jnp.repeat(k_BSKH, repeats, axis=2)
        v_BSKH = jnp.repeat(v_BSKH, repeats, axis=2)
    heads = PartitionSpec(None, None, split or None)
    whole = PartitionSpec()
    bias: Any = whole
    if bias_BNTS is not None and bias_BNTS.shape[1] > 1:
        bias = PartitionSpec(None, split or None)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(heads, heads, heads, bias, whole),
        out_specs=heads,
        axis_names=set(axes),
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, bias_BNTS, segments)
