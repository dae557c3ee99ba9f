"""A model as the pipeline sees it: functions of parameters, activations and microbatches."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

Tree = Any


class PipelineFunctions(Protocol):
    """A model's functions. Those of this project's models are a `models.functions.ModelFunctions`.

    `non_stack_params` are the parameters outside the stacks: of the embedding, the head and the
    `before` functions. The arrays of `microbatch` are `[B, ...]`.
    """

    @property
    def blocks(self) -> Mapping[str, Callable[[Tree, Tree, Tree, jax.Array], Tree]]:
        """Stack -> `block(params of one layer, x, microbatch, number of the layer) -> x`.

        Layers are numbered within their stack, from 0.
        """
        ...

    @property
    def before(self) -> Mapping[str, Callable[[Tree, Tree, Tree], Tree]]:
        """Stack -> `before(non_stack_params, x, microbatch) -> x`, run ahead of its first layer.

        Stacks without such a function are absent. The output may have another type than the input.
        """
        ...

    def activation_types(
        self, non_stack_params: Tree, microbatch: Tree, /
    ) -> Mapping[str, tuple[Tree, Tree]]:
        """Return stack -> (type before the stack, type of its blocks' input and output).

        Types are trees of ShapeDtypeStructs. The stacks are in the order in which they run.
        """
        ...

    def embed(self, non_stack_params: Tree, microbatch: Tree, /) -> Tree:
        """Return the activations that enter the first layer: a tree of floating-point arrays."""
        ...

    def head(
        self, non_stack_params: Tree, x: Tree, microbatch: Tree, /
    ) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of losses, sum of weights, sums of further metrics), all scalars."""
        ...

    @property
    def teach(self) -> Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None:
        """`teach(non_stack_params, x, microbatch) -> arrays [B, ...]`.

        It replaces the head in `make_teach`.
        """
        ...
