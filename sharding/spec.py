"""Reads and builds PartitionSpecs as one tuple of mesh axes per dim.

An entry of a PartitionSpec is None, the name of an axis or a tuple of names, and a spec may be
shorter than the rank of its array. Here, every dim has a tuple, which is empty if it is not split:

    PartitionSpec("pipeline", None, ("data", "fsdp"))      the spec of an array of rank 4
    (("pipeline",), (), ("data", "fsdp"), ())              its axes by dim
"""

from collections.abc import Container, Iterable
from typing import Any

from jax.sharding import PartitionSpec

#: Per dim of an array, the mesh axes that it is split over, major first.
Axes = tuple[tuple[str, ...], ...]


def is_spec(x: Any) -> bool:
    """Return whether `x` is a PartitionSpec; used as `is_leaf`."""
    return isinstance(x, PartitionSpec)


def axes_by_dim(spec: Iterable[Any], rank: int = 0) -> Axes:
    """Return the mesh axes of each dim of an array.

    Args:
        spec: its partition spec, or some of its entries. Unconstrained dims count as not split.
        rank: its number of dims; a shorter spec does not split the last ones.
    """
    parts = [p if isinstance(p, tuple) else (p,) if isinstance(p, str) else () for p in spec]
    return (*parts, *[()] * (rank - len(parts)))


def axes_of(spec: Iterable[Any]) -> set[str]:
    """Return the mesh axes that a PartitionSpec, or some of its entries, use."""
    return {axis for part in axes_by_dim(spec) for axis in part}


def spec_of(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """Return the PartitionSpec of an array with these axes by dim."""
    return PartitionSpec(*(part if len(part) > 1 else next(iter(part), None) for part in axes))


def restrict(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """Return a spec that splits the same dims, but only over the given mesh axes."""
    parts = axes_by_dim(spec)
    return spec_of(tuple(axis for axis in part if axis in axes) for part in parts)


def without(axes: Axes, left_out: Container[str]) -> Axes:
    """Return axes by dim without some of the mesh axes."""
    return tuple(tuple(axis for axis in part if axis not in left_out) for part in axes)
