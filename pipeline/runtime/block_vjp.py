"""Splits a block's VJP into separate functions whose inputs and outputs are explicit.

`jax.vjp` keeps its residuals inside a closure. A pipeline must put them into a buffer, because
several microbatches are in flight and weight gradients may run many ticks later, and it must not
put the weights there. `BlockVJP` therefore traces the block when it is created, and classifies its
residuals; `forward` traces it again, as a part of the step, and returns those to save:

- Parameters and the microbatch are not saved; the backward reads the originals.
- Values that depend only on parameters and the microbatch are recomputed, unless random bits were
  drawn for them.
- All other residuals are `saved`. A loop or branch counts as one operation: if one of its inputs
  depends on x, all its outputs do.

For zero-bubble schedules the backward itself is split in two: the operations that the gradient of x
needs, and the rest, which computes the gradients of the parameters. Values of the first half that
the second half reads are `handed` over. A minimum cut (min_cut.py) makes them as few bytes as
possible if cheap operations may run twice. For the block `y = x + tanh(x @ w)`:

    forward                 residuals of jax.vjp    saved
    h = x @ w               w, x                    x       (w is a parameter)
    t = tanh(h)             t, 1 - t                t, 1 - t
    y = x + t

    input_gradient          reads                   handed over
    dh = dy (1 - t) (1 + t) dy, t, 1 - t            dh
    dx = dy + dh @ w.T      w

    weight_gradient         reads
    dw = x.T @ dh           x (saved), dh (handed)

So t and 1 - t can be dropped after `input_gradient`, and only x and dh wait for `weight_gradient`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from pipeline.runtime.min_cut import cheapest_cut
from sharding.jaxprs import (
    environment,
    evaluate,
    inner_jaxprs,
    needed_equations,
    trace_inlined,
    value_of,
    variables_of,
    walk,
)
from sharding.memory import HOST

Tree = Any

#: Primitives that draw random bits. Their outputs are saved rather than drawn again.
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma")
#: Primitives that never run twice. The same holds for every operation with a jaxpr of its own:
#: loops, branches and kernels.
_COSTLY = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "sort")


class BlockVJP:
    """The forward and backward of a block as separate functions.

    Args:
        block: pure function `(params, x, *, microbatch, number) -> y`; y has the same structure,
            shapes and dtypes as x.
        params: block's parameters. These arguments are arrays or ShapeDtypeStructs.
        x: block's input.
        microbatch: further inputs that receive no gradient, such as masks and dropout keys.
        number: number of the layer within its stack, int32[].

    Attributes:
        saved: shape and dtype of the residuals that `forward` returns.
        saved_on_host: for each of them, whether it is stored in host memory.
    """

    def __init__(
        self,
        block: Callable[..., Tree],
        params: Tree,
        x: Tree,
        microbatch: Tree,
        number: jax.Array | jax.ShapeDtypeStruct,
    ):
        self._block = block
        self._params = _abstract(params)
        self._x = _abstract(x)
        self._microbatch = _abstract(microbatch)
        self._number = _abstract(number)
        inputs = (self._params, self._x, self._microbatch, self._number)
        self._forward_jaxpr = trace_inlined(self._with_residuals, *inputs)
        num_inputs = [len(jax.tree.leaves(tree)) for tree in inputs]
        jaxpr = self._forward_jaxpr.jaxpr
        num_y = num_inputs[1]
        if self._y != self._x:  # models.check.check refuses a run's blocks earlier
            raise ValueError(
                f"a block's output must have the type of its input, {self._x}; it returns {self._y}"
            )
        self._residuals = jaxpr.outvars[num_y:]
        x_vars = jaxpr.invars[num_inputs[0] : sum(num_inputs[:2])]
        microbatch_vars = jaxpr.invars[sum(num_inputs[:2]) :]  # and number
        # Residuals outside this set depend only on params and microbatch, and are recomputed.
        x_dependents = _following(jaxpr, x_vars) - set(microbatch_vars)
        self._saved = [v for v in variables_of(self._residuals) if v in x_dependents]
        self.saved = [_shape(v) for v in self._saved]
        self.saved_on_host = [v.aval.memory_space == HOST for v in self._saved]

    def forward(
        self, params: Tree, x: Tree, microbatch: Tree, number: jax.Array
    ) -> tuple[Tree, list[jax.Array]]:
        """Return (y, the saved residuals)."""
        y, residuals = self._with_residuals(params, x, microbatch, number)
        by_var = dict(zip(map(id, self._residuals), residuals, strict=True))
        return y, [by_var[id(v)] for v in self._saved]

    def backward(
        self,
        params: Tree,
        microbatch: Tree,
        number: jax.Array,
        saved: Sequence[jax.Array],
        dy: Tree,
    ) -> tuple[Tree, Tree]:
        """Return (gradients of params, gradient of x)."""
        jaxpr = self._forward_jaxpr.jaxpr
        inputs = jax.tree.leaves((params, self._x, microbatch, number))
        env = environment(self._forward_jaxpr, inputs)
        env |= dict(zip(self._saved, saved, strict=True))
        # Recompute the residuals that were not saved, then apply jax's own VJP to all of them. The
        # ShapeDtypeStructs of x are placeholders: nothing that depends on x is recomputed.
        needed = needed_equations(jaxpr.eqns, self._residuals, known=set(env))
        evaluate([jaxpr.eqns[i] for i in needed], env)
        vjp = jax.tree.unflatten(self._vjp_structure, [value_of(v, env) for v in self._residuals])
        return vjp(dy)

    def input_gradient(
        self,
        params: Tree,
        microbatch: Tree,
        number: jax.Array,
        saved: Sequence[jax.Array],
        dy: Tree,
    ) -> tuple[Tree, Tree, list[jax.Array]]:
        """Run the first half of the backward.

        Returns:
            (gradient of x, gradients of params, values to hand over). A gradient is None if
            `weight_gradient` computes it.
        """
        cut = self._cut
        env = cut.environment_of((params, microbatch, number, saved, dy))
        evaluate(cut.first, env)
        early = [
            value_of(v, env) if is_early else None
            for v, is_early in zip(cut.weights, cut.is_early, strict=True)
        ]
        dx = jax.tree.unflatten(jax.tree.structure(self._x), [value_of(v, env) for v in cut.inputs])
        return dx, self._like_params(early), [value_of(v, env) for v in cut.handed]

    def weight_gradient(
        self,
        params: Tree,
        microbatch: Tree,
        number: jax.Array,
        saved: Sequence[jax.Array],
        handed: Sequence[jax.Array],
    ) -> Tree:
        """Run the second half of the backward.

        Args:
            params: block's parameters.
            microbatch: its further inputs.
            number: number of its layer.
            saved: only the saved residuals with the indices `saved_for_weights`.
            handed: values that `input_gradient` handed over.

        Returns:
            The gradients of params; a gradient is None if `input_gradient` computed it.
        """
        cut = self._cut
        arrays: list[Any] = [None] * len(self._saved)
        for i, array in zip(self.saved_for_weights, saved, strict=True):
            arrays[i] = array
        # The second half never reads dy itself: if it is needed, it is among `handed`. The
        # ShapeDtypeStructs of x, which has the same type, stand in for it.
        env = cut.environment_of((params, microbatch, number, arrays, self._x))
        env |= dict(zip(cut.handed, handed, strict=True))
        evaluate(cut.second, env)
        late = [
            None if is_early else value_of(v, env)
            for v, is_early in zip(cut.weights, cut.is_early, strict=True)
        ]
        return self._like_params(late)

    @property
    def handed(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of the values that `input_gradient` hands over."""
        return [_shape(v) for v in self._cut.handed]

    @property
    def saved_for_weights(self) -> list[int]:
        """Indices of the saved residuals that `weight_gradient` reads."""
        return self._cut.saved_for_weights

    def _like_params(self, values: list[jax.Array | None]) -> Tree:
        return jax.tree.unflatten(jax.tree.structure(self._params), values)

    def _with_residuals(self, params, x, microbatch, number):
        """Return (y, all residuals), and keep the structure of the VJP for `backward`.

        Its types have the mesh in them, which a trace of the step knows and the first trace, in
        `__init__`, may not have known. So a `forward` of the same trace goes before a `backward`.
        """
        block = partial(self._block, microbatch=microbatch, number=number)
        y, vjp = jax.vjp(block, params, x)
        residuals, self._vjp_structure = jax.tree.flatten(vjp)
        self._y = _abstract(y)
        return y, residuals

    @cached_property
    def _cut(self) -> "_Cut":
        example = (self._params, self._microbatch, self._number, self.saved, self._x)
        flat = trace_inlined(self.backward, *example)
        return _Cut.of(flat, [len(jax.tree.leaves(tree)) for tree in example])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """The equations of a backward, split into two halves."""

    jaxpr: Any  # the closed jaxpr of the backward; its inputs: see `BlockVJP.backward`
    first: list  # equations that the gradient of x needs
    second: list  # equations that the remaining gradients need, including recomputation
    inputs: list  # variables: the gradient of x
    weights: list  # variables: the gradients of params
    is_early: list[bool]  # for each of `weights`: whether the first half already computes it
    handed: list  # variables of the first half that the second half reads
    saved_for_weights: list[int]  # indices of the saved residuals that the second half reads

    @classmethod
    def of(cls, closed, num_inputs: Sequence[int]) -> "_Cut":
        """Split a backward.

        Args:
            closed: closed jaxpr of the backward, with calls inlined.
            num_inputs: number of leaves of params, microbatch, number, saved and dy.
        """
        jaxpr = closed.jaxpr
        num_params, num_microbatch, num_number, num_saved, _ = num_inputs
        num_free = num_params + num_microbatch + num_number
        variable = jaxpr.invars[num_free:]
        weights = jaxpr.outvars[:num_params]
        inputs = jaxpr.outvars[num_params:]
        # Parameters, the microbatch and constants are available to both halves at no cost.
        free = {*jaxpr.invars[:num_free], *jaxpr.constvars}
        saved = variable[:num_saved]
        dy = variable[num_saved:]
        # Lists and dicts instead of sets: iteration order decides the order of equations and
        # buffers, and every process must build the same program.
        eqns = jaxpr.eqns
        is_known = {*free, *variable}
        first = needed_equations(eqns, inputs, known=is_known)
        first_outputs = variables_of(v for i in first for v in eqns[i].outvars)
        # The equations that the gradients of params need after the whole first half has run.
        late = needed_equations(eqns, weights, known={*is_known, *first_outputs})
        yielded = {v for i in late for v in eqns[i].outvars}
        # Cheap operations, such as norms and activation functions, may run a second time: that
        # costs less than keeping their outputs for many ticks. So the cut may move upstream of
        # `late` through cheap equations, to wherever the values are smallest.
        again = [eqns[i] for i in first if not _is_costly(eqns[i])]
        cheap = {v for eqn in again for v in eqn.outvars}
        values = {v: v.aval.size * v.aval.dtype.itemsize for v in (*variable, *first_outputs)}
        cut = cheapest_cut(
            sizes=values,
            uses=[
                (a, b)
                for e in again
                for a in variables_of(e.invars)
                if a in values
                for b in e.outvars
            ],
            given=[*variable, *(v for v in first_outputs if v not in cheap)],
            wanted=[
                v for v in variables_of(v for i in late for v in eqns[i].invars) if v in values
            ],
        )
        is_early = [isinstance(v, Literal) or v not in yielded for v in weights]
        late_weights = [v for v, early in zip(weights, is_early, strict=True) if not early]
        return cls(
            jaxpr=closed,
            first=[eqns[i] for i in first],
            second=[eqns[i] for i in needed_equations(eqns, late_weights, known=free | cut)],
            inputs=inputs,
            weights=weights,
            is_early=is_early,
            handed=[v for v in (*dy, *first_outputs) if v in cut],
            saved_for_weights=[i for i, v in enumerate(saved) if v in cut],
        )

    def environment_of(self, inputs: tuple) -> dict:
        """Return the values of the jaxpr's inputs and constants; None stands for absent inputs."""

        def is_none(leaf):
            return leaf is None

        return environment(self.jaxpr, jax.tree.leaves(inputs, is_leaf=is_none))


def _following(jaxpr, variables: Iterable) -> set:
    """Return the given variables and all variables that depend on them or on random bits."""
    dependents = set(variables)
    for eqn in jaxpr.eqns:
        # Deriving a key from a key runs the same primitives, but is cheap to repeat.
        draws = _draws(eqn) and not any(_is_key(v) for v in eqn.outvars)
        if draws or dependents.intersection(variables_of(eqn.invars)):
            dependents.update(eqn.outvars)
    return dependents


def _draws(eqn) -> bool:
    return any(inner.primitive.name in _RANDOM for inner, _ in walk([eqn]))


def _is_costly(eqn) -> bool:
    return bool(inner_jaxprs(eqn)) or eqn.primitive.name in (*_COSTLY, *_RANDOM)


def _is_key(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _shape(v) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
