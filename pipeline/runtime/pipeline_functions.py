"""A model as the pipeline sees it: functions of parameters, activations and microbatches."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from sharding.jaxprs import reads

Tree = Any


class PipelineFunctions(Protocol):
    """A model's functions; this project's models provide a `models.functions.ModelFunctions`.

    `non_stack_params` are the parameters outside the stacks: of the embedding, the head and the
    `before` functions. The arrays of `microbatch` are `[B, ...]`.
    """

    @property
    def blocks(self) -> Mapping[str, Callable[..., Tree]]:
        """Stack -> `block(params of one layer, x, microbatch=..., number=...) -> x`.

        `number` is the number of the layer within its stack, from 0.
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

    def head(self, non_stack_params: Tree, x: Tree, microbatch: Tree, /) -> tuple[Tree, Tree, dict]:
        """Return (sum of losses, sum of weights, sums of further metrics): trees of scalars.

        If there are several sums of losses, gradients are of their total.
        """
        ...

    @property
    def teach(self) -> Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None:
        """`teach(non_stack_params, x, microbatch) -> arrays [B, ...]`.

        It replaces the head in `make_teach`.
        """
        ...

    @property
    def frozen(self) -> Mapping[str, Tree] | None:
        """`{"non_stack": ..., "stacks": {stack: ...}}`: whether each parameter is frozen.

        The functions stop the gradients of frozen parameters, and the pipeline has none of them.
        None if no parameter is frozen.
        """
        ...


def stacks_with_backward(
    functions: PipelineFunctions, non_stack_params: Tree, microbatch: Tree
) -> set[str]:
    """Return the stacks that have a backward: those at or below which a parameter is trained.

    Below a stack are the embedding, the stacks that run before it, and their `before` functions.

    Args:
        functions: model's functions.
        non_stack_params: parameters outside the stacks, or their ShapeDtypeStructs.
        microbatch: arrays `[B, ...]`, or their ShapeDtypeStructs.
    """
    types = functions.activation_types(non_stack_params, microbatch)
    frozen = functions.frozen
    if frozen is None:
        return {*types}

    def trains(function: Callable, *args: Tree) -> bool:
        """Return whether a function of non-stack parameters reads one that is trained."""
        is_read = jax.tree.leaves(reads(function, non_stack_params, *args))
        is_frozen = jax.tree.leaves(frozen["non_stack"])
        return any(r and not f for r, f in zip(is_read, is_frozen, strict=True))

    stacks = set()
    is_trained = trains(functions.embed, microbatch)
    for stack, (input_type, _) in types.items():
        if stack in functions.before:
            is_trained |= trains(functions.before[stack], input_type, microbatch)
        is_trained |= not all(jax.tree.leaves(frozen["stacks"][stack]))
        stacks |= {stack} if is_trained else set()
    return stacks
