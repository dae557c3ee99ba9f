"""How much each stage has to do, and the cut of the layers with which the busiest does least."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.flops import traced_flops
from models.stack import Parts
from sharding.pipeline.layout import balanced_cut

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Matrix products of one microbatch, in FLOPs, forward and backward."""

    layers: tuple[int, ...]
    embed: int
    head: int

    def of_chunks(self, counts: Sequence[int], *, shares_ends: bool) -> list[float]:
        """Returns the work of every chunk that has so many layers, with its part of the ends."""
        chunks, first = [], 0
        for count in counts:
            chunks.append(float(sum(self.layers[first : first + count])))
            first += count
        if shares_ends:
            return [work + (self.embed + self.head) / len(counts) for work in chunks]
        chunks[0] += self.embed
        chunks[-1] += self.head
        return chunks

    def balanced(self, num_chunks: int, *, shares_ends: bool) -> list[int]:
        """Returns the numbers of layers per chunk, in the order of the layers."""
        ends = (0, 0) if shares_ends else (self.embed, self.head)
        return balanced_cut(self.layers, num_chunks, ends)


def count_work(
    parts: Parts, params: Tree, batch: dict[str, jax.ShapeDtypeStruct], *, recomputes: bool
) -> Work:
    """Returns the work of a model's parts, every matrix product counted as traced.

    Args:
      params: the model's, in the dtype that it computes in; ShapeDtypeStructs do.
      batch: one microbatch, as the model gets it; ShapeDtypeStructs do.
      recomputes: a chunk's forward runs again in its backward.
    """
    cut = parts.split(params)
    x = jax.eval_shape(parts.embed, cut["ends"], batch)
    layers: list[int] = []
    for name, num_layers in parts.num_layers.items():
        layer = jax.tree.map(_without_first_dim, cut["layers"][name])
        block = parts.blocks[name]
        arguments = (layer, x, batch, jax.ShapeDtypeStruct((), jnp.int32))
        count = traced_flops(_with_backward(block, 2), *arguments, x)
        layers += [count + recomputes * traced_flops(block, *arguments)] * num_layers
    head = jax.grad(lambda ends, x, batch: parts.head(ends, x, batch)[0], argnums=(0, 1))
    return Work(
        layers=tuple(layers),
        embed=traced_flops(_with_backward(parts.embed, 1), cut["ends"], batch, x),
        head=traced_flops(head, cut["ends"], x, batch),
    )


def _with_backward(function: Callable, num_inputs: int) -> Callable:
    """Returns `f(*args, dy)`: the gradients of the first `num_inputs` arguments."""

    def run(*args):
        inputs, rest, dy = args[:num_inputs], args[num_inputs:-1], args[-1]
        return jax.vjp(lambda *inputs: function(*inputs, *rest), *inputs)[1](dy)

    return run


def _without_first_dim(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
