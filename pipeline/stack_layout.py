"""Assigns layers to pipeline stages, and converts between layers and parameter slots.

This module defines which layer is in which slot; `train/state/` applies it to parameters. In a
checkpoint, and wherever arrays must not depend on the mesh, the parameters of a stack have shape
`[layers, ...]`. During training their leading dim counts *slots*:
`[stages × chunks × max_layers_per_chunk, ...]`, split over `pipeline`. A stage holds its chunks one
after another, each padded to the length of the longest chunk.

The layers are cut into *virtual stages*, and the chunks of a stage are the virtual stages placed on
it; see schedules/table.py. For example, 5 layers on 2 stages with 2 chunks each, cut as
(2, 1, 1, 1) in layer order:

    layers          0  1 | 2 | 3 | 4
    virtual stage   0      1   2   3        virtual stage v runs on stage v mod 2
    stage           0      1   0   1
    chunk           0      0   1   1        among the chunks of its stage

    slot            0  1    2  3    4  5    6  7      max_layers_per_chunk = 2
    layer_of_slot   0  1    3 -1    2 -1    4 -1      -1: padding
                   `-- stage 0 --' `-- stage 1 --'

If every stage holds one chunk and all chunks have the same length, slots and layers are identical.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """The layers of one stack, cut into chunks.

    Attributes:
        num_layers: number of layers in the stack.
        chunks: `chunks[s][c]` is (first layer, number of layers) of chunk c of stage s.
    """

    num_layers: int
    chunks: tuple[tuple[tuple[int, int], ...], ...]

    @cached_property
    def max_layers_per_chunk(self) -> int:
        """Number of layers of the longest chunk, which is the number of slots of every chunk."""
        return max(count for stage in self.chunks for _, count in stage)

    @cached_property
    def layer_of_slot(self) -> np.ndarray:
        """int32[stages × chunks × max_layers_per_chunk]: the layer in each slot, -1 for padding."""
        slots = [
            first + i if i < count else -1
            for stage in self.chunks
            for first, count in stage
            for i in range(self.max_layers_per_chunk)
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
        """Whether slots and layers are identical: no padding, no permutation."""
        return np.array_equal(self.layer_of_slot, np.arange(self.num_layers))

    def to_slots(self, layers: jax.Array) -> jax.Array:
        """Convert `[layers, ...]` to `[slots, ...]`; padding is filled with zeros."""
        if self.is_plain:
            return layers
        slots = jnp.take(layers, np.maximum(self.layer_of_slot, 0), axis=0)
        used = (self.layer_of_slot >= 0).reshape(-1, *[1] * (layers.ndim - 1))
        return jnp.where(used, slots, jnp.zeros((), layers.dtype))

    def to_layers(self, slots: jax.Array) -> jax.Array:
        """Convert `[slots, ...]` to `[layers, ...]`."""
        return slots if self.is_plain else jnp.take(slots, self.slot_of_layer, axis=0)


def cut(
    num_layers: Mapping[str, int],
    placement: Sequence[int],
    layers_per_virtual_stage: Sequence[int] = (),
) -> dict[str, StackLayout]:
    """Cut the stacks of a model into virtual stages.

    The cut runs over the layers of all stacks in sequence, so a virtual stage may contain the end
    of one stack and the beginning of the next.

    Args:
        num_layers: number of layers of every stack, in the order in which they run.
        placement: stage of every virtual stage.
        layers_per_virtual_stage: number of layers of every virtual stage. () cuts as evenly as
            possible, longer virtual stages first.

    Returns:
        The layout of every stack.

    Raises:
        ValueError: `layers_per_virtual_stage` has the wrong length or sum, or is empty although
            there are fewer layers than virtual stages.
    """
    total = sum(num_layers.values())
    num_stages = max(placement) + 1
    chunks = f"mesh.pipeline={num_stages} × pipeline.chunks={len(placement) // num_stages}"
    if not layers_per_virtual_stage and total < len(placement):
        raise ValueError(
            f"{chunks} exceeds the model's {total} layers; choose fewer stages or chunks, or "
            "list empty chunks as 0 in pipeline.layers_per_stage"
        )
    counts = list(layers_per_virtual_stage) or even_cut(total, len(placement))
    if len(counts) != len(placement) or sum(counts) != total:
        raise ValueError(
            f"pipeline.layers_per_stage={tuple(counts)} has {len(counts)} numbers that add up to "
            f"{sum(counts)}; {chunks} needs {len(placement)} numbers that add up to {total}, such "
            f"as {tuple(even_cut(total, len(placement)))}"
        )
    layouts = {}
    start = 0
    for name, size in num_layers.items():
        stages: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
        # The first layer of the virtual stage, counted from the stack's first layer. It is negative
        # while the virtual stage begins in an earlier stack; clamping to 0 .. size keeps this
        # stack's part only.
        first = -start
        for stage, count in zip(placement, counts, strict=True):
            begin = min(max(first, 0), size)
            end = min(max(first + count, 0), size)
            stages[stage].append((begin, end - begin))
            first += count
        layouts[name] = StackLayout(num_layers=size, chunks=tuple(map(tuple, stages)))
        start += size
    return layouts


def even_cut(total: int, num_parts: int) -> list[int]:
    """Split `total` into `num_parts` integers that differ by at most 1, larger ones first."""
    return [total // num_parts + (i < total % num_parts) for i in range(num_parts)]


def balanced_cut(
    num_layers: int, num_virtual_stages: int, cost: Callable[[int, int, int], float]
) -> list[int]:
    """Choose the cut that minimizes the cost of the most expensive virtual stage.

    Args:
        num_layers: number of layers to distribute.
        num_virtual_stages: number of virtual stages.
        cost: (virtual stage, first layer, layer after the last) -> cost of that virtual stage, in
            any unit. More layers never cost less.

    Returns:
        The number of layers of each virtual stage.
    """
    total = num_layers
    # Dynamic programming over virtual stages. best[n] is the optimum for n layers in the virtual
    # stages so far: (cost of the most expensive one, layers of each).
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for v in range(num_virtual_stages):
        stops = [total] if v == num_virtual_stages - 1 else range(total + 1)
        best = {stop: _best_last_stage(v, stop, best, cost) for stop in stops}
    return list(best[total][1])


def _best_last_stage(
    v: int,
    stop: int,
    best: Mapping[int, tuple[float, tuple[int, ...]]],
    cost: Callable[[int, int, int], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the optimum for `stop` layers in virtual stages up to `v`, from those up to v - 1."""
    optimum: tuple[float, tuple[int, ...]] = (math.inf, ())
    for first in sorted((first for first in best if first <= stop), reverse=True):
        stage_cost = cost(v, first, stop)
        if stage_cost > optimum[0]:
            break  # with more layers, the stage costs no less
        earlier_cost, counts = best[first]
        optimum = min(optimum, (max(earlier_cost, stage_cost), (*counts, stop - first)))
    return optimum
