"""Which layers lie on which stage: the one place that knows both a layer's number and its slot.

In a checkpoint, and wherever the mesh is not to be seen, a stack's parameters are `[layers, ...]`.
While training, their leading dim is one of *slots*, `[stages × chunks × depth]`, split over
`pipeline`: a stage holds its chunks one after another, each padded to the length of the longest.
Where every stage holds one chunk of the same length, slots and layers are the same thing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layers of one stack, cut into chunks.

    Attributes:
      num_layers: of the stack.
      chunks: `chunks[s][c]` is (first layer, number of layers) of chunk c of stage s.
    """

    num_layers: int
    chunks: tuple[tuple[tuple[int, int], ...], ...]

    @cached_property
    def depth(self) -> int:
        """Slots of a chunk."""
        return max(count for stage in self.chunks for _, count in stage)

    @cached_property
    def layer_of_slot(self) -> np.ndarray:
        """int32[stages × chunks × depth]: the number of the layer in each slot, -1 in padding."""
        slots = [
            first + i if i < count else -1
            for stage in self.chunks
            for first, count in stage
            for i in range(self.depth)
        ]
        return np.array(slots, np.int32)

    @cached_property
    def slot_of_layer(self) -> np.ndarray:
        """int32[num_layers]: the slot of each layer."""
        slots = np.zeros(self.num_layers, np.int32)
        used = self.layer_of_slot >= 0
        slots[self.layer_of_slot[used]] = np.flatnonzero(used)
        return slots

    @property
    def is_plain(self) -> bool:
        """Whether slots are layers: nothing is padded and nothing permuted."""
        return np.array_equal(self.layer_of_slot, np.arange(self.num_layers))

    def to_slots(self, layers: jax.Array) -> jax.Array:
        """Returns `[slots, ...]` of `[layers, ...]`; padding is zero."""
        if self.is_plain:
            return layers
        slots = jnp.take(layers, np.maximum(self.layer_of_slot, 0), axis=0)
        used = (self.layer_of_slot >= 0).reshape(-1, *[1] * (layers.ndim - 1))
        return jnp.where(used, slots, jnp.zeros((), layers.dtype))

    def to_layers(self, slots: jax.Array) -> jax.Array:
        """Returns `[layers, ...]` of `[slots, ...]`."""
        return slots if self.is_plain else jnp.take(slots, self.slot_of_layer, axis=0)


def cut(
    num_layers: Mapping[str, int], placement: Sequence[int], layers_per_chunk: Sequence[int] = ()
) -> dict[str, Layout]:
    """Returns the layout of every stack.

    Args:
      num_layers: of every stack, in the order in which they run.
      placement: the stage of every chunk, in the order of the layers.
      layers_per_chunk: as many numbers as `placement`; () cuts as evenly as can be, longer
        chunks first.

    Raises:
      ValueError: numbers that do not add up, or one for other than every chunk; or, where it is an
        even cut, fewer layers than chunks.
    """
    total, num_stages = sum(num_layers.values()), max(placement) + 1
    chunks = f"mesh.pipeline={num_stages} × pipeline.chunks={len(placement) // num_stages}"
    if not layers_per_chunk and total < len(placement):
        raise ValueError(
            f"{chunks} is more than the model's {total} layers; choose fewer, or say with "
            "pipeline.layers_per_stage which chunks stay empty"
        )
    counts = list(layers_per_chunk) or even_cut(total, len(placement))
    if len(counts) != len(placement) or sum(counts) != total:
        raise ValueError(
            f"pipeline.layers_per_stage={tuple(counts)} has {len(counts)} numbers that add up to "
            f"{sum(counts)}; {chunks} needs {len(placement)} numbers that add up to {total}, such "
            f"as {tuple(even_cut(total, len(placement)))}"
        )
    layouts, start = {}, 0
    for name, size in num_layers.items():
        stages: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
        first = -start  # of the chunk, counted from the stack's first layer
        for stage, count in zip(placement, counts, strict=True):
            begin, end = min(max(first, 0), size), min(max(first + count, 0), size)
            stages[stage].append((begin, end - begin))
            first += count
        layouts[name] = Layout(num_layers=size, chunks=tuple(map(tuple, stages)))
        start += size
    return layouts


def even_cut(total: int, num_parts: int) -> list[int]:
    """Returns `num_parts` numbers that add up to `total` and differ by at most 1, larger first."""
    return [total // num_parts + (i < total % num_parts) for i in range(num_parts)]


def balanced_cut(
    num_layers: int, num_chunks: int, cost: Callable[[int, int, int], float]
) -> list[int]:
    """Returns the numbers of layers per chunk whose most loaded chunk costs least.

    Args:
      num_chunks: of all stages together.
      cost: (chunk, first layer, the layer after its last) -> what the chunk costs.
    """
    total = num_layers
    # best[n]: (largest cost, numbers so far) of the first chunks with n layers in them.
    best = {0: (0.0, ())}
    for chunk in range(num_chunks):
        stops = [total] if chunk == num_chunks - 1 else range(total + 1)
        best = {
            stop: min(
                (max(most, cost(chunk, first, stop)), (*counts, stop - first))
                for first, (most, counts) in best.items()
                if first <= stop
            )
            for stop in stops
        }
    return list(best[total][1])
