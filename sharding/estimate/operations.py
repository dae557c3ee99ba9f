"""What a traced function is made of once it is opened: values, operations and programs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

#: Per dim of a value, the mesh axes that it is split over.
Axes = tuple[tuple[str, ...], ...]


#: Operations that give the same arrays other names.
RENAMES = ("name", "once", "optimization_barrier")


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a traced function."""

    shape: tuple[int, ...]  # on this device along axes handled by hand; whole along the others
    itemsize: int
    on_host: bool
    axes: Axes  # that the compiler splits its dims over
    literal: str | None = None  # its value, of a scalar that the program itself holds

    def local_shape(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of what one device has of it."""
        parts = (math.prod(mesh_shape[axis] for axis in dim) for dim in self.axes)
        return tuple(-(-size // part) for size, part in zip(self.shape, parts, strict=True))

    def num_bytes(self, mesh_shape: Mapping[str, int]) -> int:
        """Returns the bytes that one device has of it."""
        return self.itemsize * math.prod(self.local_shape(mesh_shape))


@dataclasses.dataclass(eq=False)
class Operation:
    """One equation of a traced function; a loop or a branch has others within."""

    name: str  # of the primitive
    inputs: list[Value]
    outputs: list[Value]
    params: Mapping[str, Any]
    bodies: Sequence["Program"] = ()  # of a scan or while: one; of a cond: its branches


@dataclasses.dataclass(eq=False)
class Program:
    """A function of values: `inputs`, then what is done in order, then `outputs`."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]


@dataclasses.dataclass(eq=False)
class Loop(Operation):
    """A scan or while: the body's inputs are constants, what is carried, and slices."""

    num_consts: int = 0
    num_carry: int = 0
    trip_count: int = 1  # 1 where it is not known
