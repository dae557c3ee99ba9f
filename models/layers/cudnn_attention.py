"""Attention with cuDNN's fused kernel, with inputs adapted to its restrictions.

The kernel supports float16 and bfloat16, and head dims that are multiples of 8; with a bias or with
packed documents, only even sequence lengths. It does not take segment ids, only the position and
length of each packed document. Therefore:

- Lengths and head dims are padded where they have to be, and the smaller of keys and values to the
  size of the other. The bias masks the padding of lengths, or it becomes a document.
- Packed documents are passed to the kernel in its ragged layout, `DOCUMENTS_PER_CALL` documents of
  each row at a time. The kernel's statistics take as much memory for every document as for a whole
  row, so a call with room for all documents of a row could need more memory than attention itself.
  A loop repeats the call until the documents of every row are done, however many there are:

      segments  1 1 1 2 2 3 3 3 3 4      with two documents per call
      call 0    q q q q q . . . . .      documents at 0 and 3, with lengths 3 and 2
      call 1    . . . . . q q q q q      documents at 5 and 9, with lengths 4 and 1

Memory is linear in the sequence length, except for a bias, which is `[·, ·, T, S]` itself.

B batch, T query seq, S key seq, N heads, K key-value heads, H head_dim, M documents of a row per
call, R = B · M.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.layers import cudnn_kernel
from models.layers.cudnn_kernel import KernelOptions, Lengths
from models.layers.masks import Gradients, Mask, Operands, Options, Results, Segments

#: Number of documents of each row that one call of the kernel processes.
DOCUMENTS_PER_CALL = 8


def attend_with_cudnn(operands: Operands, options: Options, *, can_pack: bool) -> jax.Array:
    """Return softmax(q·kᵀ · scale + bias)·v, `[B, T, N, H]`.

    Args:
        operands: queries, keys and values are float16 or bfloat16; tokens of a segment are
            contiguous.
        options: without an offset of the mask, and without a soft cap.
        can_pack: whether the hardware supports the kernel's layout for packed documents.
    """
    for_kernel = _for_kernel(options, has_bias_gradient=operands.bias is not None)
    inputs = _Inputs.of(operands, can_pack=can_pack)
    qkv = inputs.q, inputs.k, inputs.v
    if inputs.ids is None:
        y_BTNH: Any = _attend(for_kernel, *qkv, inputs.bias)
    else:
        y_BTNH = _attend_documents(for_kernel, *qkv, *inputs.ids)
    return y_BTNH[:, : operands.q.shape[1], :, : operands.v.shape[3]]


def forward(operands: Operands, options: Options, *, can_pack: bool) -> Results:
    """Attend to one block of keys; see `models.layers.ring_attention.BlockKernel`.

    Args:
        operands: as for `attend_with_cudnn`; without a bias if the mask has an offset. Then S is T.
        options: without a soft cap.
        can_pack: as for `attend_with_cudnn`.
    """
    length = operands.q.shape[1]
    if options.mask.offset:
        triangle = _Triangle.of(options.mask, length, operands.segments)
        causal = dataclasses.replace(options, mask=_CAUSAL)
        results = forward(triangle.operands(operands), causal, can_pack=can_pack)
        y_BTNH = triangle.from_queries(results.y, hidden=0)
        return Results(y_BTNH, triangle.from_queries(results.lse, hidden=-jnp.inf, dim=2))
    for_kernel = _for_kernel(options)
    inputs = _Inputs.of(operands, can_pack=can_pack)
    qkv = inputs.q, inputs.k, inputs.v
    if inputs.ids is None:
        y_BTNH, stats_BNT = cudnn_kernel.forward(*qkv, inputs.bias, None, for_kernel)
        sees_none = stats_BNT < _hidden(operands.q.dtype) / 2
        stats_BNT = jnp.where(sees_none, -jnp.inf, stats_BNT)
        y_BTNH = jnp.where(sees_none.swapaxes(1, 2)[..., None], 0, y_BTNH)
    else:
        y_BTNH, stats_BNT = _over_documents(for_kernel, *qkv, *inputs.ids, -jnp.inf)
    return Results(y_BTNH[:, :length, :, : operands.v.shape[3]], stats_BNT[:, :, :length])


def backward(
    operands: Operands, options: Options, results: Results, dy_BTNH: jax.Array, *, can_pack: bool
) -> Gradients:
    """Return the gradients for one block of keys; other arguments as for `forward`.

    Args:
        operands: as there.
        options: as there.
        results: results over all blocks.
        dy_BTNH: cotangent of the output.
        can_pack: as there.
    """
    if options.mask.offset:
        triangle = _Triangle.of(options.mask, operands.q.shape[1], operands.segments)
        causal = dataclasses.replace(options, mask=_CAUSAL)
        dq, dk, dv, _ = backward(
            triangle.operands(operands),
            causal,
            triangle.results(results),
            triangle.queries(triangle.only_members(dy_BTNH)),
            can_pack=can_pack,
        )
        dq = triangle.from_queries(dq, hidden=0)
        return dq, triangle.from_keys(dk), triangle.from_keys(dv), None
    for_kernel = _for_kernel(options, has_bias_gradient=operands.bias is not None)
    inputs = _Inputs.of(operands, can_pack=can_pack)
    qkv = inputs.q, inputs.k, inputs.v
    # The logits of a query that sees no key at all are far below 0, and so get weights of 0.
    stats_BNT = jnp.where(jnp.isfinite(results.lse), results.lse, 0)
    padding = [
        (0, padded - size) for padded, size in zip(inputs.q.shape, operands.q.shape, strict=True)
    ]
    stats_BNT = jnp.pad(stats_BNT, [(0, 0), (0, 0), padding[1]])
    padding[3] = (0, inputs.v.shape[3] - operands.v.shape[3])
    y_BTNH, dy_BTNH = (jnp.pad(x, padding) for x in (results.y, dy_BTNH))
    dbias = None
    if inputs.ids is None:
        dq, dk, dv, dbias = cudnn_kernel.backward(
            *qkv, inputs.bias, None, for_kernel, stats_BNT, y_BTNH, dy_BTNH
        )
    else:
        residuals = (*qkv, *inputs.ids, stats_BNT, y_BTNH)
        dq, dk, dv, *_ = _documents_backward(for_kernel, residuals, dy_BTNH)

    def like(x: jax.Array, target: jax.Array) -> jax.Array:
        return x[tuple(slice(size) for size in target.shape)]

    if dbias is not None and operands.bias is not None:
        # The mask of segments differs between examples, the bias may not.
        broadcast = [d for d in (0, 1) if operands.bias.shape[d] == 1]
        dbias = like(jnp.sum(dbias, axis=broadcast, keepdims=True), operands.bias)
    return like(dq, operands.q), like(dk, operands.k), like(dv, operands.v), dbias


def _for_kernel(options: Options, *, has_bias_gradient: bool = False) -> KernelOptions:
    mask = options.mask
    return KernelOptions(
        scale=options.scale,
        is_causal=mask.is_causal,
        window=mask.window,
        has_bias_gradient=has_bias_gradient,
    )


_CAUSAL = Mask(is_causal=True, window=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs:
    """Inputs of the kernel, padded where they have to be.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        bias: bias with the mask of segments, or None.
        ids: segment ids of queries and keys, if the kernel gets documents instead of a mask.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    ids: Segments | None

    @classmethod
    def of(cls, operands: Operands, *, can_pack: bool) -> "_Inputs":
        """Return the inputs for arguments of `attend`."""
        segments = operands.segments
        qkv = operands.q, operands.k, operands.v
        lengths = operands.q.shape[1], operands.k.shape[1]
        is_plain = segments is None and operands.bias is None
        multiples = {} if is_plain else {1: 2}
        # Keys and values have one list of offsets, so they have the same size.
        size = max(operands.k.shape[3], operands.v.shape[3])
        multiples[3] = size + -size % 8
        q, k, v = (_pad(x, multiples) for x in qkv)
        if segments is not None and operands.bias is None and can_pack:
            # Padding becomes a document of its own, with id -1.
            q_ids_BT, k_ids_BS = (_pad(ids, {1: 2}, value=-1) for ids in segments)
            return cls(q=q, k=k, v=v, bias=None, ids=(q_ids_BT, k_ids_BS))
        bias = _with_mask(operands.bias, segments, operands.q.dtype)
        if bias is not None:
            bias = jnp.broadcast_to(bias, (*bias.shape[:2], *lengths))
            bias = _pad(bias, {2: 2})
            bias = _pad(bias, {3: 2}, value=_hidden(operands.q.dtype))
        return cls(q=q, k=k, v=v, bias=bias, ids=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Triangle:
    """Turns a window that reaches into an earlier chunk of keys into a causal mask.

    The kernel's masks begin at the first query and the first key. But if the keys are `offset`
    before the queries, a query sees the *last* keys, and a later query fewer of them:

        offset 4, window 3       keys            in reverse order
                               . . x x           . . . .
        queries                . . . x           . . . .
                               . . . .           x . . .
                               . . . .           x x . .

    With queries and keys in reverse order, the visible pairs are a causal mask whose diagonal is
    `num_hidden` further down. Dropping so many queries, or adding some in front if the number is
    negative, moves it to the first query.

    Attributes:
        num_hidden: number of queries, the last ones, that see no key; negative if even the last
            query sees several.
        is_member_BT: bool[B, T], whether a query belongs to the only segment that both have, that
            of the first query; None without segments.
        segments: segment ids for the kernel, in reverse order.
    """

    num_hidden: int
    is_member_BT: jax.Array | None
    segments: Segments | None

    @classmethod
    def of(cls, mask: Mask, length: int, segments: Segments | None) -> "_Triangle":
        """Return the conversion for T = S = length."""
        assert mask.window is not None
        num_hidden = mask.offset - mask.window + 1
        if segments is None:
            return cls(num_hidden=num_hidden, is_member_BT=None, segments=None)
        q_ids_BT, k_ids_BS = segments
        first_B1 = q_ids_BT[:, :1]
        shape = cls(num_hidden=num_hidden, is_member_BT=None, segments=None)
        # All queries are one document for the kernel, or the diagonal would begin elsewhere.
        one_BT = jnp.ones_like(shape.queries(q_ids_BT))
        k_ids_BS = jnp.where(shape.keys(k_ids_BS) == first_B1, 1, -1)
        return cls(
            num_hidden=num_hidden,
            is_member_BT=q_ids_BT == first_B1,
            segments=(one_BT, k_ids_BS),
        )

    def operands(self, operands: Operands) -> Operands:
        """Return the arrays as the kernel gets them."""
        q = self.queries(operands.q)
        return Operands(q, self.keys(operands.k), self.keys(operands.v), None, self.segments)

    def results(self, results: Results) -> Results:
        """Return the results as the kernel gets them."""
        # Queries of other segments get weights of 0 by a large log-sum-exp.
        lse = self.queries(self.only_members(results.lse, 2.0**100, dim=2), dim=2)
        return Results(self.queries(results.y), lse)

    def queries(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """Return an array of all queries as the kernel gets it."""
        x = jnp.flip(x, dim)
        if self.num_hidden > 0:
            return jax.lax.slice_in_dim(x, self.num_hidden, None, axis=dim)
        return jnp.pad(x, [(-self.num_hidden * (d == dim), 0) for d in range(x.ndim)])

    def keys(self, x_BSKH: jax.Array) -> jax.Array:
        """Return an array of all keys as the kernel gets it."""
        x_BSKH = jnp.flip(x_BSKH, 1)
        return x_BSKH[:, : x_BSKH.shape[1] - max(0, self.num_hidden)]

    def from_queries(self, x: jax.Array, hidden: float, dim: int = 1) -> jax.Array:
        """Return the kernel's array of queries for all queries; `hidden` for those without keys."""
        if self.num_hidden > 0:
            widths = [(self.num_hidden * (d == dim), 0) for d in range(x.ndim)]
            x = jnp.pad(x, widths, constant_values=hidden)
        else:
            x = jax.lax.slice_in_dim(x, -self.num_hidden, None, axis=dim)
        return self.only_members(jnp.flip(x, dim), hidden, dim)

    def from_keys(self, x_BSKH: jax.Array) -> jax.Array:
        """Return the kernel's gradients of keys for all keys."""
        return jnp.flip(jnp.pad(x_BSKH, [(0, 0), (0, max(0, self.num_hidden)), (0, 0), (0, 0)]), 1)

    def only_members(self, x: jax.Array, hidden: float = 0, dim: int = 1) -> jax.Array:
        """Replace the values of queries that belong to no segment of the keys."""
        if self.is_member_BT is None:
            return x
        others = tuple(d for d in range(1, x.ndim) if d != dim)
        return jnp.where(jnp.expand_dims(self.is_member_BT, others), x, hidden)


def _pad(x: jax.Array, multiples: dict[int, int], value: float = 0) -> jax.Array:
    """Pad dims of `x` to multiples.

    Args:
        x: array.
        multiples: dim -> number that its size has to be a multiple of.
        value: value of the padding.
    """
    widths = [(0, -size % multiples.get(dim, 1)) for dim, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value) if any(w for _, w in widths) else x


def _hidden(dtype: Any) -> float:
    """Return the logit that hides a key: large, but not so large that a sum of two overflows."""
    return -(2.0**14) if jnp.dtype(dtype) == jnp.float16 else -(2.0**40)


def _with_mask(
    bias_BNTS: jax.Array | None, segments: Segments | None, dtype: Any
) -> jax.Array | None:
    """Add a mask that hides keys of other segments to the bias, if there are segments."""
    if segments is not None:
        is_same_BTS = segments[0][:, :, None] == segments[1][:, None, :]
        mask_B1TS = jnp.where(is_same_BTS, 0, _hidden(dtype)).astype(dtype)[:, None]
        bias_BNTS = mask_B1TS if bias_BNTS is None else bias_BNTS.astype(dtype) + mask_B1TS
    return None if bias_BNTS is None else bias_BNTS.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: KernelOptions, q, k, v, bias) -> jax.Array:
    """Attention in one call of the kernel."""
    return cudnn_kernel.forward(q, k, v, bias, None, options)[0]


def _attend_forward(options, q, k, v, bias):
    y, stats = _name_residuals(*cudnn_kernel.forward(q, k, v, bias, None, options))
    return y, (q, k, v, bias, stats, y)


def _attend_backward(options, residuals, dy):
    q, k, v, bias, stats, y = residuals
    return cudnn_kernel.backward(q, k, v, bias, None, options, stats, y, dy)


_attend.defvjp(_attend_forward, _attend_backward)


def _name_residuals(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Name the residuals of the kernel, so that a config can save them."""
    return tuple(checkpoint_name(array, "attention") for array in arrays)


@dataclasses.dataclass(frozen=True)
class _Documents:
    """The documents that one call of the kernel processes, at most R = B · DOCUMENTS_PER_CALL.

    The kernel reads them from lists without gaps, in which used entries come first. An entry of
    these lists is called a row below.

    Attributes:
        lengths: lengths and offsets of the documents, for the kernel.
        batch_R: int32[R], the example that each row's document belongs to.
        start_R: int32[R], its first query in that example.
        row_BT: int32[B, T], the row of each query's document.
        index_BT: int32[B, T], the position of each query within its document.
        is_query_BT: bool[B, T], whether a query belongs to one of the documents; if not, its
            `row_BT` and `index_BT` are meaningless.
        is_key_BS: bool[B, S], whether a key belongs to one of the documents.
    """

    lengths: Lengths
    batch_R: jax.Array
    start_R: jax.Array
    row_BT: jax.Array
    index_BT: jax.Array
    is_query_BT: jax.Array
    is_key_BS: jax.Array

    @classmethod
    def of_call(
        cls, number: jax.Array, q_ids_BT: jax.Array, k_ids_BS: jax.Array, per_token: tuple[int, int]
    ) -> "_Documents":
        """Return the documents of a call.

        Args:
            number: int32[], number of the call, from 0.
            q_ids_BT: int32[B, T], segment of each query.
            k_ids_BS: int32[B, S], segment of each key.
            per_token: number of elements of a query token and of a key token, over all heads.
        """
        (batch, num_queries) = q_ids_BT.shape
        num_keys = k_ids_BS.shape[1]
        run_BT = _runs(q_ids_BT) - number * DOCUMENTS_PER_CALL
        numbers_M = jnp.arange(DOCUMENTS_PER_CALL, dtype=jnp.int32)
        # Find each document's first query and, by its segment id, its first key.
        is_in_BMT = run_BT[:, None, :] == numbers_M[None, :, None]
        q_start_BM = jnp.argmax(is_in_BMT, axis=2).astype(jnp.int32)
        id_BM = jnp.take_along_axis(q_ids_BT, q_start_BM, axis=1)
        is_in_BMS = k_ids_BS[:, None, :] == id_BM[:, :, None]
        k_start_BM = jnp.argmax(is_in_BMS, axis=2).astype(jnp.int32)
        # A document without keys has no softmax: it is skipped, and its output stays 0.
        is_used_BM = jnp.any(is_in_BMT, axis=2) & jnp.any(is_in_BMS, axis=2)
        row_BM = jnp.cumsum(is_used_BM.reshape(-1), dtype=jnp.int32).reshape(is_used_BM.shape) - 1
        place_R = jnp.where(is_used_BM, row_BM, row_BM.size).reshape(-1)

        # Move values of used documents to their rows, so that the lists have no gaps. The offset of
        # an unused row is the end of the array.
        def in_rows(values_BM: jax.Array, fill: int = 0, size: int = row_BM.size) -> jax.Array:
            empty = jnp.full((size,), fill, jnp.int32)
            values_BM = jnp.broadcast_to(values_BM, row_BM.shape)
            return empty.at[place_R].set(values_BM.reshape(-1), mode="drop")

        example_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]

        def offsets(start_BM: jax.Array, num_tokens: int, per_token: int) -> jax.Array:
            first_BM = (example_B1 * num_tokens + start_BM) * per_token
            end = batch * num_tokens * per_token
            return in_rows(first_BM, end, row_BM.size + batch).reshape(batch, -1)

        document_BT = jnp.clip(run_BT, 0, DOCUMENTS_PER_CALL - 1)

        def at_queries(values_BM):
            return jnp.take_along_axis(values_BM, document_BT, axis=1)

        return cls(
            lengths=Lengths(
                q=in_rows(jnp.sum(is_in_BMT, axis=2, dtype=jnp.int32)).reshape(row_BM.shape),
                k=in_rows(jnp.sum(is_in_BMS, axis=2, dtype=jnp.int32)).reshape(row_BM.shape),
                q_offsets=offsets(q_start_BM, num_queries, per_token[0]),
                k_offsets=offsets(k_start_BM, num_keys, per_token[1]),
            ),
            batch_R=in_rows(example_B1),
            start_R=in_rows(q_start_BM),
            row_BT=at_queries(row_BM),
            index_BT=jnp.arange(num_queries, dtype=jnp.int32)[None] - at_queries(q_start_BM),
            is_query_BT=(run_BT == document_BT) & at_queries(is_used_BM),
            is_key_BS=jnp.any(is_in_BMS & is_used_BM[:, :, None], axis=1),
        )

    def to_queries(self, stats_RNT: jax.Array) -> jax.Array:
        """Return the statistics of each query, `[B, N, T]`, from the kernel's rows."""
        heads_1N1 = jnp.arange(stats_RNT.shape[1], dtype=jnp.int32)[None, :, None]
        row_B1T = self.row_BT[:, None]
        index_B1T = self.index_BT[:, None]
        return stats_RNT.at[row_B1T, heads_1N1, index_B1T].get(mode="clip")

    def to_rows(self, stats_BNT: jax.Array) -> jax.Array:
        """Return the statistics of the kernel's rows, `[R, N, T]`, from the queries' statistics."""
        heads_1N1 = jnp.arange(stats_BNT.shape[1], dtype=jnp.int32)[None, :, None]
        token_RT = self.start_R[:, None] + jnp.arange(stats_BNT.shape[2], dtype=jnp.int32)
        batch_R11 = self.batch_R[:, None, None]
        return stats_BNT.at[batch_R11, heads_1N1, token_RT[:, None]].get(mode="clip")


def _runs(ids_BT: jax.Array) -> jax.Array:
    """Return int32[B, T], the number of each token's run of equal ids, counted from 0."""
    is_new_BT = ids_BT[:, 1:] != ids_BT[:, :-1]
    return jnp.pad(jnp.cumsum(is_new_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _num_calls(q_ids: jax.Array) -> jax.Array:
    return (jnp.max(_runs(q_ids)) + DOCUMENTS_PER_CALL) // DOCUMENTS_PER_CALL


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_documents(options: KernelOptions, q, k, v, q_ids, k_ids) -> jax.Array:
    """Attention over packed documents, `DOCUMENTS_PER_CALL` documents of each row at a time."""
    return _documents_forward(options, q, k, v, q_ids, k_ids)[0]


def _documents_forward(options, q, k, v, q_ids, k_ids):
    y, stats = _name_residuals(*_over_documents(options, q, k, v, q_ids, k_ids, 0.0))
    return y, (q, k, v, q_ids, k_ids, stats, y)


def _over_documents(options, q, k, v, q_ids, k_ids, hidden: float) -> tuple[jax.Array, jax.Array]:
    """Return output and statistics; 0 and `hidden` for queries that see no key."""
    per_token = math.prod(q.shape[2:]), math.prod(k.shape[2:])

    def call(state):
        number, y, stats_BNT = state
        documents = _Documents.of_call(number, q_ids, k_ids, per_token)
        own_y, own_stats = cudnn_kernel.forward(q, k, v, None, documents.lengths, options)
        is_query_BT = documents.is_query_BT
        y = jnp.where(is_query_BT[:, :, None, None], own_y, y)
        stats_BNT = jnp.where(is_query_BT[:, None], documents.to_queries(own_stats), stats_BNT)
        return number + 1, y, stats_BNT

    batch, length, num_heads, _ = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    stats = jnp.full((batch, num_heads, length), hidden, wide)
    y = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    start = (jnp.int32(0), y, stats)
    num_calls = _num_calls(q_ids)
    _, y, stats = jax.lax.while_loop(lambda state: state[0] < num_calls, call, start)
    return y, stats


def _documents_backward(options, residuals, dy):
    q, k, v, q_ids, k_ids, stats, y = residuals
    per_token = math.prod(q.shape[2:]), math.prod(k.shape[2:])

    def call(state):
        number, dq, dk, dv = state
        documents = _Documents.of_call(number, q_ids, k_ids, per_token)
        own_stats = documents.to_rows(stats)
        gradients = cudnn_kernel.backward(
            q, k, v, None, documents.lengths, options, own_stats, y, dy
        )
        is_query = documents.is_query_BT[:, :, None, None]
        is_key = documents.is_key_BS[:, :, None, None]
        # Gradients of keys are added: in cross-attention, two runs of queries with the same id, in
        # two calls, see the same keys. Otherwise a key belongs to the documents of one call only.
        dq = jnp.where(is_query, gradients[0], dq)
        dk, dv = (
            total + jnp.where(is_key, part, jnp.zeros((), part.dtype))
            for total, part in zip((dk, dv), gradients[1:3], strict=True)
        )
        return number + 1, dq, dk, dv

    start = (jnp.int32(0), jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v))
    num_calls = _num_calls(q_ids)
    _, dq, dk, dv = jax.lax.while_loop(lambda state: state[0] < num_calls, call, start)
    return dq, dk, dv, None, None


_attend_documents.defvjp(_documents_forward, _documents_backward)
