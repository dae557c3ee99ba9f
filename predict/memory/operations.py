"""Data types of an inlined traced function: values, operations, loops and programs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sharding.spec import Axes

#: Operations that return their inputs under new names.
RENAMES = ("name", "once", "optimization_barrier")
#: Name of an operation, added by a pass, whose inputs are stored as arrays by then. The fusion that
#: computes them also computes its param `with`, the output of the next operation.
STORED = "stored"


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a traced function."""

    shape: tuple[int, ...]  # per device along manual axes, global along all others
    itemsize: int
    on_host: bool
    axes: Axes  # axes that the compiler splits its dims over
    literal: str | None = None  # a text that constants of the program share if they are equal

    @property
    def size(self) -> int:
        """Number of elements, per device along manual axes and global along all others."""
        return math.prod(self.shape)

    def local_shape(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the part that one device stores."""
        parts = (math.prod(mesh_shape[axis] for axis in dim) for dim in self.axes)
        return tuple(-(-size // part) for size, part in zip(self.shape, parts, strict=True))

    def num_bytes(self, mesh_shape: Mapping[str, int]) -> int:
        """Return the bytes that one device stores."""
        return self.itemsize * math.prod(self.local_shape(mesh_shape))


@dataclasses.dataclass(eq=False)
class Operation:
    """One equation of a traced function. Loops and conditionals contain further programs."""

    name: str  # name of the primitive
    inputs: list[Value]
    outputs: list[Value]
    params: Mapping[str, Any]
    bodies: Sequence["Program"] = ()  # the body of a scan or while, or the branches of a cond


@dataclasses.dataclass(eq=False)
class Program:
    """A sequence of operations that computes `outputs` from `inputs`."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]


@dataclasses.dataclass(eq=False)
class Loop(Operation):
    """A scan or while loop. Inputs of the body: constants, then the carry, then scanned slices."""

    num_consts: int = 0
    num_carry: int = 0
    trip_count: int = 1  # 1 if it is unknown
