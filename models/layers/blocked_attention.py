"""Attention over blocks of queries in plain jax.numpy: for CPUs, float64 and soft-capped scores.

Each block of queries is multiplied only with the keys that it can see. With 4 blocks and a causal
mask, these are the parts of the T × S logits marked with x; the rest is never computed:

                keys
    queries     x . . .
                x x . .
                x x x .
                x x x x

Only one block's logits exist at a time, and the residuals for the backward pass are linear in the
sequence length. Matrix products are batched over leading dims (B, K), which is fast on CPUs. On
GPUs, where blocks have more rows than fit, a loop computes the rows of a block a few at a time, so
that all memory is linear.

B batch, T query seq, S key seq, N heads, K key-value heads, G = N / K, H head_dim.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.layers.masks import Gradients, Mask, Operands, Options, Results, Segments
from sharding import hardware

#: Number of queries per block of causal attention, and maximum number of blocks. n blocks compute
#: (n + 1) / 2n of the full products, but matrix products with few rows are slow.
_BLOCK_QUERIES = 128
_MAX_BLOCKS = 8

#: Number of queries whose logits exist at the same time on GPUs.
_STEP_QUERIES = 256


def _blocks(mask: Mask, num_queries: int, num_keys: int) -> list[tuple[slice, slice]]:
    """Return (queries, keys that they can see) for each block."""
    sees_all = not mask.is_causal and mask.window is None
    count = 1 if sees_all else min(-(-num_queries // _BLOCK_QUERIES), _MAX_BLOCKS)
    bounds = [num_queries * i // count for i in range(count + 1)]
    return [(slice(*rows), _keys(mask, *rows, num_keys)) for rows in itertools.pairwise(bounds)]


def _keys(mask: Mask, start: int, stop: int, num_keys: int) -> slice:
    """Return the keys that queries start..stop - 1 can see, at least one key."""
    first, last = 0, num_keys
    if mask.window is not None:
        first = max(0, start + mask.offset - mask.window + 1)
        last = stop + mask.offset + mask.window - 1
    if mask.is_causal:
        last = stop + mask.offset
    first = min(first, num_keys - 1)
    return slice(first, max(first + 1, min(last, num_keys)))


def _visible(mask: Mask, rows: slice, keys: slice, first_row: Any) -> jax.Array | None:
    """Return bool[T, S] for a block, or None if every query sees every key of the block.

    Args:
        mask: which keys a query sees.
        rows: queries of the block, counted from `first_row`.
        keys: keys of the block.
        first_row: 0, or int32[] in a loop.
    """
    if not mask.is_causal and mask.window is None:
        return None
    rows_T = mask.offset + first_row + jnp.arange(rows.start, rows.stop)
    distance_TS = rows_T[:, None] - jnp.arange(keys.start, keys.stop)
    if mask.window is None:
        return distance_TS >= 0
    if not mask.is_causal:
        return jnp.abs(distance_TS) < mask.window
    return (distance_TS >= 0) & (distance_TS < mask.window)


def attend_in_blocks(operands: Operands, options: Options) -> jax.Array:
    """Return softmax(q·kᵀ · scale + bias)·v; see `models.layers.attention.attend`."""
    arrays = _by_kv_head(operands, options)
    y_BKGTH: Any = _attend_batched(options, *arrays, operands.segments)
    return _ungrouped(y_BKGTH)


def forward(operands: Operands, options: Options) -> Results:
    """Attend to one block of keys; see `BlockKernel`."""
    arrays = _by_kv_head(operands, options)
    residuals: Any = _batched_forward(options, *arrays, operands.segments)[1]
    y_BKGTH, largest_BKGT1, scale_BKGT1 = residuals[-3:]
    lse_BKGT1 = largest_BKGT1 - jnp.log(scale_BKGT1)
    sees_none = largest_BKGT1 == jnp.finfo(largest_BKGT1.dtype).min
    lse_BKGT1 = jnp.where(sees_none, -jnp.inf, lse_BKGT1)
    batch, length, num_heads, _ = operands.q.shape
    y_BTNH = _ungrouped(jnp.where(sees_none, 0, y_BKGTH))
    return Results(y_BTNH, lse_BKGT1.reshape(batch, num_heads, length))


def backward(
    operands: Operands, options: Options, results: Results, dy_BTNH: jax.Array
) -> Gradients:
    """Return the gradients for one block of keys; see `BlockKernel`."""
    num_kv_heads = operands.k.shape[2]
    arrays = _by_kv_head(operands, options)
    lse_BKGT1 = results.lse.reshape(*arrays[0].shape[:-1], 1)
    # Of a query that sees no key at all, the logits minus any finite number have weights of 0.
    lse_BKGT1 = jnp.where(jnp.isfinite(lse_BKGT1), lse_BKGT1, 0)
    statistics = _grouped(results.y, num_kv_heads), lse_BKGT1, jnp.ones_like(lse_BKGT1)
    residuals = (*arrays, operands.segments, *statistics)
    dq_BKGTH, dk_BKSH, dv_BKSH, dbias_BKGTS, _ = _batched_backward(
        options, residuals, _grouped(dy_BTNH, num_kv_heads)
    )
    dbias_BNTS = None
    if operands.bias is not None and dbias_BKGTS is not None:
        dbias_BNTS = dbias_BKGTS.reshape(operands.bias.shape)
    dq_BTNH = _ungrouped(dq_BKGTH) * options.scale
    return dq_BTNH, dk_BKSH.swapaxes(1, 2), dv_BKSH.swapaxes(1, 2), dbias_BNTS


def _by_kv_head(operands: Operands, options: Options) -> tuple[Any, Any, Any, Any]:
    """Return scaled queries, keys, values and bias by key-value head, as the kernel reads them."""
    num_heads = operands.q.shape[2]
    num_kv_heads = operands.k.shape[2]
    return (
        _grouped(operands.q * options.scale, num_kv_heads),
        operands.k.swapaxes(1, 2),
        operands.v.swapaxes(1, 2),
        _grouped_bias(operands.bias, num_heads, num_kv_heads),
    )


def _grouped(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, G, T, H]: the queries of each key-value head."""
    batch, length, _, head_dim = x_BTNH.shape
    x_BTKGH = x_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
    return x_BTKGH.transpose(0, 2, 3, 1, 4)


def _ungrouped(x_BKGTH: jax.Array) -> jax.Array:
    """Return [B, T, N, H], the inverse of `_grouped`."""
    batch, _, _, length, head_dim = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, head_dim)


def _grouped_bias(
    bias_BNTS: jax.Array | None, num_heads: int, num_kv_heads: int
) -> jax.Array | None:
    """Return the bias as [B, K, G, T, S], whose dims of size 1 stay."""
    if bias_BNTS is None:
        return None
    groups = (num_kv_heads, -1) if bias_BNTS.shape[1] == num_heads else (1, 1)
    return bias_BNTS.reshape(bias_BNTS.shape[0], *groups, *bias_BNTS.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_batched(options: Options, q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments):
    """softmax(q·kᵀ + bias)·v, one block of queries at a time.

    The backward pass recomputes the weights from their maxima and sums, so no array of size
    `[T, S]` is kept between the two passes: recomputing costs less than allocating new memory.

    Source: Dao et al. 2022 (arXiv:2205.14135), appendix B.
    """
    return _batched_forward(options, q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments)[0]


def _batched_forward(options: Options, q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments):
    def attend(block: _Block):
        logits_BKGTS = block.logits()[0]
        largest_BKGT1 = jnp.max(logits_BKGTS, axis=-1, keepdims=True)
        weights_BKGTS = jnp.exp(logits_BKGTS - largest_BKGT1)
        sum_BKGT1 = jnp.sum(weights_BKGTS, axis=-1, keepdims=True)
        weights_BKGTS = weights_BKGTS.astype(v_BKSH.dtype)
        y_BKGTH = _einsum("BKGTS,BKSH->BKGTH", weights_BKGTS, block.v) / sum_BKGT1
        return y_BKGTH.astype(v_BKSH.dtype), largest_BKGT1, 1 / sum_BKGT1

    parts = []
    for rows, keys in _blocks(options.mask, q_BKGTH.shape[3], k_BKSH.shape[2]):
        whole = _Block(options, rows, keys, q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments)
        parts.append(whole.over_steps(lambda block, _: (None, attend(block)), None, ())[1])
    # Keep maximum and sum as two residuals. Their sum in one log-sum-exp would be inexact for a
    # query that sees no key: its maximum is so large in magnitude that it absorbs log(sum).
    y_BKGTH, *normal = (
        checkpoint_name(jnp.concatenate(parts, axis=3), "attention")
        for parts in zip(*parts, strict=True)
    )
    return y_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments, y_BKGTH, *normal)


def _batched_backward(options: Options, residuals, dy_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments, y_BKGTH, largest_BKGT1, scale_BKGT1 = residuals
    dtype = q_BKGTH.dtype
    wide = scale_BKGT1.dtype
    # The gradient of the softmax is weights · (dweights - shift), with shift = sum(dy · y).
    shift_BKGT1 = jnp.sum(dy_BKGTH.astype(wide) * y_BKGTH, axis=-1, keepdims=True)
    dq = []
    dk_BKSH = jnp.zeros(k_BKSH.shape, wide)
    dv_BKSH = jnp.zeros(v_BKSH.shape, wide)
    dbias_BKGTS = None if bias_BKGTS is None else jnp.zeros(bias_BKGTS.shape, wide)

    def add(block: _Block, sums, dy, largest_BKGT1, scale_BKGT1, shift_BKGT1):
        dk_BKSH, dv_BKSH, dbias_BKGTS = sums
        keys = block.keys
        logits_BKGTS, slope_BKGTS = block.logits()
        weights_BKGTS = jnp.exp(logits_BKGTS - largest_BKGT1)
        weights_BKGTS *= scale_BKGT1
        dweights_BKGTS = _einsum("BKGTH,BKSH->BKGTS", dy, block.v)
        dlogits_BKGTS = weights_BKGTS * (dweights_BKGTS - shift_BKGT1)
        if segments is not None:
            # A query that sees no key has equal weights, but no gradient flows into its logits.
            is_hidden = logits_BKGTS == jnp.finfo(logits_BKGTS.dtype).min
            dlogits_BKGTS = jnp.where(is_hidden, 0, dlogits_BKGTS)
        if dbias_BKGTS is not None:
            part = (..., *_block_of(dbias_BKGTS, block.rows, keys))
            dbias_BKGTS = dbias_BKGTS.at[part].add(_summed_like(dbias_BKGTS[part], dlogits_BKGTS))
        if slope_BKGTS is not None:
            dlogits_BKGTS *= slope_BKGTS
        dlogits_BKGTS = dlogits_BKGTS.astype(dtype)
        dq = _einsum("BKGTS,BKSH->BKGTH", dlogits_BKGTS, block.k).astype(dtype)
        dk = _einsum("BKGTS,BKGTH->BKSH", dlogits_BKGTS, block.q)
        dv = _einsum("BKGTS,BKGTH->BKSH", weights_BKGTS.astype(dtype), dy)
        dk_BKSH = dk_BKSH.at[:, :, keys].add(dk)
        dv_BKSH = dv_BKSH.at[:, :, keys].add(dv)
        return (dk_BKSH, dv_BKSH, dbias_BKGTS), (dq,)

    sums = dk_BKSH, dv_BKSH, dbias_BKGTS
    by_query = dy_BKGTH, largest_BKGT1, scale_BKGT1, shift_BKGT1
    for rows, keys in _blocks(options.mask, q_BKGTH.shape[3], k_BKSH.shape[2]):
        whole = _Block(options, rows, keys, q_BKGTH, k_BKSH, v_BKSH, bias_BKGTS, segments)
        sums, (dq_of_block,) = whole.over_steps(add, sums, by_query)
        dq.append(dq_of_block)
    dk_BKSH, dv_BKSH, dbias_BKGTS = sums
    dq_BKGTH = jnp.concatenate(dq, axis=3)
    if dbias_BKGTS is not None and bias_BKGTS is not None:
        dbias_BKGTS = dbias_BKGTS.astype(bias_BKGTS.dtype)
    return dq_BKGTH, dk_BKSH.astype(dtype), dv_BKSH.astype(dtype), dbias_BKGTS, None


_attend_batched.defvjp(_batched_forward, _batched_backward)


class _Block:
    """The arrays of a block: some queries, and the keys that they can see.

    Args:
        options: static options.
        rows: queries of the block.
        keys: keys of the block.
        q_BKGTH: all queries.
        k_BKSH: all keys.
        v_BKSH: all values.
        bias_BKGTS: bias of all logits, or None.
        segments: segment ids of all queries and keys, or None.
    """

    def __init__(
        self,
        options: Options,
        rows: slice,
        keys: slice,
        q_BKGTH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        bias_BKGTS: jax.Array | None,
        segments: Segments | None,
    ):
        self.options = options
        self.rows = rows
        self.keys = keys
        self.first_row: Any = 0  # of `rows`, in a loop
        self.q = q_BKGTH[:, :, :, rows]
        self.k = k_BKSH[:, :, keys]
        self.v = v_BKSH[:, :, keys]
        self.bias_BKGTS = bias_BKGTS
        self.ids = None if segments is None else (segments[0][:, rows], segments[1][:, keys])

    def over_steps(self, function: Callable, carry: Any, by_query: Sequence[jax.Array]) -> Any:
        """Call `function(block, carry, *by_query)` for all queries, or for a few at a time.

        Args:
            function: returns (carry, arrays [B, K, G, T, ·] of the queries).
            carry: its second argument.
            by_query: arrays `[B, K, G, T, ·]` of all queries, of which it gets the block's.

        Returns:
            Its result for all queries of the block.
        """
        arrays = tuple(x[:, :, :, self.rows] for x in by_query)
        num_rows = self.rows.stop - self.rows.start
        can_step = not hardware.current().runs_on_cpu and self.bias_BKGTS is None
        if not can_step or num_rows <= _STEP_QUERIES:
            return function(self, carry, *arrays)
        num_steps = -(-num_rows // _STEP_QUERIES)

        def cut(x: jax.Array, dim: int) -> jax.Array:
            widths = [
                (0, (num_steps * _STEP_QUERIES - num_rows) * (d == dim)) for d in range(x.ndim)
            ]
            x = jnp.pad(x, widths)
            shape = (*x.shape[:dim], num_steps, _STEP_QUERIES, *x.shape[dim + 1 :])
            return jnp.moveaxis(x.reshape(shape), dim, 0)

        def step(carry, part):
            number, q, ids, arrays = part
            block = copy.copy(self)
            block.rows = slice(self.rows.start, self.rows.start + _STEP_QUERIES)
            block.first_row = number * _STEP_QUERIES
            block.q = q
            block.ids = None if ids is None or self.ids is None else (ids, self.ids[1])
            return function(block, carry, *arrays)

        parts = (
            jnp.arange(num_steps, dtype=jnp.int32),
            cut(self.q, 3),
            None if self.ids is None else cut(self.ids[0], 1),
            tuple(cut(x, 3) for x in arrays),
        )
        carry, outputs = jax.lax.scan(step, carry, parts)

        def joined(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x, 0, 3)
            return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :num_rows]

        return carry, jax.tree.map(joined, outputs)

    def logits(self) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits `[B, K, G, T, S]`, and their slope if scores are capped."""
        logits_BKGTS = _einsum("BKGTH,BKSH->BKGTS", self.q, self.k)
        slope_BKGTS = None
        if self.options.softcap is not None:
            share_BKGTS = jnp.tanh(logits_BKGTS / self.options.softcap)
            slope_BKGTS = 1 - jnp.square(share_BKGTS)
            logits_BKGTS = self.options.softcap * share_BKGTS
        if self.bias_BKGTS is not None:
            block = _block_of(self.bias_BKGTS, self.rows, self.keys)
            logits_BKGTS += self.bias_BKGTS[..., *block]
        hidden = jnp.finfo(logits_BKGTS.dtype).min
        visible_TS = _visible(self.options.mask, self.rows, self.keys, self.first_row)
        if visible_TS is not None:
            logits_BKGTS = jnp.where(visible_TS[None, None, None], logits_BKGTS, hidden)
        if self.ids is not None:
            same_BTS = _same(self.ids)
            logits_BKGTS = jnp.where(same_BTS[:, None, None], logits_BKGTS, hidden)
        return logits_BKGTS, slope_BKGTS


def _same(segments: Segments) -> jax.Array:
    """Return bool[B, T, S]: whether a query and a key belong to the same segment."""
    return segments[0][:, :, None] == segments[1][:, None, :]


def _block_of(bias_BKGTS: jax.Array, rows: slice, keys: slice) -> tuple[slice, slice]:
    """Return the (rows, keys) of a block within a bias, whose dims of size 1 are broadcast."""
    *_, num_queries, num_keys = bias_BKGTS.shape
    return rows if num_queries > 1 else slice(None), keys if num_keys > 1 else slice(None)


def _summed_like(target: jax.Array, x: jax.Array) -> jax.Array:
    """Sum `x` over the dims that have size 1 in `target`."""
    dims = [dim for dim, size in enumerate(target.shape) if size == 1]
    return jnp.sum(x, axis=dims, keepdims=True)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute an einsum that accumulates in float32 or wider."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=wide)
