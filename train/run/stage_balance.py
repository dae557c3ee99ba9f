"""How much each stage has to do, and the cut of the layers with which the busiest does least."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.flops import traced_flops
from models.stack import Parts, one_layer
from sharding.pipeline.layout import balanced_cut

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Matrix products of one microbatch, in FLOPs, forward and backward."""

    layers: tuple[int, ...]
    recomputed: tuple[int, ...]  # of every layer, beside that: 0 where nothing runs again
    embed: int
    head: int

    def of_chunks(self, counts: Sequence[int], *, shares_vocab: bool) -> list[float]:
        """Returns the work of every chunk that has so many layers, with its part of the ends."""
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        cost = self._cost(len(counts), shares_vocab)
        return [cost(chunk, first, stop) for chunk, (first, stop) in enumerate(bounds)]

    def balanced(self, num_chunks: int, *, shares_vocab: bool) -> list[int]:
        """Returns the numbers of layers per chunk, in the order of the layers."""
        return balanced_cut(len(self.layers), num_chunks, self._cost(num_chunks, shares_vocab))

    def _cost(self, num_chunks: int, shares_vocab: bool) -> Callable[[int, int, int], float]:
        def cost(chunk: int, first: int, stop: int) -> float:
            is_last = chunk == num_chunks - 1
            work = float(sum(self.layers[first:stop]))
            if shares_vocab:
                work += (self.embed + self.head) / num_chunks
            else:
                work += self.embed * (chunk == 0) + self.head * is_last
            # A stage that has the head to itself runs the last forward once, in the backward.
            return work + (not is_last or shares_vocab) * sum(self.recomputed[first:stop])

        return cost


def count_work(
    parts: Parts, params: Tree, batch: dict[str, jax.ShapeDtypeStruct], *, recomputes: bool
) -> LayerCosts:
    """Returns the work of a model's parts, every matrix product counted as traced.

    Args:
      params: the model's, in the dtype that it computes in; ShapeDtypeStructs do.
      batch: one microbatch, as the model gets it; ShapeDtypeStructs do.
      recomputes: a chunk's forward runs again in its backward.
    """
    cut = parts.split(params)
    types = parts.types(cut["ends"], batch)
    layers: list[int] = []
    recomputed: list[int] = []
    for name, num_layers in parts.num_layers.items():
        layer, (_, x) = one_layer(cut["layers"][name]), types[name]
        block = parts.blocks[name]
        arguments = (layer, x, batch, jax.ShapeDtypeStruct((), jnp.int32))
        layers += [traced_flops(_with_backward(block, 2), *arguments, x)] * num_layers
        recomputed += [recomputes * traced_flops(block, *arguments)] * num_layers
    (embedded, _), (_, x) = [*types.values()][0], [*types.values()][-1]
    head = jax.grad(lambda ends, x, batch: parts.head(ends, x, batch)[0], argnums=(0, 1))
    return LayerCosts(
        layers=tuple(layers),
        recomputed=tuple(recomputed),
        embed=traced_flops(_with_backward(parts.embed, 1), cut["ends"], batch, embedded),
        head=traced_flops(head, cut["ends"], x, parts.with_teacher_outputs(cut["ends"], x, batch)),
    )


def _with_backward(function: Callable, num_inputs: int) -> Callable:
    """Returns `f(*args, dy)`: the gradients of the first `num_inputs` arguments."""

    def run(*args):
        inputs, rest, dy = args[:num_inputs], args[num_inputs:-1], args[-1]
        return jax.vjp(lambda *inputs: function(*inputs, *rest), *inputs)[1](dy)

    return run
