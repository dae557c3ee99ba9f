"""Which keys a query sees."""

import dataclasses

import jax

#: Segment ids of queries and keys, int32[B, T] and int32[B, S]: a query only sees keys of its own
#: segment.
Segments = tuple[jax.Array, jax.Array]


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
