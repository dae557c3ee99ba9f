"""Experts over a mesh: every token goes to some of many small networks, divided over devices.

The tokens of all devices that divide the experts are gathered, each device computes what its own
experts contribute to them, and the sums are scattered back. With 4 experts on 2 devices:

    device        0             1
    tokens        a b           c d
    gather        a b c d       a b c d
    experts       0 1           2 3
    sums          partial       partial
    scatter       a b           c d

A device computes block by block: it sorts the tokens that chose its experts by expert, and a block
is a fixed number of tokens of one expert. Experts that more tokens choose take more blocks, so no
token is ever dropped, and memory depends on neither the number of experts nor on how even the
choice is. No collective is within a loop, so devices may run different numbers of blocks. The
backward pass does the same again, and keeps only its inputs from the forward pass.

    expert                0         1      2
    tokens, sorted     d a f c e |  b  | g a c
    blocks of 2        (d a)(f c)(e ·) (b ·) (g a)(c ·)

An all-gather moves `devices` copies of a token, an exchange of single tokens (all-to-all) as many
as the token has experts: the gather is the better one unless there are more devices than experts
per token.

A tokens of all devices, N tokens of one, D embed, E experts of one device, C experts per token.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
#: (weights of one expert, tokens [b, D], factors [b]) -> outputs [b, D], each times its factor. It
#: is hashable, and a dim that the axes of "mlp" split may be summed over one device's part only.
Expert = Callable[[Mapping[str, jax.Array], jax.Array, jax.Array], jax.Array]

#: Least and largest number of tokens in a block. Small blocks read an expert's weights more often
#: than necessary; large ones are filled up with more zeros.
_BLOCK_SIZES = (16, 2048)
#: Blocks of an expert if all experts are chosen equally often: one block more wastes a quarter.
_BLOCKS_PER_EXPERT = 4


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
    axes: Mapping[str, tuple[str | None, ...]],
    x_BTD: jax.Array,
    factors_BTC: jax.Array,
    choices_BTC: jax.Array,
    *,
    num_experts: int,
) -> jax.Array:
    """Return for each token the sum of the outputs of the experts that it chose, `[B, T, D]`.

    The gradient of `factors_BTC` is computed too; the choices have none.

    Args:
        expert: function of one expert.
        weights: name -> weights of this device's experts, [E, ...].
        axes: name -> logical axes of the weights; the first is "experts". Weights without the axis
            "mlp" must be added to the output: each device of that axis adds its share.
        x_BTD: tokens of this device.
        factors_BTC: factors of the outputs, float32 or wider.
        choices_BTC: int32, numbers of the experts, all of one token different. A choice outside
            `[0, num_experts)` is no expert.
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

    def of_expert(y_AD, inputs):
        weights, expert_rows = inputs

        def of_block(number, y_AD):
            entries, tokens = order.block(expert_rows, number)
            output = expert(weights, _rows(x_AD, tokens), _rows(factors, entries))
            return y_AD.at[tokens].add(output, mode="drop", unique_indices=True)

        return order.for_blocks(expert_rows, of_block, y_AD), None

    y_AD, _ = jax.lax.scan(of_expert, jnp.zeros_like(x_AD), (weights, order.rows))
    return _scatter(y_AD, placement).reshape(x_BTD.shape)


def _backward(expert, placement: _Placement, weights, x_BTD, factors_BTC, choices_BTC, dy_BTD):
    weights = _shares(weights, placement)
    order = _sort_by_expert(placement, choices_BTC)
    x_AD = _gather(x_BTD, placement)
    dy_AD = _gather(dy_BTD, placement)
    factors = _gather(factors_BTC, placement).reshape(-1)
    once = {"mode": "drop", "unique_indices": True}

    def of_expert(carry, inputs):
        weights, expert_rows = inputs

        def of_block(number, carry):
            dx_AD, dfactors, dweights = carry
            entries, tokens = order.block(expert_rows, number)
            arguments = (weights, _rows(x_AD, tokens), _rows(factors, entries))
            of_weights, of_x, of_factors = jax.vjp(expert, *arguments)[1](_rows(dy_AD, tokens))
            dx_AD = dx_AD.at[tokens].add(of_x, **once)
            dfactors = dfactors.at[entries].set(of_factors, **once)
            dweights = jax.tree.map(lambda total, part: total + part, dweights, of_weights)
            return dx_AD, dfactors, dweights

        # Sums over blocks are wide, as the sums within a product are.
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, _wide(w)), weights)
        *carry, dweights = order.for_blocks(expert_rows, of_block, (*carry, dweights))
        return carry, jax.tree.map(lambda total, w: total.astype(w.dtype), dweights, weights)

    start = [jnp.zeros_like(x_AD), jnp.zeros_like(factors)]
    (dx_AD, dfactors), dweights = jax.lax.scan(of_expert, start, (weights, order.rows))
    dfactors_AC = dfactors.reshape(-1, factors_BTC.shape[-1])
    return (
        _shares(_sum_repeated(dweights, placement), placement),
        _scatter(dx_AD, placement).reshape(x_BTD.shape),
        _scatter(dfactors_AC, placement).reshape(factors_BTC.shape),
    )


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


@dataclasses.dataclass(frozen=True)
class _Order:
    """The choices of all tokens, sorted by expert.

    Attributes:
        entries: int32[A · C], indices of the choices of this device's experts; then anything.
        rows: int32[E, 2], where each expert's choices start in `entries`, and how many they are.
        block_size: number of tokens in a block.
        expected_blocks: number of blocks of an expert if all are chosen equally often.
        per_token: C.
    """

    entries: jax.Array
    rows: jax.Array
    block_size: int
    expected_blocks: int
    per_token: int

    def for_blocks(self, expert_rows: jax.Array, body: Callable, state: Tree) -> Tree:
        """Run state = body(number, state) for all blocks of an expert, given its part of `rows`."""
        num_blocks = -(-expert_rows[1] // self.block_size)
        with expected_trips("blocks", self.expected_blocks):
            return jax.lax.fori_loop(0, num_blocks, body, state)

    def block(self, expert_rows: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a block of an expert, given its part of `rows`.

        Returns:
            Indices into all choices, int32[b], and of their tokens, int32[b]. Rows that are not in
            use have indices beyond the end, all different.
        """
        start, size = expert_rows
        total = self.entries.size
        row = jnp.arange(self.block_size, dtype=jnp.int32)
        place = number * self.block_size + row
        is_used = place < size
        entries = jnp.take(self.entries, start + place, mode="clip")
        tokens = jnp.where(is_used, entries // self.per_token, total + row)
        return jnp.where(is_used, entries, total + row), tokens


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
    mean = choices.size / placement.num_experts
    block_size = _block_size(mean)
    return _Order(
        entries=entries,
        rows=jnp.stack([starts, sizes], axis=1),
        block_size=block_size,
        # The last block of an expert is half full on average.
        expected_blocks=math.ceil(mean / block_size + 0.5),
        per_token=choices_BTC.shape[-1],
    )


def _block_size(tokens_per_expert: float) -> int:
    """Return the number of tokens in a block, a power of two."""
    least, most = _BLOCK_SIZES
    size = 2 ** math.floor(math.log2(max(1.0, tokens_per_expert / _BLOCKS_PER_EXPERT)))
    return min(max(size, least), most)


def _rows(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Return rows of x, and zeros for indices beyond its end."""
    return jnp.take(x, indices, axis=0, mode="fill", fill_value=0)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
