"""Balances pipeline stages: counts the FLOPs of every layer and cuts the layers evenly.

All stages wait for the busiest one. With a large vocabulary, the head can take as long as several
layers, so the last stage should have fewer layers. The cut minimizes the work of the busiest
virtual stage (pipeline/schedules/table.py).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.flops import traced_flops
from models.functions import ModelFunctions, one_layer
from pipeline.runtime.trees import total_of
from pipeline.stack_layout import balanced_cut

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """FLOPs of the matrix products of one microbatch, forward and backward."""

    layers: tuple[int, ...]  # per layer, over all stacks
    recomputed: tuple[int, ...]  # per layer, additional FLOPs of recomputation; 0: none
    embed: int
    head: int

    def per_virtual_stage(self, counts: Sequence[int], *, shares_vocab: bool) -> list[float]:
        """Return the FLOPs of every virtual stage, with its share of embedding and head.

        Args:
            counts: number of layers of each virtual stage.
            shares_vocab: embedding and head are split over all virtual stages.
        """
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        cost = self._cost(len(counts), shares_vocab)
        return [cost(v, first, stop) for v, (first, stop) in enumerate(bounds)]

    def balanced(self, num_virtual_stages: int, *, shares_vocab: bool) -> list[int]:
        """Return the most even cut: the number of layers of each virtual stage.

        Args:
            num_virtual_stages: number of virtual stages.
            shares_vocab: embedding and head are split over all virtual stages.
        """
        cost = self._cost(num_virtual_stages, shares_vocab)
        return balanced_cut(len(self.layers), num_virtual_stages, cost)

    def _cost(
        self, num_virtual_stages: int, shares_vocab: bool
    ) -> Callable[[int, int, int], float]:
        layers = [*itertools.accumulate(self.layers, initial=0)]
        recomputed = [*itertools.accumulate(self.recomputed, initial=0)]

        def cost(v: int, first: int, stop: int) -> float:
            is_last = v == num_virtual_stages - 1
            work = float(layers[stop] - layers[first])
            if shares_vocab:
                work += (self.embed + self.head) / num_virtual_stages
            else:
                work += self.embed * (v == 0) + self.head * is_last
            # If only the last virtual stage computes the head, its forward pass runs only once, as
            # a part of its backward pass, so nothing is recomputed.
            recomputes = not is_last or shares_vocab
            return work + recomputes * (recomputed[stop] - recomputed[first])

        return cost


def count_work(
    functions: ModelFunctions,
    params: Tree,
    batch: dict[str, jax.ShapeDtypeStruct],
    *,
    recomputes: bool,
) -> LayerCosts:
    """Count the matrix products of a model's functions by tracing them.

    Args:
        functions: model's functions.
        params: model's parameters in the compute dtype; ShapeDtypeStructs suffice.
        batch: one microbatch; ShapeDtypeStructs suffice.
        recomputes: backward pass of a chunk runs its forward pass again.
    """
    parts = functions.split(params)
    types = functions.activation_types(parts["non_stack"], batch)
    layers: list[int] = []
    recomputed: list[int] = []
    for name, num_layers in functions.num_layers.items():
        layer = one_layer(parts["stacks"][name])
        (_, x) = types[name]
        block = functions.blocks[name]
        arguments = (layer, x, batch, jax.ShapeDtypeStruct((), jnp.int32))
        layers += [traced_flops(_with_backward(block, 2), *arguments, x)] * num_layers
        recomputed += [recomputes * traced_flops(block, *arguments)] * num_layers
    (embedded, _) = [*types.values()][0]
    (_, x) = [*types.values()][-1]

    def loss(non_stack_params: Tree, x: Tree, batch: Tree) -> jax.Array:
        return total_of(functions.head(non_stack_params, x, batch)[0])

    head = jax.grad(loss, argnums=(0, 1))
    head_batch = functions.with_teacher_output_types(parts["non_stack"], x, batch)
    return LayerCosts(
        layers=tuple(layers),
        recomputed=tuple(recomputed),
        embed=traced_flops(_with_backward(functions.embed, 1), parts["non_stack"], batch, embedded),
        head=traced_flops(head, parts["non_stack"], x, head_batch),
    )


def _with_backward(function: Callable, num_inputs: int) -> Callable:
    """Return `f(*args, dy)`: the gradients of the first `num_inputs` arguments."""

    def run(*args):
        inputs = args[:num_inputs]
        rest = args[num_inputs:-1]
        dy = args[-1]
        return jax.vjp(lambda *inputs: function(*inputs, *rest), *inputs)[1](dy)

    return run
