"""The arrays and the options of an attention: what kernels get, and which keys a query sees.

B batch, T query seq, S key seq, N heads, K key-value heads, H head_dim.
"""

import dataclasses

import jax

#: Segment ids of queries and keys, int32[B, T] and int32[B, S]: a query only sees keys of its own
#: segment.
Segments = tuple[jax.Array, jax.Array]


def segments(batch: dict, name: str = "segment_ids") -> Segments | None:
    """Return the argument `segments` of `attend` for self-attention."""
    ids = batch.get(name)
    return None if ids is None else (ids, ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Determines which keys a query can see, from their positions.

    Attributes:
        is_causal: whether a query only sees keys up to its own position.
        window: if given, a query only sees keys whose position differs from its own by less.
        offset: position of the first query minus position of the first key.
    """

    is_causal: bool
    window: int | None
    offset: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Static options of an attention.

    Attributes:
        mask: which keys a query sees.
        scale: factor of the products of queries and keys.
        softcap: as for `models.layers.attention.attend`.
        chunk: as for `models.layers.attention.attend`; kernels do not read it.
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    chunk: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays of an attention, or of its part that reads one block of keys.

    Attributes:
        q: queries, `[B, T, N, H]`.
        k: keys, `[B, S, K, H]`.
        v: values, `[B, S, K, ·]`.
        bias: `[B, N, T, S]`, with dims of size 1 that are broadcast, or None.
        segments: segment ids of queries and keys, or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None
    segments: Segments | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Results:
    """Results of an attention that its backward pass reads.

    Attributes:
        y: output, `[B, T, N, ·]`.
        lse: log-sum-exp of the logits, `[B, N, T]`, float32 or wider. For a query that sees no key
            they are 0 and -inf.
    """

    y: jax.Array
    lse: jax.Array


#: Gradients of the queries, keys, values and bias of `Operands`; the last is None without a bias.
Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
