"""A checkpoint of another trainer as a Hugging Face model, and operations on its tensors.

The operations are lazy: their values are read from the files, and computed, when `Tensor.map` is
called.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert.tensor_files import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A model in another trainer's checkpoint.

    Attributes:
        config: config.json of the same model in the Hugging Face format.
        tensors: name in the Hugging Face format -> tensor.
    """

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]


def keep_latest(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, of which the one that was read last keeps its values.

    A tensor is read once for each chunk of a parameter, and would be computed as often.
    """
    latest: dict[str, np.ndarray] = {}

    def read(name: str, tensor: Tensor) -> np.ndarray:
        if name not in latest:
            latest.clear()  # before the next one is read, so that only one is in memory
            latest[name] = tensor.map()
        return latest[name]

    return {
        name: dataclasses.replace(tensor, map=partial(read, name, tensor))
        for name, tensor in tensors.items()
    }


def derived(
    name: str, tensor: Tensor, shape: Sequence[int], function: Callable[[np.ndarray], np.ndarray]
) -> Tensor:
    """Return a tensor whose values are a function of another tensor's values.

    Args:
        shape: shape of the result.
    """
    return Tensor(
        name=name,
        file=tensor.file,
        dtype=tensor.dtype,
        shape=tuple(shape),
        map=lambda: function(tensor.map()),
    )


def rows(name: str, tensor: Tensor, part: slice) -> Tensor:
    """Return some rows of a tensor."""
    start, stop, _ = part.indices(tensor.shape[0])
    shape = (stop - start, *tensor.shape[1:])
    return derived(name, tensor, shape, lambda values: values[start:stop])


def joined(shards: Sequence[Tensor], axis: int) -> Tensor:
    """Return the tensor whose shards along an axis are given, in order.

    Raises:
        ValueError: The shards have different dtypes, or sizes that do not fit together.
    """
    first = shards[0]
    if len(shards) == 1:
        return first
    if axis >= len(first.shape):
        raise ValueError(
            f"tensor {first.name} in {first.file} has the shape {list(first.shape)}, which cannot "
            f"be a shard along axis {axis}; the checkpoint is damaged"
        )
    for shard in shards[1:]:
        if _without(shard.shape, axis) != _without(first.shape, axis) or shard.dtype != first.dtype:
            raise ValueError(
                f"tensor {first.name} is {first.dtype}{list(first.shape)} in {first.file}, but "
                f"{shard.dtype}{list(shard.shape)} in {shard.file}; its shards must agree"
            )
    size = sum(shard.shape[axis] for shard in shards)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    return Tensor(
        name=first.name,
        file=first.file,
        dtype=first.dtype,
        shape=shape,
        map=lambda: np.concatenate([shard.map() for shard in shards], axis),
    )


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def check_shape(tensor: Tensor, shape: Sequence[int], file: Path) -> None:
    """Check the shape of a tensor.

    Args:
        file: file with the settings that the shape follows from.

    Raises:
        ValueError: It has another shape.
    """
    if tensor.shape != tuple(shape):
        raise ValueError(
            f"tensor {tensor.name} in {tensor.file} has the shape {list(tensor.shape)}, but "
            f"{list(shape)} follows from the settings in {file}; both must be of the same model"
        )
