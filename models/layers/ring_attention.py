"""Attention over a sequence that is split over the devices of a ring.

Every device keeps its queries. Keys and values travel around the ring; a device attends to each
block of them as it passes, and merges the outputs of the blocks by their log-sum-exp:

    hop      device 0      device 1      device 2      device 3
     0       q0 · kv0      q1 · kv1      q2 · kv2      q3 · kv3
     1       q0 · kv3      q1 · kv0      q2 · kv1      q3 · kv2
     2       q0 · kv2      q1 · kv3      q2 · kv0      q3 · kv1
     3       q0 · kv1      q1 · kv2      q2 · kv3      q3 · kv0

While a block is computed, the next one is already on its way. The backward pass sends keys and
values around once more, together with their gradients.

If attention is causal, half of these blocks are above the diagonal, and contiguous parts of the
sequence would leave the first devices idle. The sequence is therefore in *zigzag* order: of 2r
chunks, device i of r has the chunks i and 2r-1-i. Exactly two of the four pairs of chunks are then
visible on every device in every later hop, and both are visible entirely:

                     keys of an earlier device       keys of a later device
                     chunk s     chunk 2r-1-s        chunk s     chunk 2r-1-s
    chunk i          visible     hidden              hidden      hidden
    chunk 2r-1-i     visible     hidden              visible     visible

B batch, T query seq on one device, S key seq on one device, N heads, K key-value heads, H head dim.

Source: Liu et al. 2023 (arXiv:2310.01889); merging: Dao et al. 2022 (arXiv:2205.14135); the order
of the chunks: Zhu 2024, "ring-flash-attention", zigzag variant.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from models.layers.masks import Gradients, Mask, Operands, Options, Results, Segments
from sharding.ops.ring import ring_index, shift
from sharding.ops.sequence import AXIS, SequenceSplit


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKernel:
    """A kernel that attends to a block of keys, and returns what is needed to merge blocks.

    Attributes:
        forward: returns results for the block.
        backward: returns gradients for the block, given the results over all blocks and the
            cotangent of the output.
    """

    forward: Callable[[Operands, Options], Results]
    backward: Callable[[Operands, Options, Results, jax.Array], Gradients]


#: (parameters, int32[T] positions of queries, int32[S] positions of keys) -> bias[B or 1, N, T, S].
BiasFunction = Callable[[Any, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingOptions:
    """Static options of attention on a ring.

    Attributes:
        split: how the sequence is divided over groups of devices, which form a ring.
        attention: options of attention to the whole sequence.
        kernel: what attends to a block.
        bias_of: bias of a block, or None.
    """

    split: SequenceSplit
    attention: Options
    kernel: BlockKernel
    bias_of: BiasFunction | None = None

    @property
    def mask(self) -> Mask:
        """Which keys a query sees, by their positions in the whole sequence."""
        return self.attention.mask


def attend_on_ring(
    options: RingOptions,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments: Segments | None,
    bias_params: Any = None,
    sinks_1N: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q·kᵀ · scale + bias)·v over the keys of all devices, `[B, T, N, H]`.

    A query that sees no key has the output 0. Output and statistics are named "attention".

    Args:
        options: static options.
        q_BTNH: queries of this device, in the ring's order.
        k_BSKH: keys of this device; S is T unless this is cross-attention.
        v_BSKH: values of this device.
        segments: int32[B, T] and int32[B, S] of this device, or None.
        bias_params: parameters of the bias, a tree of arrays.
        sinks_1N: as for `models.layers.attention.attend`.

    Raises:
        ValueError: attention is causal, but the order of the sequence is not zigzag.
    """
    if options.mask.is_causal and not options.split.is_zigzag:
        raise ValueError("causal attention on a ring needs a sequence in zigzag order")
    return _attend(options, q_BTNH, k_BSKH, v_BSKH, segments, bias_params, sinks_1N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: RingOptions, q, k, v, segments, bias_params, sinks_1N) -> jax.Array:
    return _forward(options, q, k, v, segments, bias_params, sinks_1N)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of the kernel: chunks of queries and of keys, and the mask between them.

    Attributes:
        q_chunk: which of the device's chunks of queries, int or int32[]; None: all of them.
        k_chunk: the same for the keys.
        masks: those that the call may need.
        which: int32[], 1 + the index of the mask, or 0 if no query sees a key; None: always the
            first mask.
    """

    q_chunk: Any = None
    k_chunk: Any = None
    masks: tuple[Mask, ...]
    which: jax.Array | None = None


_WHOLE = Mask(is_causal=False, window=None)


def _calls(options: RingOptions, hop: Any, chunk_length: int) -> list[_Call]:
    """Return the calls of a hop: int, or int32[] for any hop but the first."""
    split = options.split
    mask = options.mask
    if split.ring_size == 1:
        return [_Call(masks=(mask,))]
    if not mask.is_causal and mask.window is None:
        return [_Call(masks=(_WHOLE,))]
    is_own = isinstance(hop, int) and hop == 0
    index = ring_index(AXIS, split.ring_size)
    if mask.window is not None:
        return _windowed_calls(options, index, (index - hop) % split.ring_size, chunk_length)
    if is_own:
        # In zigzag order the first chunk is before the second, so the mask by index is right.
        return [_Call(masks=(mask,))]
    is_later = (hop > index).astype(jnp.int32)  # whether the keys are of a later device
    return [
        _Call(q_chunk=1, k_chunk=0, masks=(_WHOLE,)),
        _Call(q_chunk=is_later, k_chunk=is_later, masks=(_WHOLE,)),
    ]


def _windowed_calls(options: RingOptions, index, source, chunk_length: int) -> list[_Call]:
    """Return a call for each pair of chunks; the distance of the chunks decides the mask."""
    masks, which_of = _masks_by_distance(options.mask, chunk_length)
    first = _distances(options.mask, chunk_length).start
    calls = []
    for q_chunk, q_number in enumerate(options.split.chunk_numbers(index)):
        for k_chunk, k_number in enumerate(options.split.chunk_numbers(source)):
            distance = q_number - k_number - first
            is_visible = (distance >= 0) & (distance < len(which_of))
            which = jnp.asarray(which_of)[jnp.clip(distance, 0, len(which_of) - 1)]
            which = jnp.where(is_visible, which, 0)
            calls.append(_Call(q_chunk=q_chunk, k_chunk=k_chunk, masks=masks, which=which))
    return calls


def _masks_by_distance(mask: Mask, chunk_length: int) -> tuple[tuple[Mask, ...], np.ndarray]:
    """Return the masks between chunks, and 1 + the index of the mask for each distance of chunks.

    A window contains earlier chunks whole, except for the last two that it touches.
    """
    assert mask.window is not None
    masks: list[Mask] = []
    which_of = []
    for distance in _distances(mask, chunk_length):
        is_whole = distance != 0 and (abs(distance) + 1) * chunk_length - 1 < mask.window
        of_chunk = _WHOLE if is_whole else dataclasses.replace(mask, offset=distance * chunk_length)
        if of_chunk not in masks:
            masks.append(of_chunk)
        which_of.append(1 + masks.index(of_chunk))
    return tuple(masks), np.asarray(which_of, np.int32)


def _distances(mask: Mask, chunk_length: int) -> range:
    """Return how far, in chunks, the keys that a query sees through a window are before it."""
    assert mask.window is not None
    farthest = (mask.window + chunk_length - 2) // chunk_length
    return range(0 if mask.is_causal else -farthest, farthest + 1)


def _hops(options: RingOptions, chunk_length: int) -> list[int]:
    """Return the hops after the first in which some device sees keys."""
    split = options.split
    if options.mask.window is None:
        return list(range(1, split.ring_size))
    distances = _distances(options.mask, chunk_length)

    def is_needed(hop: int) -> bool:
        return any(
            q - k in distances
            for index in range(split.ring_size)
            for q in split.chunk_numbers(index)
            for k in split.chunk_numbers((index - hop) % split.ring_size)
        )

    return [hop for hop in range(1, split.ring_size) if is_needed(hop)]


def _over_hops(options: RingOptions, hops: Sequence[int], step: Callable, carry: Any) -> Any:
    """Run `step(carry, hop, distance)` for each hop; `distance` leads to the next, None after all.

    One after another hops are a loop, which needs memory for one hop only.
    """
    if len(hops) > 3 and list(hops) == list(range(hops[0], hops[-1] + 1)):

        def body(carry, hop):
            return step(carry, hop, 1), None

        carry = jax.lax.scan(body, carry, jnp.arange(hops[0], hops[-1], dtype=jnp.int32))[0]
        return step(carry, jnp.int32(hops[-1]), None)
    for hop, following in zip(hops, [*hops[1:], None], strict=True):
        distance = None if following is None else following - hop
        carry = step(carry, jnp.int32(hop), distance)
    return carry


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """The arrays of a call: chunks of the device's queries, and of the keys that have arrived.

    Attributes:
        call: which chunks they are.
        num_chunks: number of chunks of a device.
    """

    call: _Call
    num_chunks: int

    def queries(self, x: Any, dim: int = 1) -> Any:
        """Return the part of arrays that belongs to the call's queries."""
        return jax.tree.map(lambda x: _chunk(x, self.call.q_chunk, self.num_chunks, dim), x)

    def keys(self, x: Any, dim: int = 1) -> Any:
        """Return the part of arrays that belongs to the call's keys."""
        return jax.tree.map(lambda x: _chunk(x, self.call.k_chunk, self.num_chunks, dim), x)

    def set_queries(self, x: jax.Array, part: jax.Array, dim: int = 1) -> jax.Array:
        """Return `x` with another part for the call's queries."""
        return _with_chunk(x, part, self.call.q_chunk, self.num_chunks, dim)

    def set_keys(self, x: jax.Array, part: jax.Array, dim: int = 1) -> jax.Array:
        """Return `x` with another part for the call's keys."""
        return _with_chunk(x, part, self.call.k_chunk, self.num_chunks, dim)

    def run(self, segments: Segments | None, function: Callable[[Mask], Any], hidden: Any) -> Any:
        """Return function(mask), or `hidden` if no query of the block sees a key.

        Args:
            segments: of the block's queries and keys.
            function: (mask) -> a tree like `hidden`.
            hidden: result for a block that is not computed.
        """
        which = self.call.which
        if segments is not None:
            may_see = jnp.any(_ranges_overlap(*segments))
            which = jnp.where(may_see, 1 if which is None else which, 0)
        if which is None:
            return function(self.call.masks[0])
        branches = [lambda: hidden]
        branches += [functools.partial(function, mask) for mask in self.call.masks]
        return jax.lax.switch(which, branches)


def _chunk(x: jax.Array, chunk: Any, num_chunks: int, dim: int) -> jax.Array:
    if chunk is None:
        return x
    size = x.shape[dim] // num_chunks
    return jax.lax.dynamic_slice_in_dim(x, chunk * size, size, dim)


def _with_chunk(x: jax.Array, part: jax.Array, chunk: Any, num_chunks: int, dim: int) -> jax.Array:
    if chunk is None:
        return part
    start = chunk * (x.shape[dim] // num_chunks)
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)


def _ranges_overlap(q_ids_BT: jax.Array, k_ids_BS: jax.Array) -> jax.Array:
    """Return bool[B]: whether the ranges of the segment ids of queries and keys overlap."""
    starts_before_end = jnp.min(q_ids_BT, axis=1) <= jnp.max(k_ids_BS, axis=1)
    return starts_before_end & (jnp.min(k_ids_BS, axis=1) <= jnp.max(q_ids_BT, axis=1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Passing:
    """What travels around the ring.

    Attributes:
        k_BSKH: keys.
        v_BSKH: values.
        ids_BS: segment ids, or None.
    """

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    ids_BS: jax.Array | None

    def shifted(self, split: SequenceSplit, distance: int) -> "_Passing":
        """Send this to the device `distance` further, and return what arrives.

        Keys and values are one array on the way: by default XLA has one permutation in flight.
        """
        kv = jnp.concatenate((self.k_BSKH, self.v_BSKH), axis=-1)
        kv, ids_BS = shift((kv, self.ids_BS), AXIS, distance=distance, ring_size=split.ring_size)
        k_BSKH, v_BSKH = jnp.split(kv, [self.k_BSKH.shape[-1]], axis=-1)
        return _Passing(k_BSKH=k_BSKH, v_BSKH=v_BSKH, ids_BS=ids_BS)


class _Attention:
    """Attention of one device's queries to the blocks that arrive.

    Args:
        options: static options.
        q_BTNH: queries.
        ids_BT: segment ids of the queries, or None.
        num_keys: S.
        bias_params: parameters of the bias.
    """

    def __init__(self, options: RingOptions, q_BTNH, ids_BT, num_keys: int, bias_params: Any):
        self.options = options
        self.split = options.split
        self.q_BTNH = q_BTNH
        self.wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        self._ids_BT = ids_BT
        self._num_keys = num_keys
        self._chunk_length = q_BTNH.shape[1] // self.split.num_chunks
        self._bias_params = bias_params
        self.hops = _hops(options, self._chunk_length)

    def blocks(self, hop: Any) -> list[_Block]:
        """Return the blocks of a hop."""
        calls = _calls(self.options, hop, self._chunk_length)
        return [_Block(call=call, num_chunks=self.split.num_chunks) for call in calls]

    def options_of(self, mask: Mask) -> Options:
        """Return the options of a block with this mask."""
        return dataclasses.replace(self.options.attention, mask=mask)

    def arrays_of(self, block: _Block, passing: _Passing) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the queries, keys and values of a block."""
        q = block.queries(self.q_BTNH)
        return q, block.keys(passing.k_BSKH), block.keys(passing.v_BSKH)

    def segments_of(self, block: _Block, passing: _Passing) -> Segments | None:
        """Return the segment ids of a block's queries and keys."""
        if self._ids_BT is None or passing.ids_BS is None:
            return None
        return block.queries(self._ids_BT), block.keys(passing.ids_BS)

    def bias_of(self, block: _Block, hop: Any) -> tuple[jax.Array | None, Callable]:
        """Return the bias of a block, and the function from its gradient to that of parameters."""
        bias_of = self.options.bias_of
        if bias_of is None:
            return None, lambda dbias: None
        index = ring_index(AXIS, self.split.ring_size)
        source = (index - hop) % self.split.ring_size
        q_positions = block.queries(self.split.group_positions(index, self.q_BTNH.shape[1]), dim=0)
        k_positions = block.keys(self.split.group_positions(source, self._num_keys), dim=0)
        return jax.vjp(lambda params: bias_of(params, q_positions, k_positions), self._bias_params)

    def forward(self, hop: Any, passing: _Passing, y, lse_BNT) -> tuple[jax.Array, jax.Array]:
        """Merge the blocks of a hop into the output and the log-sum-exp."""
        for block in self.blocks(hop):
            segments = self.segments_of(block, passing)
            merged = block.queries(y), block.queries(lse_BNT, dim=2)

            def attend(mask: Mask, block=block, segments=segments, merged=merged):
                arrays = self.arrays_of(block, passing)
                operands = Operands(*arrays, bias=self.bias_of(block, hop)[0], segments=segments)
                new = self.options.kernel.forward(operands, self.options_of(mask))
                return _merge(merged[0], merged[1], new.y, new.lse)

            part, lse_part = block.run(segments, attend, merged)
            y = block.set_queries(y, part)
            lse_BNT = block.set_queries(lse_BNT, lse_part, dim=2)
        return y, lse_BNT

    def backward(self, hop: Any, passing: _Passing, y, lse_BNT, dy, gradients: "_Gradients"):
        """Add the gradients of the blocks of a hop."""
        for block in self.blocks(hop):
            segments = self.segments_of(block, passing)
            arrays = self.arrays_of(block, passing)
            bias, bias_gradient = self.bias_of(block, hop)
            hidden = jax.tree.map(
                lambda x: jnp.zeros(x.shape, self.wide), (*arrays, self._bias_params)
            )

            def attend(
                mask: Mask,
                block=block,
                segments=segments,
                arrays=arrays,
                bias=bias,
                bias_gradient=bias_gradient,
            ):
                operands = Operands(*arrays, bias=bias, segments=segments)
                results = Results(lse=block.queries(lse_BNT, dim=2), y=block.queries(y))
                options = self.options_of(mask)
                dy_of_block = block.queries(dy)
                *own, dbias = self.options.kernel.backward(operands, options, results, dy_of_block)
                (dparams,) = (None,) if bias is None else bias_gradient(dbias)
                return jax.tree.map(lambda x: x.astype(self.wide), (*own, dparams))

            dq, dk, dv, dparams = block.run(segments, attend, hidden)
            gradients = gradients.plus(block, dq, dk, dv, dparams)
        return gradients


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Sums of gradients, float32 or wider: of this device's queries, and of keys that travel.

    Attributes:
        dq: of the queries, `[B, T, N, H]`.
        dkv: of keys and values, joined along the last dim.
        dparams: of the bias's parameters.
    """

    dq: jax.Array
    dkv: jax.Array
    dparams: Any

    def plus(self, block: _Block, dq, dk, dv, dparams) -> "_Gradients":
        """Return the sums with the gradients of a block added."""
        dkv = jnp.concatenate((dk, dv), axis=-1)
        return _Gradients(
            dq=block.set_queries(self.dq, block.queries(self.dq) + dq),
            dkv=block.set_keys(self.dkv, block.keys(self.dkv) + dkv),
            dparams=jax.tree.map(jnp.add, self.dparams, dparams),
        )


def _merge(y, lse_BNT, new_y, new_lse_BNT) -> tuple[jax.Array, jax.Array]:
    """Merge the outputs for two sets of keys; a set of which a query sees nothing has -inf."""
    total = jnp.logaddexp(lse_BNT, new_lse_BNT)
    largest = jnp.where(jnp.isfinite(total), total, 0)

    def weight(lse_BNT: jax.Array) -> jax.Array:
        return jnp.exp(lse_BNT - largest).swapaxes(1, 2)[..., None]

    return y * weight(lse_BNT) + new_y.astype(y.dtype) * weight(new_lse_BNT), total


def _forward(options: RingOptions, q, k, v, segments, bias_params, sinks_1N):
    q_ids, k_ids = (None, None) if segments is None else segments
    attention = _Attention(options, q, q_ids, k.shape[1], bias_params)
    own = _Passing(k_BSKH=k, v_BSKH=v, ids_BS=k_ids)
    split = options.split

    def step(carry, hop, distance: int | None):
        passing, *merged = carry
        following = passing if distance is None else passing.shifted(split, distance)
        return following, *attention.forward(hop, passing, *merged)

    batch, length, num_heads, _ = q.shape
    y = jnp.zeros((batch, length, num_heads, v.shape[-1]), attention.wide)
    # A sink is as a key that every query sees, whose value is 0.
    sees_nothing = -jnp.inf if sinks_1N is None else sinks_1N[:, :, None].astype(attention.wide)
    lse_BNT = jnp.full((batch, num_heads, length), sees_nothing, attention.wide)
    # The first send starts before the device attends to its own keys.
    passing = own.shifted(split, attention.hops[0]) if attention.hops else own
    merged = attention.forward(0, own, y, lse_BNT)
    if attention.hops:
        _, *merged = _over_hops(options, attention.hops, step, (passing, *merged))
    y, lse_BNT = merged
    y = checkpoint_name(y.astype(q.dtype), "attention")
    lse_BNT = checkpoint_name(lse_BNT, "attention")
    return y, (q, k, v, segments, bias_params, sinks_1N, y, lse_BNT)


def _backward(options: RingOptions, residuals, dy):
    q, k, v, segments, bias_params, sinks_1N, y, lse_BNT = residuals
    q_ids, k_ids = (None, None) if segments is None else segments
    attention = _Attention(options, q, q_ids, k.shape[1], bias_params)
    own = _Passing(k_BSKH=k, v_BSKH=v, ids_BS=k_ids)
    split = options.split
    hops = attention.hops
    wide = attention.wide

    def send(dkv: jax.Array, distance: int) -> jax.Array:
        """Send gradients after the keys that they belong to, in the dtype of the keys."""
        dkv = shift(dkv.astype(k.dtype), AXIS, distance=distance, ring_size=split.ring_size)
        return dkv.astype(wide)

    def step(carry, hop, distance: int | None):
        passing, gradients = carry
        following = passing if distance is None else passing.shifted(split, distance)
        gradients = attention.backward(hop, passing, y, lse_BNT, dy, gradients)
        if distance is not None:
            gradients = dataclasses.replace(gradients, dkv=send(gradients.dkv, distance))
        return following, gradients

    zeros = _Gradients(
        dq=jnp.zeros(q.shape, wide),
        dkv=jnp.zeros((*k.shape[:-1], k.shape[-1] + v.shape[-1]), wide),
        dparams=jax.tree.map(lambda x: jnp.zeros(x.shape, wide), bias_params),
    )
    passing = own.shifted(split, hops[0]) if hops else own
    gradients = attention.backward(0, own, y, lse_BNT, dy, zeros)
    if hops:
        # The gradients of the keys that travel start at 0; those of the own keys wait here.
        own_dkv = gradients.dkv
        gradients = dataclasses.replace(gradients, dkv=zeros.dkv)
        _, gradients = _over_hops(options, hops, step, (passing, gradients))
        returned = send(gradients.dkv, split.ring_size - hops[-1])
        gradients = dataclasses.replace(gradients, dkv=own_dkv + returned)
    dk, dv = jnp.split(gradients.dkv.astype(k.dtype), [k.shape[-1]], axis=-1)
    dparams = jax.tree.map(lambda x, like: x.astype(like.dtype), gradients.dparams, bias_params)
    dsinks_1N = None
    if sinks_1N is not None:
        weights_BNT = jnp.exp(sinks_1N[:, :, None].astype(wide) - lse_BNT)
        shift_BTN = jnp.sum(dy.astype(wide) * y.astype(wide), axis=-1)
        dsinks_N = -jnp.einsum("BNT,BTN->N", weights_BNT, shift_BTN)
        dsinks_1N = dsinks_N[None].astype(sinks_1N.dtype)
    return gradients.dq.astype(q.dtype), dk, dv, None, dparams, dsinks_1N


_attend.defvjp(_forward, _backward)
