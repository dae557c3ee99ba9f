"""A block's forward and backward as separate functions, with all that passes between them in hand.

`jax.vjp` keeps what the backward needs inside a closure. A pipeline has to put it into a buffer,
for some of it to be read many ticks later, and must not put the weights there. So a block is
traced once, and what its backward reads is sorted:

- parameters and side inputs are read again where they lie;
- what follows from these alone is computed again, unless random bits were drawn for it;
- the rest is `saved`; all that one loop or branch yields counts as the same here.

For zero-bubble schedules the backward itself is cut in two: what the gradient of the block's input
needs, and the rest, which yields the gradients of its parameters. What the second half reads of
the first is `handed` over: as few bytes as it takes if all but costly operations may run twice.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from sharding.memory import HOST
from sharding.pipeline.runtime.min_cut import cheapest_cut

Tree = Any

#: Primitives that only call a jaxpr; looked into when a backward is cut in two.
_CALLS = ("jit", "remat2")
#: Primitives that draw random bits: what they yield is saved rather than drawn again.
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma")
#: Primitives that are not run twice, as are not loops, branches and kernels: all with a jaxpr.
_COSTLY = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "sort")


class BlockVJP:
    """`block(params, x, side) -> y`, where y is like x, taken apart.

    Args:
      block: a pure function.
      params, x, side: arrays or ShapeDtypeStructs; no gradient flows into `side`.
    """

    def __init__(
        self, block: Callable[[Tree, Tree, Tree], Tree], params: Tree, x: Tree, side: Tree
    ):
        self._block = block
        self._params, self._x, self._side = (_abstract(tree) for tree in (params, x, side))
        self._forward = _flat(self._with_residuals, self._params, self._x, self._side)
        num_inputs = [len(jax.tree.leaves(tree)) for tree in (params, x, side)]
        jaxpr, num_y = self._forward.jaxpr, num_inputs[1]
        if self._y != self._x:
            raise ValueError(f"a block must return what it takes, {self._x}; it returns {self._y}")
        self._residuals = jaxpr.outvars[num_y:]
        x_vars = jaxpr.invars[num_inputs[0] : sum(num_inputs[:2])]
        side_vars = jaxpr.invars[sum(num_inputs[:2]) :]
        kept = _following(jaxpr, x_vars) - set(side_vars)
        self._saved = [v for v in _variables(self._residuals) if v in kept]
        self.saved = [_shape(v) for v in self._saved]  # of what `forward` saves
        #: Which of these lie in host memory.
        self.saved_on_host = [v.aval.memory_space == HOST for v in self._saved]

    def forward(self, params: Tree, x: Tree, side: Tree) -> tuple[Tree, list[jax.Array]]:
        """Returns (y, what is saved)."""
        y, residuals = self._with_residuals(params, x, side)
        by_var = dict(zip(map(id, self._residuals), residuals, strict=True))
        return y, [by_var[id(v)] for v in self._saved]

    def backward(
        self, params: Tree, side: Tree, saved: Sequence[jax.Array], dy: Tree
    ) -> tuple[Tree, Tree]:
        """Returns (gradients of params, gradient of x)."""
        jaxpr = self._forward.jaxpr
        inputs = [*jax.tree.leaves(params), *jax.tree.leaves(self._x), *jax.tree.leaves(side)]
        env = _environment(self._forward, inputs)
        env |= dict(zip(self._saved, saved, strict=True))
        needed = _needed(jaxpr.eqns, self._residuals, known=set(env))
        _run([jaxpr.eqns[i] for i in needed], env)
        vjp = jax.tree.unflatten(self._vjp_structure, [_value(v, env) for v in self._residuals])
        return vjp(dy)

    def input_gradient(
        self, params: Tree, side: Tree, saved: Sequence[jax.Array], dy: Tree
    ) -> tuple[Tree, list[jax.Array | None], list[jax.Array]]:
        """Returns (gradient of x, gradients of params that came with it, what is handed over).

        The gradients are a list in the order of the tree's leaves, None where
        `weight_gradient` yields it.
        """
        cut = self._cut
        env = cut.environment((params, side, saved, dy))
        _run(cut.first, env)
        early = [
            _value(v, env) if is_early else None
            for v, is_early in zip(cut.weights, cut.is_early, strict=True)
        ]
        dx = jax.tree.unflatten(jax.tree.structure(self._x), [_value(v, env) for v in cut.inputs])
        return dx, early, [_value(v, env) for v in cut.handed]

    def weight_gradient(
        self, params: Tree, side: Tree, saved: Sequence[jax.Array], handed: Sequence[jax.Array]
    ) -> list[jax.Array | None]:
        """Returns the gradients of params that `input_gradient` left out.

        Args:
          saved: those arrays alone that `saved_for_weights` numbers.
        """
        cut = self._cut
        arrays: list[Any] = [None] * len(self._saved)
        for i, array in zip(self.saved_for_weights, saved, strict=True):
            arrays[i] = array
        # Nothing reads dy here: what is needed of it is handed over.
        env = cut.environment((params, side, arrays, self._x))
        env |= dict(zip(cut.handed, handed, strict=True))
        _run(cut.second, env)
        return [
            None if is_early else _value(v, env)
            for v, is_early in zip(cut.weights, cut.is_early, strict=True)
        ]

    @property
    def handed(self) -> list[jax.ShapeDtypeStruct]:
        """What `input_gradient` hands over."""
        return [_shape(v) for v in self._cut.handed]

    @property
    def saved_for_weights(self) -> list[int]:
        """The numbers of the saved arrays that `weight_gradient` reads."""
        return self._cut.saved_for_weights

    def _with_residuals(self, params, x, side):
        y, vjp = jax.vjp(lambda params, x: self._block(params, x, side), params, x)
        residuals, self._vjp_structure = jax.tree.flatten(vjp)
        self._y = _abstract(y)
        return y, residuals

    @cached_property
    def _cut(self) -> "_Cut":
        example = (self._params, self._side, self.saved, self._x)
        flat = _flat(self.backward, *example)
        return _Cut.of(flat, [len(jax.tree.leaves(tree)) for tree in example])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """The equations of a backward, in two halves."""

    jaxpr: Any  # closed; invars are params, side, saved, dy
    first: list  # the equations that the gradient of x needs
    second: list  # those that the other gradients need beside them
    inputs: list  # variables: the gradient of x
    weights: list  # variables: the gradients of params
    is_early: list[bool]  # which of these the first half yields anyway
    handed: list  # variables of the first half that the second reads
    saved_for_weights: list[int]

    @classmethod
    def of(cls, closed, num_inputs: Sequence[int]) -> "_Cut":
        jaxpr = closed.jaxpr
        num_params, num_side, num_saved, _ = num_inputs
        variable = jaxpr.invars[num_params + num_side :]
        weights, inputs = jaxpr.outvars[:num_params], jaxpr.outvars[num_params:]
        free = {*jaxpr.invars[: num_params + num_side], *jaxpr.constvars}
        saved, dy = variable[:num_saved], variable[num_saved:]
        # Lists and dicts, not sets: every process must come to the same program.
        eqns, is_known = jaxpr.eqns, {*free, *variable}
        first = _needed(eqns, inputs, known=is_known)
        made = _variables(v for i in first for v in eqns[i].outvars)
        late = _needed(eqns, weights, known={*is_known, *made})
        yielded = {v for i in late for v in eqns[i].outvars}
        # Norms and activation functions, say, cost less to compute twice than to keep.
        again = [eqns[i] for i in first if not _is_costly(eqns[i])]
        cheap = {v for eqn in again for v in eqn.outvars}
        values = {v: v.aval.size * v.aval.dtype.itemsize for v in (*variable, *made)}
        kept = cheapest_cut(
            sizes=values,
            uses=[
                (a, b)
                for e in again
                for a in _variables(e.invars)
                if a in values
                for b in e.outvars
            ],
            given=[*variable, *(v for v in made if v not in cheap)],
            wanted=[v for v in _variables(v for i in late for v in eqns[i].invars) if v in values],
        )
        is_early = [isinstance(v, Literal) or v not in yielded for v in weights]
        late_weights = [v for v, early in zip(weights, is_early, strict=True) if not early]
        return cls(
            jaxpr=closed,
            first=[eqns[i] for i in first],
            second=[eqns[i] for i in _needed(eqns, late_weights, known=free | kept)],
            inputs=inputs,
            weights=weights,
            is_early=is_early,
            handed=[v for v in (*dy, *made) if v in kept],
            saved_for_weights=[i for i, v in enumerate(saved) if v in kept],
        )

    def environment(self, inputs: tuple) -> dict:
        is_none = lambda leaf: leaf is None  # noqa: E731
        return _environment(self.jaxpr, jax.tree.leaves(inputs, is_leaf=is_none))


def _following(jaxpr, variables: Iterable) -> set:
    """Returns the variables that depend on these, or on random bits."""
    found = set(variables)
    for eqn in jaxpr.eqns:
        draws = _draws(eqn) and not any(_is_key(v) for v in eqn.outvars)
        if draws or found.intersection(_variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _draws(eqn) -> bool:
    inner = (e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return eqn.primitive.name in _RANDOM or any(map(_draws, inner))


def _is_costly(eqn) -> bool:
    holds_jaxpr = any(True for _ in jaxprs_in_params(eqn.params))
    return holds_jaxpr or eqn.primitive.name in (*_COSTLY, *_RANDOM)


def _is_key(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _needed(eqns: Sequence, outputs: Iterable, *, known: set) -> list[int]:
    """Returns the numbers of the equations that `outputs` need, given the `known` variables."""
    wanted = set(_variables(outputs)) - known
    needed = []
    for i in reversed(range(len(eqns))):
        if wanted.intersection(eqns[i].outvars):
            needed.append(i)
            wanted.update(v for v in _variables(eqns[i].invars) if v not in known)
    return needed[::-1]


def _environment(closed, inputs: Sequence) -> dict:
    """Returns the values of a closed jaxpr's inputs and constants, by variable."""
    env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    return env | dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def _run(eqns: Sequence, env: dict) -> None:
    """Evaluates equations; variables are read from and written to `env`."""
    for eqn in eqns:
        inputs = [_value(v, env) for v in eqn.invars]
        with eqn.ctx.manager:
            values = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        values = values if eqn.primitive.multiple_results else [values]
        env.update(zip(eqn.outvars, values, strict=True))


def _flat(function: Callable, *args: Tree):
    """Returns the closed jaxpr of `function` with the calls in it opened."""
    whole = jax.make_jaxpr(function)(*args)
    return jax.make_jaxpr(lambda *leaves: _run_flat(whole, leaves))(*jax.tree.leaves(args))


def _run_flat(closed, args: Sequence) -> list:
    """Evaluates a closed jaxpr with the calls in it opened."""
    jaxpr, env = closed.jaxpr, _environment(closed, args)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            inner = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
            values = _run_flat(inner, [_value(v, env) for v in eqn.invars])
            env.update(zip(eqn.outvars, values, strict=True))
        else:
            _run([eqn], env)
    return [_value(v, env) for v in jaxpr.outvars]


def _value(v, env: dict):
    return v.val if isinstance(v, Literal) else env[v]


def _variables(values: Iterable) -> list:
    """Returns the variables among variables and literals, each once."""
    return list(dict.fromkeys(v for v in values if not isinstance(v, Literal)))


def _shape(v) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
