"""What a run decides about its memory, and what of the training state lies in host memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import REPLICA_AXES, AnyMesh
from sharding.rules import axes_of

ZERO_STAGES = (0, 1, 2, 3)
#: Chosen so that the run fits; see train/planning/memory_search.py.
AUTO = "auto"
PLACEMENTS = ("device", "host", AUTO)

#: The memory kind of arrays in host memory, and its name within a jitted function.
HOST_KIND = "pinned_host"
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Where the training state lies, and how much of it at once.

    With `placement="host"` master weights and optimizer state of `offload_optimizer_fraction` of
    all parameters lie in host memory, and are on the device for one layer at a time as it is
    updated. Master weights and gradients of `offload_parameters_fraction` of the stacks are so in
    forward and backward, too; there is no copy of them.
    """

    zero_stage: int = 0  # one of ZERO_STAGES
    shard_parameters_fraction: float = 1.0  # of the stacks' bytes, what stage 3 holds for a layer
    placement: str = "device"  # one of PLACEMENTS
    offload_optimizer_fraction: float = 1.0  # of all parameters' bytes; for placement="host"
    offload_parameters_fraction: float = 0.0  # of the stacks' bytes; for placement="host"
    # Names of activations that lie in host memory from a block's forward to its backward.
    offload_activations: tuple = ()
    device_budget: float | None = None  # GiB that a step may take of each device
    host_budget: float | None = None  # GiB that it may take of each host

    @property
    def optimizer_fraction(self) -> float:
        """How much of the optimizer's state lies in host memory."""
        return self.offload_optimizer_fraction if self.placement == "host" else 0.0

    def __post_init__(self):
        names = self.offload_activations
        names = tuple(names.split(",")) if isinstance(names, str) else tuple(names)
        object.__setattr__(self, "offload_activations", names)
        if self.zero_stage not in ZERO_STAGES:
            raise ValueError(f"memory.zero_stage={self.zero_stage} is unknown; choose 0, 1, 2 or 3")
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"memory.placement={self.placement!r} is unknown; choose {', '.join(PLACEMENTS)}"
            )
        for name in (
            "shard_parameters_fraction",
            "offload_optimizer_fraction",
            "offload_parameters_fraction",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"memory.{name}={getattr(self, name)} must lie in 0 .. 1")
        for name in ("device_budget", "host_budget"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(
                    f"memory.{name}={getattr(self, name)} must be more than 0, in GiB; or None: "
                    "nine tenths of what there is"
                )
        if self.shard_parameters_fraction != 1 and self.zero_stage != 3:
            raise ValueError(
                f"memory.shard_parameters_fraction={self.shard_parameters_fraction} is for "
                f"memory.zero_stage=3 alone, which is {self.zero_stage}; set one of the two"
            )
        if self.offload_parameters_fraction and self.placement != "host":
            raise ValueError(
                f"memory.offload_parameters_fraction={self.offload_parameters_fraction} is for "
                f"memory.placement=host alone, which is {self.placement}; set one of the two"
            )


def streamed(params: Any, specs: Any, mesh: AnyMesh, config: MemoryConfig) -> Any:
    """Returns a bool per parameter of a stack: whether forward and backward read it from the host.

    The largest come first. A parameter that replicas hold alike stays on the device: its gradients
    are summed over all layers at once.

    Args:
      params: arrays or ShapeDtypeStructs of the stack.
      specs: the same tree of PartitionSpecs.
    """
    leaves, structure = jax.tree.flatten(params)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    replicas = {axis for axis in REPLICA_AXES if mesh.shape[axis] > 1}
    is_split = [replicas <= axes_of(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    is_large = largest(leaves, config.offload_parameters_fraction)
    both = [split and large for split, large in zip(is_split, is_large, strict=True)]
    return jax.tree.unflatten(structure, both)


def largest(leaves: Sequence[Any], fraction: float) -> list[bool]:
    """Returns which of the arrays to choose: the largest, until `fraction` of all bytes is reached.

    Args:
      leaves: arrays or ShapeDtypeStructs.
    """
    left, chosen = fraction * sum(map(num_bytes, leaves)), [False] * len(leaves)
    for i in sorted(range(len(leaves)), key=lambda i: -num_bytes(leaves[i])):
        if left > 0:
            chosen[i], left = True, left - num_bytes(leaves[i])
    return chosen


def num_bytes(leaf: Any) -> int:
    """Returns the bytes of an array or a ShapeDtypeStruct, all its shards together."""
    return leaf.size * leaf.dtype.itemsize


def is_on_host(x: jax.Array) -> bool:
    """Returns whether an array of a traced function lies in host memory."""
    return jax.typeof(x).memory_space == HOST


def to_device(x: jax.Array) -> jax.Array:
    """Returns an array of a traced function in device memory."""
    return jax.device_put(x, DEVICE) if is_on_host(x) else x


def zeros_on_host(shape: tuple[int, ...], dtype: Any, *, depth: int = 1) -> jax.Array:
    """Returns zeros in host memory, within a traced function.

    They come from the device in pieces of the dims that follow the first `depth` ones.
    """
    if depth == 0:
        return jax.device_put(jnp.zeros(shape, dtype), HOST)
    piece = lambda _: zeros_on_host(shape[1:], dtype, depth=depth - 1)  # noqa: E731
    return jax.lax.map(piece, jnp.arange(shape[0], dtype=jnp.int32))


def in_device_memory(sharding: Any) -> NamedSharding:
    """Returns a NamedSharding with the device's own memory kind."""
    return NamedSharding(sharding.mesh, sharding.spec)


def to_where(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `x` in the memory of `like`, both arrays of a traced function."""
    return jax.device_put(x, HOST) if is_on_host(like) else to_device(x)
