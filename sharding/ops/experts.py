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

If there are many tokens, all of this is done for one *part* of them after the other, so that the
network and the products of different parts are busy at the same time: see `_send_and_compute`.

An all-gather moves `devices` copies of a token, an exchange of single tokens (all-to-all) as many
as the token has experts: the gather is the better one unless there are more devices than experts
per token.

A tokens of all devices in a part, D embed, E experts of one device, C experts per token, P parts.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from sharding import hardware
from sharding.collectives import psum
from sharding.labels import expected_trips
from sharding.logical import active_rules, automatic_axes, manual_mesh_axes
from sharding.spec import axes_of, spec_of

Tree = Any
#: (weights of one expert, tokens [b, D], factors [b]) -> outputs [b, D], each times its factor: a
#: factor of 0 makes the output and all gradients but its own 0. All of them may have a first dim of
#: experts, except for the weights that experts share. It is hashable, and a dim that the axes of
#: "mlp" split may be summed over one device's part only.
Expert = Callable[[Mapping[str, jax.Array], jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sends:
    """How tokens are sent in fewer bytes than they are computed with.

    The names are "input" for the tokens [.., D], and "gradient" for the gradients of the outputs.

    Attributes:
        narrow: (all weights, tokens, name) -> the array that is sent.
        widen: (all weights, received array, name, dtype of the tokens) -> tokens, for which
            `Expert` returns the same results as for the original ones.
    """

    narrow: Callable[[Mapping[str, jax.Array], jax.Array, str], jax.Array]
    widen: Callable[[Mapping[str, jax.Array], jax.Array, str, Any], jax.Array]


#: Names of the tensors that are sent.
_SENT = ("input", "gradient")
#: Rows of an expert in all rounds, as a multiple of the mean number of its tokens.
_ROOM = 1.125
#: Most parts of a device's tokens that are gathered one after another, and fewest tokens of an
#: expert in one, on average: with fewer, products are less efficient.
_MAX_PARTS = 4
_MIN_PART_ROWS = 1024
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
        num_shards: number of parts into which the experts are divided.
        expert_axes: axes of more than one device that divide the experts, major first.
        token_axes: axes among them along which devices have different tokens.
        sum_axes: axes of more than one device that divide the inner dim of the experts.
        same_axes: automatic axes whose devices have the same experts and different tokens.
        weight_specs: names of weights, and their PartitionSpecs over the automatic axes.
        added: names of weights that are added to the output.
        shared: names of weights that all experts share.
        token_spec: PartitionSpec over the automatic axes of tokens [B, T, ...].
        map_axes: automatic axes of more than one device, over which a `shard_map` is needed.
    """

    num_experts: int
    num_shards: int
    expert_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    same_axes: tuple[str, ...]
    weight_specs: tuple[tuple[str, PartitionSpec], ...]
    added: frozenset[str]
    shared: frozenset[str]
    token_spec: PartitionSpec
    map_axes: frozenset[str]

    def over_mesh(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """Return function(*inputs) with all axes manual.

        Args:
            function: takes the parts of one device.
            inputs: tuple with the names of weights in place of dicts of weights, and None in place
                of arrays of tokens, [B, T, ...].
            outputs: the same for the result of the function.
        """
        if not self.map_axes:
            return function
        specs = dict(self.weight_specs)

        def spec(names: Iterable[str] | None) -> Any:
            return self.token_spec if names is None else {name: specs[name] for name in names}

        return jax.shard_map(
            function,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=tuple(map(spec, inputs)),
            out_specs=tuple(map(spec, outputs)) if isinstance(outputs, tuple) else spec(outputs),
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
    added: Collection[str] = (),
    num_experts: int,
    sends: Sends | None = None,
) -> jax.Array:
    """Return for each token the sum of the outputs of the experts that it chose, `[B, T, D]`.

    The gradient of `factors_BTC` is computed too; the choices have none. Weights that are not
    differentiated, such as frozen ones, get no gradients: these are neither computed nor stored.

    Args:
        expert: function of one expert.
        weights: name -> weights of this device's experts, [E, ...].
        x_BTD: tokens of this device.
        factors_BTC: factors of the outputs, float32 or wider.
        choices_BTC: int32, numbers of the experts, all of one token different. A choice outside
            `[0, num_experts)` is no expert.
        axes: name -> logical axes of the weights; the first is "experts". None at all: all experts
            share this array, and it is the same on all devices.
        added: names of weights, without the axis "mlp", that are added to the output: each device
            of that axis adds its share.
        num_experts: number of experts on all devices.
        sends: how tokens are sent to other devices; None: as they are.
    """
    placement = _place(axes, frozenset(added), x_BTD, num_experts)
    if not placement.token_axes:
        sends = None
    return _apply(expert, placement, sends, dict(weights), x_BTD, factors_BTC, choices_BTC)


def _place(
    axes: Mapping[str, tuple[str | None, ...]],
    added: frozenset[str],
    x_BTD: jax.Array,
    num_experts: int,
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
    # Devices along manual axes have different tokens, and so do those along automatic ones over
    # which the batch is split. Along others, such as `model`, they have the same tokens.
    of_tokens = (*manual, *(axis for axis in automatic["experts"] if axis in of_batch))

    def spec(names: tuple[str | None, ...]) -> PartitionSpec:
        # Other dims, which fsdp or ZeRO may split, are whole within a step.
        return spec_of([automatic[n] if n in ("experts", "mlp") else () for n in names])

    return _Placement(
        num_experts=num_experts,
        num_shards=math.prod(mesh.shape[axis] for axis in of_experts),
        expert_axes=of_experts,
        token_axes=of_tokens,
        sum_axes=automatic["mlp"],
        same_axes=tuple(axis for axis in of_batch if axis not in of_experts),
        weight_specs=tuple((name, spec(names)) for name, names in axes.items()),
        added=added,
        shared=frozenset(name for name, names in axes.items() if not names),
        token_spec=spec_of([of_batch]),
        map_axes=frozenset(axis for group in automatic.values() for axis in group),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply(
    expert, placement: _Placement, sends: Sends | None, weights, x_BTD, factors_BTC, choices_BTC
):
    forward = placement.over_mesh(
        partial(_forward, expert, placement, sends), (weights, None, None, None), None
    )
    return forward(weights, x_BTD, factors_BTC, choices_BTC)


def _apply_forward(expert, placement, sends, weights, *tokens):
    """Return the output, and the inputs; weights in two groups, with and without gradients."""
    values = {name: weight.value for name, weight in weights.items()}
    trained = {name: values[name] for name, weight in weights.items() if weight.perturbed}
    frozen = {name: value for name, value in values.items() if name not in trained}
    tokens = [x.value for x in tokens]
    return _apply(expert, placement, sends, values, *tokens), (trained, frozen, *tokens)


def _apply_backward(expert, placement: _Placement, sends, inputs, dy_BTD):
    trained, frozen, x_BTD, *_, choices_BTC = inputs
    if isinstance(dy_BTD, SymbolicZero):
        dy_BTD = jnp.zeros_like(x_BTD)
    backward = placement.over_mesh(
        partial(_backward, expert, placement, sends),
        (trained, frozen, None, None, None, None),
        (trained, None, None),
    )
    dtrained, dx_BTD, dfactors_BTC = backward(*inputs, dy_BTD)
    dweights = {**dtrained, **dict.fromkeys(frozen)}
    return dweights, dx_BTD, dfactors_BTC, np.zeros(choices_BTC.shape, jax.dtypes.float0)


# With symbolic zeros, the forward pass is told which weights are differentiated.
_apply.defvjp(_apply_forward, _apply_backward, symbolic_zeros=True)


def _forward(
    expert, placement: _Placement, sends: Sends | None, weights, x_BTD, factors_BTC, choices_BTC
):
    split = _split_shared(_shares(weights, placement), placement)
    transfer = _Transfer(sends, weights, x_BTD.dtype)
    compute = partial(_forward_part, expert, *split, transfer)
    parts = _split_tokens(placement, factors_BTC, choices_BTC, *transfer.narrow(x_BTD))
    outputs, _ = _send_and_compute(placement, parts, compute, ())
    return jnp.concatenate(outputs).reshape(x_BTD.shape)


def _forward_part(
    expert, shared, stacked, transfer: "_Transfer", part: "_Part", state: Tree
) -> tuple[jax.Array, Tree]:
    """Return (sums of the outputs of this device's experts [A, D], state)."""
    order = part.order
    (x_AD,) = transfer.widen(*part.tokens)

    def output_of(weights, rows: _Rows) -> jax.Array:
        inputs = _tokens_at(x_AD, rows), _factors_at(part.factors, rows)
        return expert({**weights, **shared}, *inputs)

    def of_round(number, y_AD):
        rows = order.of_round(number)
        return _add_rows(y_AD, rows, output_of(stacked, rows))

    def of_block(number, y_AD):
        rows, expert_number = order.of_block(number)
        output = output_of(_weights_at(stacked, expert_number), rows)
        return y_AD.at[rows.tokens].add(output, mode="drop", unique_indices=True)

    y_AD = jax.lax.fori_loop(0, order.num_rounds, of_round, part.zeros_like(x_AD))
    return order.for_blocks(of_block, y_AD), state


def _backward(
    expert,
    placement: _Placement,
    sends: Sends | None,
    trained,
    frozen,
    x_BTD,
    factors_BTC,
    choices_BTC,
    dy_BTD,
):
    weights = _Weights(
        *_split_shared(_shares(trained, placement), placement),
        *_split_shared(_shares(frozen, placement), placement),
    )
    transfer = _Transfer(sends, {**trained, **frozen}, x_BTD.dtype)
    compute = partial(_backward_part, expert, weights, transfer)
    parts = _split_tokens(placement, factors_BTC, choices_BTC, *transfer.narrow(x_BTD, dy_BTD))
    dx, gradients = _send_and_compute(placement, parts, compute, _Gradients())
    totals = reduce(_add, gradients.of_rounds, gradients.of_blocks)
    dweights = jax.tree.map(lambda w, total: total.astype(w.dtype), trained, totals)
    dfactors_PA = jnp.stack(gradients.of_factors)
    dfactors_PAC = dfactors_PA.reshape(len(parts), -1, factors_BTC.shape[-1])
    return (
        _shares(_sum_repeated(dweights, placement), placement),
        jnp.concatenate(dx).reshape(x_BTD.shape),
        _scatter(dfactors_PAC, placement, dim=1).reshape(factors_BTC.shape),
    )


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """Converts tokens before they are sent and after they are received.

    Methods take and return the inputs first, and then the gradients, if there are any.

    Attributes:
        sends: how they are sent; None: as they are.
        weights: all weights.
        dtype: dtype of the tokens.
    """

    sends: Sends | None
    weights: Mapping[str, jax.Array]
    dtype: Any

    def narrow(self, *tokens: jax.Array) -> tuple[jax.Array, ...]:
        """Return the arrays that are sent."""
        if (sends := self.sends) is None:
            return tokens
        return tuple(
            sends.narrow(self.weights, x, name)
            for name, x in zip(_SENT, tokens, strict=False)  # no gradients in a forward pass
        )

    def widen(self, *sent: jax.Array) -> tuple[jax.Array, ...]:
        """Return the tokens of received arrays."""
        if (sends := self.sends) is None:
            return sent
        return tuple(
            sends.widen(self.weights, x, name, self.dtype)
            for name, x in zip(_SENT, sent, strict=False)
        )


class _Weights(NamedTuple):
    """Weights that are differentiated and others; those that all experts share, and stacked ones.

    Attributes:
        shared: name -> differentiated array of all experts.
        stacked: name -> differentiated array with a first dim of experts.
        frozen_shared: as `shared`, but not differentiated.
        frozen_stacked: as `stacked`, but not differentiated.
    """

    shared: dict[str, jax.Array]
    stacked: dict[str, jax.Array]
    frozen_shared: dict[str, jax.Array]
    frozen_stacked: dict[str, jax.Array]

    @property
    def trained(self) -> dict[str, jax.Array]:
        """All differentiated weights."""
        return {**self.shared, **self.stacked}

    def at(self, number: jax.Array) -> "_Weights":
        """Return the weights of one expert."""
        return self._replace(
            stacked=_weights_at(self.stacked, number),
            frozen_stacked=_weights_at(self.frozen_stacked, number),
        )


class _Gradients(NamedTuple):
    """Gradients of the parts so far.

    Attributes:
        of_blocks: gradients of the weights, in the first part's rounds and in all blocks, float32
            or wider; None before the first part.
        of_rounds: the same in the rounds of each further part. They are added after the last part,
            all at once: XLA does not add them within the products.
        of_factors: [A · C] for each part.
    """

    of_blocks: Tree | None = None
    of_rounds: tuple[Tree, ...] = ()
    of_factors: tuple[jax.Array, ...] = ()


def _backward_part(
    expert, weights: _Weights, transfer: "_Transfer", part: "_Part", before: _Gradients
) -> tuple[jax.Array, _Gradients]:
    """Return (gradient of x [A, D], gradients including those of this part)."""
    order = part.order
    x_AD, dy_AD = transfer.widen(*part.tokens)
    once = {"mode": "drop", "unique_indices": True}

    def gradients_of(weights: _Weights, rows: _Rows) -> tuple:
        frozen = {**weights.frozen_stacked, **weights.frozen_shared}
        inputs = (weights.trained, _tokens_at(x_AD, rows), _factors_at(part.factors, rows))
        apply = partial(_with_frozen, expert, frozen)
        return jax.vjp(apply, *inputs)[1](_tokens_at(dy_AD, rows))

    def of_round(number, carry):
        dx_AD, dfactors, dweights = carry
        rows = order.of_round(number)
        of_weights, of_x, of_factors = gradients_of(weights, rows)
        dx_AD = _add_rows(dx_AD, rows, of_x)
        dfactors = dfactors.at[rows.entries].set(of_factors, mode="drop")
        return dx_AD, dfactors, _add(dweights, of_weights)

    def of_block(number, carry):
        dx_AD, dfactors, dweights = carry
        rows, expert_number = order.of_block(number)
        of_weights, of_x, of_factors = gradients_of(weights.at(expert_number), rows)
        dx_AD = dx_AD.at[rows.tokens].add(of_x, **once)
        dfactors = dfactors.at[rows.entries].set(of_factors, **once)
        dweights = {
            name: total + of_weights[name]
            if name in weights.shared
            else total.at[expert_number].add(of_weights[name].astype(total.dtype))
            for name, total in dweights.items()
        }
        return dx_AD, dfactors, dweights

    zeros = part.zeros_like(x_AD), part.zeros_like(part.factors)
    if order.num_rounds == 1:
        *carry, dweights = of_round(0, (*zeros, None))
    else:
        none = jax.tree.map(lambda w: jnp.zeros(w.shape, _wide(w)), weights.trained)
        *carry, dweights = jax.lax.fori_loop(0, order.num_rounds, of_round, (*zeros, none))
    of_blocks = before.of_blocks
    of_rounds = (*before.of_rounds, dweights)
    if of_blocks is None:
        of_blocks = jax.tree.map(lambda x: x.astype(_wide(x)), dweights)
        of_rounds = ()
    dx_AD, dfactors, of_blocks = order.for_blocks(of_block, (*carry, of_blocks))
    return dx_AD, _Gradients(of_blocks, of_rounds, (*before.of_factors, dfactors))


def _add(totals: Tree | None, terms: Tree) -> Tree:
    return terms if totals is None else jax.tree.map(jnp.add, totals, terms)


class _Part(NamedTuple):
    """Some tokens of each device, which are sent and computed together.

    Attributes:
        order: choices of these tokens of all devices, sorted by expert.
        factors: float[A · C], their factors.
        tokens: arrays of the tokens, [b, D] of one device or, once they are gathered, [A, D].
        zero: float32[], a 0 that XLA cannot know to be the same as that of another part.
    """

    order: "_Order"
    factors: jax.Array
    tokens: tuple[jax.Array, ...]
    zero: jax.Array

    def zeros_like(self, x: jax.Array) -> jax.Array:
        """Return zeros. If several parts had the same ones, XLA would copy them for each."""
        return jnp.broadcast_to(self.zero.astype(x.dtype), x.shape)


def _split_tokens(
    placement: _Placement, factors_BTC: jax.Array, choices_BTC: jax.Array, *tokens_BTD: jax.Array
) -> list[_Part]:
    """Return the parts of this device's tokens; each has enough rows for efficient products."""
    mesh = jax.sharding.get_abstract_mesh()
    num_tokens = math.prod(choices_BTC.shape[:2])
    num_choices = choices_BTC.size * math.prod(mesh.shape[axis] for axis in placement.token_axes)
    rows_of_expert = num_choices // placement.num_experts
    max_count = min(_MAX_PARTS, rows_of_expert // _MIN_PART_ROWS) if placement.token_axes else 1
    count = max(n for n in range(1, max(1, max_count) + 1) if num_tokens % n == 0)

    def parts_of(x: jax.Array) -> jax.Array:
        return x.reshape(count, -1, x.shape[-1])

    choices_PAC = _gather(parts_of(choices_BTC), placement, dim=1)
    factors_PAC = _gather(parts_of(factors_BTC), placement, dim=1).reshape(count, -1)
    orders = jax.vmap(partial(_sort_by_expert, placement))(choices_PAC)
    tokens_PbD = tuple(parts_of(x) for x in tokens_BTD)
    every = (orders, factors_PAC, tokens_PbD)
    return [
        _Part(*jax.tree.map(lambda x: x[number], every), zero=jnp.zeros(()))  # noqa: B023
        for number in range(count)
    ]


def _send_and_compute(
    placement: _Placement,
    parts: list[_Part],
    compute: Callable[[_Part, Tree], tuple[jax.Array, Tree]],
    state: Tree,
) -> tuple[list[jax.Array], Tree]:
    """Gather the tokens of each part, compute sums [A, D] for them, and scatter these.

    While one part is computed, the sums of the part before are scattered and the tokens of the next
    one are gathered. Barriers keep XLA from computing parts side by side, which would leave nothing
    to hide communication behind, and from combining the scatters of all parts into one at the end.

        computed:     0        1        2
        sent:      0     1   0    2   1      2
                   gather    scatter, gather

    Returns:
        (sums of each part for this device's tokens [b, D], the last state)
    """
    outputs: list[jax.Array] = []
    sums = None
    for part in parts:
        tokens, outputs[-1:] = jax.lax.optimization_barrier((part.tokens, outputs[-1:]))
        part = part._replace(tokens=tuple(_gather(x, placement) for x in tokens))
        part, sums = jax.lax.optimization_barrier((part, sums))
        if sums is not None:
            outputs.append(_scatter(sums, placement))
        sums, state = compute(part, state)
    sums, outputs[-1:] = jax.lax.optimization_barrier((sums, outputs[-1:]))
    return [*outputs, _scatter(sums, placement)], state


def _weights_at(weights: Mapping[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """Return the weights of one expert."""
    at = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
    return {name: at(leaf) for name, leaf in weights.items()}


def _with_frozen(expert: Expert, frozen, trained, x: jax.Array, factors: jax.Array) -> jax.Array:
    return expert({**trained, **frozen}, x, factors)


def _split_shared(
    weights: Mapping[str, jax.Array], placement: _Placement
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the weights that all experts share, and those with a first dim of experts."""
    shared = {name: leaf for name, leaf in weights.items() if name in placement.shared}
    return shared, {name: leaf for name, leaf in weights.items() if name not in shared}


def _has_mlp(name: str, placement: _Placement) -> bool:
    """Return whether the axes of the sum split the weights of this name."""
    spec = dict(placement.weight_specs)[name]
    return not {*placement.sum_axes}.isdisjoint(axes_of(spec))


def _shares(weights: Mapping[str, jax.Array], placement: _Placement) -> dict[str, jax.Array]:
    """Return the weights, with an equal share of those that are added to the output."""
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in placement.sum_axes)
    return {
        name: leaf / count if count > 1 and name in placement.added else leaf
        for name, leaf in weights.items()
    }


def _sum_repeated(grads: Mapping[str, jax.Array], placement: _Placement) -> dict[str, jax.Array]:
    """Sum the gradients of weights over the devices that have the same weights."""

    def axes(name: str) -> tuple[str, ...]:
        axes = placement.same_axes
        if not _has_mlp(name, placement):
            axes = (*axes, *placement.sum_axes)
        if name in placement.shared:
            axes = (*axes, *(a for a in placement.expert_axes if a in placement.map_axes))
        return axes

    return {name: psum(leaf, axes(name)) for name, leaf in grads.items()}


def _gather(x: jax.Array, placement: _Placement, dim: int = 0) -> jax.Array:
    """Return an array of this device's tokens for all tokens; they are along one dim."""
    axes = placement.token_axes
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, placement: _Placement, dim: int = 0) -> jax.Array:
    """Sum an array of all tokens over all devices; return the part of this device's tokens."""
    if axes := placement.token_axes:
        # See sharding/collectives.py about narrow floats on CPUs.
        is_narrow = hardware.current().runs_on_cpu and x.dtype.itemsize < 4
        wide = x.astype(jnp.float32) if is_narrow else x
        x = jax.lax.psum_scatter(wide, axes, scatter_dimension=dim, tiled=True).astype(x.dtype)
    others = (axis for axis in placement.expert_axes if axis not in placement.token_axes)
    return psum(x, (*others, *placement.sum_axes))


class _Rows(NamedTuple):
    """Some tokens of one expert, or of all experts, [E, ...].

    Rows that are not in use have indices beyond the end, all different within an expert.

    Attributes:
        entries: int32[b], indices into all choices, [A · C].
        tokens: int32[b], indices of their tokens.
    """

    entries: jax.Array
    tokens: jax.Array


@jax.tree_util.register_dataclass
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
        num_shards: number of parts into which the experts are divided.
    """

    entries: jax.Array
    spans: jax.Array
    per_token: int = dataclasses.field(metadata={"static": True})
    num_rounds: int = dataclasses.field(metadata={"static": True})
    round_size: int = dataclasses.field(metadata={"static": True})
    tokens_per_expert: float = dataclasses.field(metadata={"static": True})
    num_shards: int = dataclasses.field(metadata={"static": True})

    @property
    def block_size(self) -> int:
        """Number of rows in a block."""
        return min(_BLOCK_SIZE, max(_MIN_TOKENS, self.round_size))

    def of_round(self, number: jax.Array | int) -> _Rows:
        """Return the rows of all experts in a round."""
        return jax.vmap(lambda span: self._rows(span, number * self.round_size, self.round_size))(
            self.spans
        )

    @property
    def num_blocks_E(self) -> jax.Array:
        """Numbers of blocks that the experts need after all rounds, int32[E]."""
        left = self.spans[:, 1] - self.num_rounds * self.round_size
        return -(-jnp.maximum(left, 0) // self.block_size)

    def of_block(self, number: jax.Array) -> tuple[_Rows, jax.Array]:
        """Return the rows of a block, and the number of its expert on this device."""
        ends_E = jnp.cumsum(self.num_blocks_E)
        expert_number = jnp.sum(number >= ends_E)
        of_expert = number - (ends_E - self.num_blocks_E)[expert_number]
        first = self.num_rounds * self.round_size + of_expert * self.block_size
        return self._rows(self.spans[expert_number], first, self.block_size), expert_number

    def for_blocks(self, body: Callable, state: Tree) -> Tree:
        """Run state = body(number, state) for the blocks of all experts."""
        blocks = expected_trips(
            "blocks",
            experts=min(len(self.spans), self.entries.size),
            mean=math.ceil(self.tokens_per_expert),
            first=self.num_rounds * self.round_size,
            size=self.block_size,
            parts=self.num_shards,
        )
        with blocks:
            return jax.lax.fori_loop(0, jnp.sum(self.num_blocks_E), body, state)

    def _rows(self, span: jax.Array, first: jax.Array | int, count: int) -> _Rows:
        """Return rows of one expert, of which `first` is the first one."""
        start, size = span
        total = self.entries.size
        row = jnp.arange(count, dtype=jnp.int32)
        is_used = first + row < size
        entries = jnp.take(self.entries, start + first + row, mode="clip")
        tokens = jnp.where(is_used, entries // self.per_token, total + row)
        return _Rows(jnp.where(is_used, entries, total + row), tokens)


def _sort_by_expert(placement: _Placement, choices_AC: jax.Array) -> _Order:
    """Sort the choices of all tokens by counting: a token keeps its place among the others.

    XLA's sort on GPUs takes a pass per power of two of their number; this takes a running sum.
    """
    per_device = placement.num_experts // placement.num_shards
    axes = placement.expert_axes
    first = jax.lax.axis_index(axes) * per_device if axes else 0
    choices = choices_AC.reshape(-1) - first
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
        per_token=choices_AC.shape[-1],
        num_rounds=num_rounds,
        round_size=round_size,
        tokens_per_expert=tokens_per_expert,
        num_shards=placement.num_shards,
    )


def _rounds(tokens_per_expert: float, num_experts: int) -> tuple[int, int]:
    """Return the number of rounds, and the rows of an expert in each."""
    if tokens_per_expert < _MIN_TOKENS:
        return 0, 0
    rows = math.ceil(_ROOM * tokens_per_expert)
    num_rounds = math.ceil(rows * num_experts / _ROWS_PER_ROUND)
    # Products in float8 contract multiples of 16.
    multiple = 128 if rows >= 1024 else 16
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

    return jax.lax.scan(add, x_AD, (rows.tokens, values_EbD), unroll=4)[0]


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
