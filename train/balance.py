"""Layers per stage such that the busiest stage does least: pipeline.layers_per_stage=auto."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.flops import traced_flops
from models.stack import Parts
from sharding.pipeline.layout import balanced_cut

_log = logging.getLogger(__name__)

Tree = Any


def balanced_layers(
    parts: Parts,
    params: Tree,
    batch: dict[str, jax.ShapeDtypeStruct],
    num_chunks: int,
    *,
    recomputes: bool,
    shares_ends: bool,
) -> list[int]:
    """Returns the numbers of layers per chunk, in the order of the layers.

    Every matrix product of embedding, blocks and head is counted as traced, forward and backward.

    Args:
      params: the model's, in the dtype that it computes in; ShapeDtypeStructs do.
      batch: one microbatch, as the model gets it; ShapeDtypeStructs do.
      num_chunks: of all stages together.
      recomputes: a chunk's forward runs again in its backward.
      shares_ends: all stages share embedding and head.
    """
    cut = parts.split(params)
    x = jax.eval_shape(parts.embed, cut["ends"], batch)
    layer_flops = []
    for name, num_layers in parts.num_layers.items():
        layer = jax.tree.map(_without_first_dim, cut["layers"][name])
        block = parts.blocks[name]
        arguments = (layer, x, batch, jax.ShapeDtypeStruct((), jnp.int32))
        count = traced_flops(_with_backward(block, 2), *arguments, x)
        layer_flops += [count + recomputes * traced_flops(block, *arguments)] * num_layers
    ends = (0, 0)
    if not shares_ends:
        head = jax.grad(lambda ends, x, batch: parts.head(ends, x, batch)[0], argnums=(0, 1))
        ends = (
            traced_flops(_with_backward(parts.embed, 1), cut["ends"], batch, x),
            traced_flops(head, cut["ends"], x, batch),
        )
    counts = balanced_cut(layer_flops, num_chunks, ends)
    _log.info(
        "stages  layers %s: a layer costs %.3g FLOPs a microbatch, embedding %.3g, head %.3g",
        ", ".join(map(str, counts)),
        layer_flops[0],
        *ends,
    )
    return counts


def _with_backward(function: Callable, num_inputs: int) -> Callable:
    """Returns `f(*args, dy)`: the gradients of the first `num_inputs` arguments."""

    def run(*args):
        inputs, rest, dy = args[:num_inputs], args[num_inputs:-1], args[-1]
        return jax.vjp(lambda *inputs: function(*inputs, *rest), *inputs)[1](dy)

    return run


def _without_first_dim(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
