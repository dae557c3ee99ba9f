"""The device mesh: named axes, outermost to innermost.

`model` is innermost, so its groups are neighbouring devices on the fastest links. `pipeline` is
outermost, so only the small sends between stages cross the slowest links. An axis of size 1 costs
nothing. With 8 devices and pipeline=2, data=2, model=2:

                 model              pipeline stages   [0 1 2 3] and [4 5 6 7]
    stage 0  data  0  1             data groups       [0 2], [1 3] in stage 0
                   2  3             model groups      [0 1], [2 3] in stage 0
    stage 1  data  4  5
                   6  7

The config gives the sizes of six axes. Tensor parallelism in more than one dimension divides the
devices of `mesh.model` further (sharding/tensor.py), over the axes FACTORS and `model`.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from fields.field import field
from fields.section import Section
from sharding.tensor import FACTORS, TensorConfig

#: Axes whose sizes are keys of the config.
AXES = ("pipeline", "data", "fsdp", "context", "expert", "model")
#: All axes of a mesh, outermost first.
MESH_AXES = (*AXES[:-1], *FACTORS)
#: Axes whose devices have different examples.
BATCH_AXES = ("data", "fsdp", "expert", "depth", "row")
#: Axes of BATCH_AXES over which the rules split parameters that a step gathers.
SHARD_AXES = ("fsdp", "row")
#: Axes whose devices have different tokens, and over which parameters may be sharded.
REPLICA_AXES = (*BATCH_AXES, "context")


#: A mesh of devices, or an abstract mesh. Steps for absent devices are traced on an abstract mesh,
#: which keeps memory kinds: an absent device cannot report the ones that it supports.
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def _size(doc: str) -> Any:
    """Declare the size of a mesh axis."""
    return field(1, doc, ge=1, also=(-1,), remedy="-1 takes all remaining devices")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, section="mesh"):
    """The device mesh: number of devices along each axis, outermost first.

    At most one axis may be -1, which stands for all remaining devices. See docs/meshes.md.
    """

    pipeline: int = _size("Pipeline stages; each stage holds a part of the layers.")
    data: int = _size("Data-parallel replicas; each computes a part of the batch.")
    fsdp: int = _size("Like `data`, but also shards parameters and optimizer state at rest.")
    context: int = _size("Splits sequences; each device has some tokens of every row.")
    ulysses: int = field(
        0,
        "Number of neighbouring devices of `context` that exchange tokens for heads before "
        "attention; the groups form a ring, around which keys and values are sent. It divides the "
        "key-value heads of a device. 0: chosen by the lengths of the sequences.",
        ge=0,
    )
    expert: int = _size(
        "Like `data`, but divides the experts of a mixture of experts (the logical axis `experts`)."
    )
    model: int = _size(
        "Tensor parallelism: splits attention heads, mlp and vocab. The section `tensor` has modes "
        "that split more."
    )
    auto: bool = field(
        False,
        "Choose the sizes of this section, and the settings that depend on them, for the devices "
        "that are found. Values on the command line stay as they are; see docs/plan.md.",
    )
    replan: bool = field(
        False, "With `auto`, choose again instead of keeping the plan of the run that is resumed."
    )

    def __post_init__(self):
        super().__post_init__()
        if self.replan and not self.auto:
            raise ValueError(
                "mesh.replan=True chooses the mesh again, but mesh.auto=False; set mesh.auto=True"
            )
        if self.ulysses > 1 and self.context > 0 and self.context % self.ulysses:
            raise ValueError(
                f"mesh.ulysses={self.ulysses} must divide mesh.context={self.context}, of whose "
                "devices it is a part; choose a divisor, or 0 to let the program choose"
            )
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(
                f"mesh.{free[0]}=-1 and mesh.{free[1]}=-1: only one axis can take the remaining "
                "devices; give the other a number"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis name -> size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """Number of devices that the axes with a given size need; an axis of -1 counts as 1."""
        return math.prod(size for size in self.sizes.values() if size != -1)

    @property
    def num_replicas(self) -> int:
        """Number of groups of devices that have different examples, in the mode `1d`."""
        sizes = self.axis_sizes()
        return math.prod(sizes[axis] for axis in BATCH_AXES)

    def axis_sizes(self, tensor: TensorConfig | None = None) -> dict[str, int]:
        """Return mesh axis name -> size, outermost first, with the devices of `model` divided.

        Args:
            tensor: how they are divided; in one dimension by default.

        Raises:
            ValueError: the mode cannot divide them.
        """
        sizes = self.sizes | (tensor or TensorConfig()).factors(self.model)
        return {axis: sizes[axis] for axis in MESH_AXES}

    def filled_in(self, num_available: int) -> "MeshConfig":
        """Return this config with -1 replaced by the number of remaining devices.

        Raises:
            ValueError: more devices are needed than are available, or the remaining devices cannot
                be divided evenly.
        """
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if self.num_devices > num_available:
            raise ValueError(
                f"mesh {self} needs {self.num_devices} devices but {num_available} are available; "
                f"meshes that fit: {_meshes_that_fit(self, num_available)}"
            )
        if not free:
            return self
        if num_available % self.num_devices:
            raise ValueError(
                f"mesh.{free[0]}=-1: the other axes of mesh {self} take {self.num_devices} devices "
                f"at a time, which must divide the {num_available} available"
            )
        return dataclasses.replace(self, **{free[0]: num_available // self.num_devices})

    def __str__(self) -> str:
        shown = [f"{axis}={size}" for axis, size in self.sizes.items() if size != 1]
        return " × ".join(shown) or "data=1"


def make_mesh(
    config: MeshConfig, devices: Sequence[Any], tensor: TensorConfig | None = None
) -> jax.sharding.Mesh:
    """Return the mesh over the first `config.num_devices` of the devices.

    Args:
        config: sizes of the axes.
        devices: jax's devices.
        tensor: how the devices of `model` are divided; in one dimension by default.

    Raises:
        ValueError: more devices are needed than there are, or `tensor` cannot divide them.
    """
    config = config.filled_in(len(devices))
    sizes = config.axis_sizes(tensor)
    return jax.make_mesh(
        tuple(sizes.values()),
        MESH_AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES),
        devices=devices[: config.num_devices],
    )


def describe(mesh: AnyMesh) -> str:
    """Format the sizes of a mesh, and those of `depth`, `row` and `hidden` only if one is used."""
    is_divided = any(mesh.shape.get(axis, 1) > 1 for axis in FACTORS[:-1])
    shown = (axis for axis in mesh.shape if is_divided or axis not in FACTORS[:-1])
    return " × ".join(f"{axis}={mesh.shape[axis]}" for axis in shown)


def num_replicas(mesh: AnyMesh) -> int:
    """Return the number of groups of devices that have different examples."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.shape)


def check_automatic(mesh: AnyMesh) -> None:
    """Check that JAX may choose the shardings on a mesh.

    Raises:
        ValueError: an axis is explicit, the default of `jax.make_mesh`: every function would then
            have to state the shardings of its results.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit]
    if explicit:
        raise ValueError(
            f"the mesh has explicit axes ({', '.join(map(str, explicit))}), but models need "
            "automatic ones; make it with sharding.mesh.make_mesh(MeshConfig(data=2), "
            "jax.devices()), or pass axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(mesh.axis_names)} to jax.make_mesh"
        )


def use_mesh(mesh: AnyMesh) -> AbstractContextManager:
    """Return a context in which functions are traced on `mesh`."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def _meshes_that_fit(config: MeshConfig, num_available: int) -> str:
    """List the largest meshes that shrink the requested one axis by axis, for an error message."""
    options = [{}]
    for axis, size in config.sizes.items():
        size = max(size, 1)
        sizes = [n for n in range(1, min(size, num_available) + 1) if size % n == 0]
        options = [{**option, axis: n} for option in options for n in sizes]
        options = [option for option in options if math.prod(option.values()) <= num_available]
    fitting = [MeshConfig(**option) for option in options]
    max_devices = max(mesh.num_devices for mesh in fitting)
    return "; ".join(str(mesh) for mesh in fitting if mesh.num_devices == max_devices)
