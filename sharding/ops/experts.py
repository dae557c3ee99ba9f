"""Experts over a mesh: every token goes to some of many small networks, divided over devices.

The tokens of all devices that divide the experts are gathered, each device computes the
contributions of its own experts, and the sums are scattered back. With 4 experts on 2 devices:

    device        0             1
    tokens        a b           c d
    gather        a b c d       a b c d
    experts       0 1           2 3
    sums          partial       partial
    scatter       a b           c d

A device sorts the tokens that chose its experts by expert. In each of a few *rounds* it takes the
next rows of all experts, as one batched product. The rounds have room for a little more than the
mean number of tokens. If an expert has more, further *blocks* of it follow, as many as it needs:

    expert                0           1       2
    tokens, sorted     d a f c e      b       g a c
    round, 3 rows      d a f          b · ·   g a c
    blocks of 2        (c e)

So no token is ever dropped, and memory does not depend on how even the choice is. No collective is
within a loop, so devices may run different numbers of blocks. The backward pass does the same
again, and keeps only its inputs from the forward pass.

An all-gather moves `devices` copies of a token, an exchange of single tokens (all-to-all) as many
as the token has experts: the gather is the better one unless there are more devices than experts
per token.

A tokens of all devices, D embed, E experts of one device, C experts per token.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sharding import hardware
from sharding.collectives import psum
from sharding.labels import expected_trips
from sharding.logical import active_rules, automatic_axes, manual_mesh_axes
from sharding.spec import axes_of, spec_of

Tree = Any
#: (weights of one expert, tokens [b, D], factors [b]) -> outputs [b, D], each times its factor: a
#: factor of 0 makes the output and all gradients but its own 0. It is hashable, and a dim that the
#: axes of "mlp" split may be summed over one device's part only.
Expert = Callable[[Mapping[str, jax.Array], jax.Array, jax.Array], jax.Array]

#: Rows of an expert in all rounds, as a multiple of the mean number of its tokens.
_ROOM = 1.125
#: Most rows of all experts in a round: more rows need more memory, more rounds pass more often over
#: the gradients of the weights.
_ROWS_PER_ROUND = 32768
#: Mean number of tokens of an expert from which on there are rounds: with fewer, as in a
#: generation, they would read the weights of experts that no token chose.
_MIN_TOKENS = 16
#: Largest number of rows in a block.
_BLOCK_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class _Placement:
    """How experts and tokens are divided.

    Attributes:
        num_experts: number of experts on all devices.
        num_parts: number of parts into which the experts are divided.
        expert_axes: axes of more than one device that divide the experts, major first.
        token_axes: the same, or none if all devices of `expert_axes` have the same tokens.
        sum_axes: axes of more than one device that divide the inner dim of the experts.
        same_axes: automatic axes whose devices have the same experts and different tokens.
        weight_specs: names of weights, and their PartitionSpecs over the automatic axes.
        token_spec: PartitionSpec over the automatic axes of tokens [B, T, ...].
        map_axes: automatic axes of more than one device, over which a `shard_map` is needed.
    """

    num_experts: int
    num_parts: int
    expert_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    same_axes: tuple[str, ...]
    weight_specs: tuple[tuple[str, PartitionSpec], ...]
    token_spec: PartitionSpec
    map_axes: frozenset[str]

    def over_mesh(self, function: Callable, num_tokens: int, num_outputs: Any) -> Callable:
        """Return function(weights, *tokens) with all axes manual.

        Args:
            function: takes the parts of one device.
            num_tokens: number of arrays of tokens, [B, T, ...].
            num_outputs: like the result of the function, with True for weights and False for
                arrays of tokens.
        """
        if not self.map_axes:
            return function
        weights = dict(self.weight_specs)
        return jax.shard_map(
            function,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(weights, *[self.token_spec] * num_tokens),
            out_specs=jax.tree.map(lambda w: weights if w else self.token_spec, num_outputs),
            axis_names=set(self.map_axes),
            check_vma=False,
        )


def apply_experts(
    expert: Expert,
    weights: Mapping[str, jax.Array],
    x_BTD: jax.Array,
    factors_BTC: jax.Array,
    choices_BTC: jax.Array,
    *,
    axes: Mapping[str, tuple[str | None, ...]],
    num_experts: int,
) -> jax.Array:
    """Return for each token the sum of the outputs of the experts that it chose, `[B, T, D]`.

    The gradient of `factors_BTC` is computed too; the choices have none.

    Args:
        expert: function of one expert.
        weights: name -> weights of this device's experts, [E, ...].
        x_BTD: tokens of this device.
        factors_BTC: factors of the outputs, float32 or wider.
        choices_BTC: int32, numbers of the experts, all of one token different. A choice outside
            `[0, num_experts)` is no expert.
        axes: name -> logical axes of the weights; the first is "experts". Weights without the axis
            "mlp" must be added to the output: each device of that axis adds its share.
        num_experts: number of experts on all devices.
    """
    placement = _place(axes, x_BTD, num_experts)
    return _apply(expert, placement, dict(weights), x_BTD, factors_BTC, choices_BTC)


def _place(
    axes: Mapping[str, tuple[str | None, ...]], x_BTD: jax.Array, num_experts: int
) -> _Placement:
    rules = active_rules()
    mesh = jax.sharding.get_abstract_mesh()
    names = {name for leaf in axes.values() for name in leaf}
    automatic = {name: automatic_axes(name) for name in ("batch", "seq", *names) if name}
    of_batch = automatic["batch"]
    if x_BTD.shape[0] % math.prod(mesh.shape[axis] for axis in of_batch):
        of_batch = ()
    manual = manual_mesh_axes(rules.get("experts", ()))
    of_experts = (*manual, *automatic["experts"])
    are_split = bool(manual) or {*of_experts} <= {*of_batch}

    def spec(names: tuple[str | None, ...]) -> PartitionSpec:
        # Other dims, which fsdp or ZeRO may split, are whole within a step.
        return spec_of([automatic[n] if n in ("experts", "mlp") else () for n in names])

    return _Placement(
        num_experts=num_experts,
        num_parts=math.prod(mesh.shape[axis] for axis in of_experts),
        expert_axes=of_experts,
        token_axes=of_experts if are_split else (),
        sum_axes=automatic["mlp"],
        same_axes=tuple(axis for axis in of_batch if axis not in of_experts),
        weight_specs=tuple((name, spec(names)) for name, names in axes.items()),
        token_spec=spec_of([of_batch]),
        map_axes=frozenset(axis for group in automatic.values() for axis in group),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(expert, placement: _Placement, weights, x_BTD, factors_BTC, choices_BTC):
    forward = partial(_forward, expert, placement)
    return placement.over_mesh(forward, 3, False)(weights, x_BTD, factors_BTC, choices_BTC)


def _apply_forward(expert, placement, *inputs):
    return _apply(expert, placement, *inputs), inputs


def _apply_backward(expert, placement: _Placement, inputs, dy_BTD):
    backward = partial(_backward, expert, placement)
    gradients = placement.over_mesh(backward, 4, (True, False, False))(*inputs, dy_BTD)
    return *gradients, np.zeros(inputs[-1].shape, jax.dtypes.float0)


_apply.defvjp(_apply_forward, _apply_backward)


def _forward(expert, placement: _Placement, weights, x_BTD, factors_BTC, choices_BTC):
    weights = _shares(weights, placement)
    order = _sort_by_expert(placement, choices_BTC)
    x_AD = _gather(x_BTD, placement)
    factors = _gather(factors_BTC, placement).reshape(-1)

    def output_of(expert, weights, rows: _Rows) -> jax.Array:
        return expert(weights, _tokens_at(x_AD, rows), _factors_at(factors, rows))

    def of_round(number, y_AD):
        rows = order.of_round(number)
        return _add_rows(y_AD, rows, output_of(jax.vmap(expert), weights, rows))

    def of_expert(y_AD, inputs):
        weights, span = inputs

        def of_block(number, y_AD):
            rows = order.of_block(span, number)
            output = output_of(expert, weights, rows)
            return y_AD.at[rows.tokens].add(output, mode="drop", unique_indices=True)

        return order.for_blocks(span, of_block, y_AD), None

    y_AD = jax.lax.fori_loop(0, order.num_rounds, of_round, jnp.zeros_like(x_AD))
    y_AD, _ = jax.lax.scan(of_expert, y_AD, (weights, order.spans))
    return _scatter(y_AD, placement).reshape(x_BTD.shape)


def _backward(expert, placement: _Placement, weights, x_BTD, factors_BTC, choices_BTC, dy_BTD):
    weights = _shares(weights, placement)
    order = _sort_by_expert(placement, choices_BTC)
    x_AD = _gather(x_BTD, placement)
    dy_AD = _gather(dy_BTD, placement)
    factors = _gather(factors_BTC, placement).reshape(-1)
    once = {"mode": "drop", "unique_indices": True}

    def gradients_of(expert, weights, rows: _Rows) -> tuple:
        inputs = (weights, _tokens_at(x_AD, rows), _factors_at(factors, rows))
        return jax.vjp(expert, *inputs)[1](_tokens_at(dy_AD, rows))

    def of_round(number, carry):
        dx_AD, dfactors, dweights = carry
        rows = order.of_round(number)
        of_weights, of_x, of_factors = gradients_of(jax.vmap(expert), weights, rows)
        dx_AD = _add_rows(dx_AD, rows, of_x)
        dfactors = dfactors.at[rows.entries].set(of_factors, mode="drop")
        return dx_AD, dfactors, _add(dweights, of_weights)

    def of_expert(carry, inputs):
        weights, dweights, span = inputs

        def of_block(number, carry):
            dx_AD, dfactors, dweights = carry
            rows = order.of_block(span, number)
            of_weights, of_x, of_factors = gradients_of(expert, weights, rows)
            dx_AD = dx_AD.at[rows.tokens].add(of_x, **once)
            dfactors = dfactors.at[rows.entries].set(of_factors, **once)
            return dx_AD, dfactors, _add(dweights, of_weights)

        *carry, dweights = order.for_blocks(span, of_block, (*carry, _widened(dweights)))
        return carry, jax.tree.map(lambda total, w: total.astype(w.dtype), dweights, weights)

    # Sums over rounds and blocks are wide, as the sums within a product are.
    zeros = (
        jnp.zeros_like(x_AD),
        jnp.zeros_like(factors),
        _widened(jax.tree.map(jnp.zeros_like, weights)),
    )
    if order.num_rounds == 1:
        *carry, dweights = of_round(0, (*zeros[:2], None))
    else:
        *carry, dweights = jax.lax.fori_loop(0, order.num_rounds, of_round, zeros)
    (dx_AD, dfactors), dweights = jax.lax.scan(of_expert, carry, (weights, dweights, order.spans))
    dfactors_AC = dfactors.reshape(-1, factors_BTC.shape[-1])
    return (
        _shares(_sum_repeated(dweights, placement), placement),
        _scatter(dx_AD, placement).reshape(x_BTD.shape),
        _scatter(dfactors_AC, placement).reshape(factors_BTC.shape),
    )


def _add(totals: Tree | None, parts: Tree) -> Tree:
    return parts if totals is None else jax.tree.map(jnp.add, totals, parts)


def _widened(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(_wide(x)), tree)


def _has_mlp(name: str, placement: _Placement) -> bool:
    """Return whether the axes of the sum split the weights of this name."""
    spec = dict(placement.weight_specs)[name]
    return not {*placement.sum_axes}.isdisjoint(axes_of(spec))


def _shares(weights: Mapping[str, jax.Array], placement: _Placement) -> dict[str, jax.Array]:
    """Return the weights, with an equal share of those that are not split by the sum's axes."""
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in placement.sum_axes)
    return {
        name: leaf if count == 1 or _has_mlp(name, placement) else leaf / count
        for name, leaf in weights.items()
    }


def _sum_repeated(grads: Mapping[str, jax.Array], placement: _Placement) -> dict[str, jax.Array]:
    """Sum the gradients of weights over the devices that have the same weights."""
    return {
        name: psum(
            leaf,
            placement.same_axes
            if _has_mlp(name, placement)
            else (*placement.same_axes, *placement.sum_axes),
        )
        for name, leaf in grads.items()
    }


def _gather(x: jax.Array, placement: _Placement) -> jax.Array:
    """Return an array [B, T, ·] of this device's tokens for all tokens, [A, ·]."""
    x = x.reshape(-1, x.shape[-1])
    axes = placement.token_axes
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x


def _scatter(x: jax.Array, placement: _Placement) -> jax.Array:
    """Sum an array [A, ·] over all devices; return the part of this device's tokens."""
    if axes := placement.token_axes:
        # See sharding/collectives.py about narrow floats on CPUs.
        is_narrow = hardware.current().runs_on_cpu and x.dtype.itemsize < 4
        wide = x.astype(jnp.float32) if is_narrow else x
        x = jax.lax.psum_scatter(wide, axes, tiled=True).astype(x.dtype)
        return psum(x, placement.sum_axes)
    return psum(x, (*placement.expert_axes, *placement.sum_axes))


class _Rows(NamedTuple):
    """Some tokens of one expert, or of all experts, [E, ...].

    Rows that are not in use have indices beyond the end, all different within an expert.

    Attributes:
        entries: int32[b], indices into all choices, [A · C].
        tokens: int32[b], indices of their tokens.
    """

    entries: jax.Array
    tokens: jax.Array


@dataclasses.dataclass(frozen=True)
class _Order:
    """The choices of all tokens, sorted by expert.

    Attributes:
        entries: int32[A · C], indices of the choices of this device's experts; then anything.
        spans: int32[E, 2], where each expert's choices start in `entries`, and how many they are.
        per_token: C.
        num_rounds: number of rounds.
        round_size: rows of an expert in a round.
        tokens_per_expert: mean number of tokens of an expert.
        num_parts: number of parts into which the experts are divided.
    """

    entries: jax.Array
    spans: jax.Array
    per_token: int
    num_rounds: int
    round_size: int
    tokens_per_expert: float
    num_parts: int

    @property
    def block_size(self) -> int:
        """Number of rows in a block."""
        return min(_BLOCK_SIZE, max(_MIN_TOKENS, self.round_size))

    def of_round(self, number: jax.Array | int) -> _Rows:
        """Return the rows of all experts in a round."""
        return jax.vmap(lambda span: self._rows(span, number * self.round_size, self.round_size))(
            self.spans
        )

    def of_block(self, span: jax.Array, number: jax.Array) -> _Rows:
        """Return a block of rows of one expert, which come after all rounds."""
        first = self.num_rounds * self.round_size + number * self.block_size
        return self._rows(span, first, self.block_size)

    def for_blocks(self, span: jax.Array, body: Callable, state: Tree) -> Tree:
        """Run state = body(number, state) for all blocks of an expert."""
        num_left = jnp.maximum(span[1] - self.num_rounds * self.round_size, 0)
        num_blocks = -(-num_left // self.block_size)
        blocks = expected_trips(
            "blocks",
            mean=math.ceil(self.tokens_per_expert),
            first=self.num_rounds * self.round_size,
            size=self.block_size,
            parts=self.num_parts,
        )
        with blocks:
            return jax.lax.fori_loop(0, num_blocks, body, state)

    def _rows(self, span: jax.Array, first: jax.Array | int, count: int) -> _Rows:
        """Return rows of one expert, of which `first` is the first one."""
        start, size = span
        total = self.entries.size
        row = jnp.arange(count, dtype=jnp.int32)
        is_used = first + row < size
        entries = jnp.take(self.entries, start + first + row, mode="clip")
        tokens = jnp.where(is_used, entries // self.per_token, total + row)
        return _Rows(jnp.where(is_used, entries, total + row), tokens)


def _sort_by_expert(placement: _Placement, choices_BTC: jax.Array) -> _Order:
    """Sort the choices of all tokens by counting: a token keeps its place among the others.

    XLA's sort on GPUs takes a pass per power of two of their number; this takes a running sum.
    """
    per_device = placement.num_experts // placement.num_parts
    axes = placement.expert_axes
    first = jax.lax.axis_index(axes) * per_device if axes else 0
    choices = _gather(choices_BTC, placement).reshape(-1) - first
    is_chosen = choices[:, None] == jnp.arange(per_device, dtype=jnp.int32)
    up_to = jnp.cumsum(is_chosen, axis=0, dtype=jnp.int32)
    sizes = up_to[-1]
    starts = jnp.cumsum(sizes) - sizes
    place = jnp.sum(jnp.where(is_chosen, starts + up_to - 1, 0), axis=1)
    place = jnp.where(is_chosen.any(axis=1), place, choices.size)
    numbers = jnp.arange(choices.size, dtype=jnp.int32)
    entries = jnp.zeros_like(choices).at[place].set(numbers, mode="drop")
    tokens_per_expert = choices.size / placement.num_experts
    num_rounds, round_size = _rounds(tokens_per_expert, per_device)
    return _Order(
        entries=entries,
        spans=jnp.stack([starts, sizes], axis=1),
        per_token=choices_BTC.shape[-1],
        num_rounds=num_rounds,
        round_size=round_size,
        tokens_per_expert=tokens_per_expert,
        num_parts=placement.num_parts,
    )


def _rounds(tokens_per_expert: float, num_experts: int) -> tuple[int, int]:
    """Return the number of rounds, and the rows of an expert in each."""
    if tokens_per_expert < _MIN_TOKENS:
        return 0, 0
    rows = math.ceil(_ROOM * tokens_per_expert)
    num_rounds = math.ceil(rows * num_experts / _ROWS_PER_ROUND)
    multiple = 128 if rows >= 1024 else 8
    return num_rounds, math.ceil(rows / num_rounds / multiple) * multiple


def _tokens_at(x_AD: jax.Array, rows: _Rows) -> jax.Array:
    """Return the tokens of rows; any token for rows that are not in use, whose factor is 0."""
    return jnp.take(x_AD, rows.tokens, axis=0, mode="clip")


def _factors_at(factors: jax.Array, rows: _Rows) -> jax.Array:
    """Return the factors of rows, and 0 for rows that are not in use."""
    return jnp.take(factors, rows.entries, axis=0, mode="fill", fill_value=0)


def _add_rows(x_AD: jax.Array, rows: _Rows, values_EbD: jax.Array) -> jax.Array:
    """Add a value to the token of each row, for all experts.

    The tokens of one expert are all different. So the sums are deterministic, without atomics.
    """

    def add(x_AD, of_expert):
        tokens, values_bD = of_expert
        return x_AD.at[tokens].add(values_bD, mode="drop", unique_indices=True), None

    return jax.lax.scan(add, x_AD, (rows.tokens, values_EbD))[0]


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
