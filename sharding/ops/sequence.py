"""A sequence that is split over the devices of the mesh axis `context`.

Every array of a batch with a token dim `[B, T, ...]` is split along it when the batch is placed on
the mesh. Embedding, blocks, head and loss see only the tokens of their device, `[B, T / c, ...]`
for c devices, and sums of losses are added up over all devices, as they are over examples. Only
attention communicates.

The devices may exchange tokens for heads (heads.py), pass keys around a ring (ring.py), or both:
groups of h neighbours exchange heads, and r = c / h groups form a ring. If attention is causal, the
sequence is in *zigzag* order on a ring, which gives every device the same work: of 2r chunks, group
i has the chunks i and 2r-1-i, and each of its devices an equal part of these. With c = 4, h = 2 and
8 tokens:

    device           0    1    2    3
    group            0    0    1    1
    tokens           0 1  6 7  2 3  4 5

A function that depends on the position of a token, or on other tokens of its row, uses this module.
Outside of a step whose sequence is split, these functions do nothing.
"""

import contextlib
import contextvars
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sharding.context_values import bound
from sharding.logical import manual_mesh_axes, sum_of_parts
from sharding.mesh import BATCH_AXES

AXIS = "context"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """How sequences are divided over `context`.

    Attributes:
        num_devices: devices of `context`.
        ring_size: groups of devices that form a ring; it divides `num_devices`.
        is_zigzag: whether a ring has the sequence in zigzag order, instead of one part per group.
        arrays: names of the arrays of a batch whose second dim counts tokens.
    """

    num_devices: int = 1
    ring_size: int = 1
    is_zigzag: bool = True
    arrays: frozenset[str] = frozenset()

    def __str__(self) -> str:
        heads = f"{self.group_size} devices exchange tokens for heads"
        if self.ring_size == 1:
            return heads
        order = "zigzag" if self.num_chunks > 1 else "contiguous"
        ring = f"a ring of {self.ring_size} in {order} order"
        return f"groups of {heads}, {ring}" if self.group_size > 1 else ring

    @property
    def group_size(self) -> int:
        """Number of neighbouring devices that exchange tokens for heads."""
        return self.num_devices // self.ring_size

    @property
    def groups(self) -> list[list[int]]:
        """The devices of `context` in each group."""
        size = self.group_size
        return [[*range(start, start + size)] for start in range(0, self.num_devices, size)]

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a group of devices."""
        return 2 if self.is_zigzag and self.ring_size > 1 else 1

    @property
    def num_parts(self) -> int:
        """Number of equal parts that a row is cut into; it divides the number of tokens."""
        return math.lcm(self.num_devices, self.num_chunks * self.ring_size)

    def chunk_numbers(self, group: Any) -> tuple[Any, ...]:
        """Return the numbers of the chunks of a group of devices; int or int32[], like `group`."""
        return (group,) if self.num_chunks == 1 else (group, 2 * self.ring_size - 1 - group)

    def group_positions(self, group: Any, length: int) -> Any:
        """Return int32[length], the positions of the tokens of a group of devices.

        Args:
            group: number of the group: int, for a NumPy array, or int32[].
            length: number of its tokens.
        """
        numpy = np if isinstance(group, int) else jnp
        numbers = self.chunk_numbers(group)
        size = length // len(numbers)
        starts = [number * size for number in numbers]
        return numpy.concatenate([start + numpy.arange(size, dtype=np.int32) for start in starts])

    def positions(self, device: Any, length: int) -> Any:
        """Return int32[length], the positions of the tokens of a device.

        Args:
            device: its index on `context`: int, for a NumPy array, or int32[].
            length: number of its tokens.
        """
        of_group = self.group_positions(device // self.group_size, length * self.group_size)
        start = device % self.group_size * length
        if isinstance(device, int):
            return of_group[start : start + length]
        return jax.lax.dynamic_slice_in_dim(of_group, start, length)

    def batch_spec(self, name: str, leading: tuple[None, ...] = ()) -> PartitionSpec:
        """Return how an array of a batch is split over the mesh.

        Args:
            name: its name in the batch.
            leading: dims before the one that counts examples, which are not split.
        """
        tokens = (AXIS,) if name in self.arrays and self.num_devices > 1 else ()
        return PartitionSpec(*leading, BATCH_AXES, *tokens)

    def on_one_device(self, name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the type of a device's part of an array of a batch, `[B, T, ...]`."""
        if name not in self.arrays:
            return leaf
        shape = (leaf.shape[0], leaf.shape[1] // self.num_devices, *leaf.shape[2:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    def order(self, length: int) -> np.ndarray:
        """Return int32[length], the positions of all tokens of a row, device by device."""
        per_device = length // self.num_devices
        return np.concatenate([self.positions(i, per_device) for i in range(self.num_devices)])


#: Sequences that are not divided.
WHOLE = SequenceSplit()
_current: contextvars.ContextVar[SequenceSplit] = contextvars.ContextVar("sequence", default=WHOLE)


def use(split: SequenceSplit) -> contextlib.AbstractContextManager:
    """Trace everything within the block for sequences that are divided like this."""
    return bound(_current, split)


def current() -> SequenceSplit:
    """Return how the sequences of the step that is being traced are divided."""
    return _current.get()


def split_here() -> SequenceSplit | None:
    """Return how sequences are divided, if the caller sees the tokens of one device only."""
    split = current()
    return split if split.num_devices > 1 and manual_mesh_axes((AXIS,)) else None


def whole_length(length: int) -> int:
    """Return the number of tokens of a row, given the number on this device."""
    split = split_here()
    return length if split is None else length * split.num_devices


def positions(length: int) -> Any:
    """Return int32[length], the positions of this device's tokens in their rows."""
    split = split_here()
    if split is None:
        return jnp.arange(length, dtype=jnp.int32)
    return split.positions(jax.lax.axis_index(AXIS), length)


def local_tokens(x: jax.Array, dim: int = 1) -> jax.Array:
    """Return the part of an array of whole rows that belongs to this device's tokens."""
    split = split_here()
    if split is None:
        return x
    return jnp.take(x, positions(x.shape[dim] // split.num_devices), axis=dim)


def whole_rows(x: jax.Array) -> jax.Array:
    """Gather this device's tokens `[B, T, ...]` over `context`; the result is in order.

    The gradient of a whole row is summed over all devices.
    """
    split = split_here()
    if split is None:
        return x
    gathered = jax.lax.all_gather(x, AXIS, axis=1, tiled=True)
    places = np.argsort(split.order(gathered.shape[1])).astype(np.int32)
    return jnp.take(gathered, places, axis=1)


def counted_once(weights: jax.Array) -> jax.Array:
    """Return the weights of whole rows on the device that has their first tokens, else zeros.

    A loss of whole rows is computed on all devices of `context`, but belongs into the sum once. On
    all other devices it may be computed from other tokens than the first.
    """
    if split_here() is None:
        return weights
    return jnp.where(jax.lax.axis_index(AXIS) == 0, weights, jnp.zeros((), weights.dtype))


def sum_over_tokens(x: jax.Array) -> jax.Array:
    """Sum `x` over the tokens of all devices; every device gets the gradient of all of them."""
    return x if split_here() is None else sum_of_parts((AXIS,), x)


def draw_tokens(draw: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return this device's part of random numbers for whole rows, which no mesh changes.

    Args:
        draw: (shape) -> numbers of that shape.
        shape: `[T, ...]` for this device's T tokens.
    """
    return local_tokens(draw((whole_length(shape[0]), *shape[1:])), dim=0)
