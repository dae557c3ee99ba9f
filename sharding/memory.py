"""The `memory` section of a run's config, and operations on arrays in host memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import REPLICA_AXES, AnyMesh
from sharding.rules import axes_of

ZERO_STAGES = (0, 1, 2, 3)
#: Placement that lets train/planning/memory_search.py choose settings with which the run fits.
AUTO = "auto"
PLACEMENTS = ("device", "host", AUTO)

#: Memory kind of arrays in host memory, and the memory spaces within a jitted function.
HOST_KIND = "pinned_host"
HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How the training state is sharded, and how much of it is stored in host memory.

    With `placement="host"`, host memory holds the master weights and optimizer state of
    `offload_optimizer_fraction` of all parameters. Each layer is copied to the device only while it
    is updated. For `offload_parameters_fraction` of the stacks, master weights and gradients stay
    in host memory during forward and backward too, and the device has no copy of them beyond the
    current layer.
    """

    zero_stage: int = 0  # one of ZERO_STAGES
    # Fraction of the stacks' bytes that ZeRO stage 3 gathers layer by layer, largest parameters
    # first; the rest is gathered once per step.
    shard_parameters_fraction: float = 1.0
    placement: str = "device"  # one of PLACEMENTS
    offload_optimizer_fraction: float = 1.0  # of all parameters' bytes; for placement="host"
    offload_parameters_fraction: float = 0.0  # of the stacks' bytes; for placement="host"
    # Names of activations stored in host memory between a block's forward and its backward.
    offload_activations: tuple = ()
    device_budget: float | None = None  # GiB of each device's memory that a step may use
    host_budget: float | None = None  # GiB of each host's memory that a step may use

    @property
    def optimizer_fraction(self) -> float:
        """Fraction of the parameters whose optimizer state is stored in host memory."""
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
                raise ValueError(f"memory.{name}={getattr(self, name)} must be between 0 and 1")
        for name in ("device_budget", "host_budget"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(
                    f"memory.{name}={getattr(self, name)} must be more than 0, in GiB, or None for "
                    "nine tenths of the available memory"
                )
        if self.shard_parameters_fraction != 1 and self.zero_stage != 3:
            raise ValueError(
                f"memory.shard_parameters_fraction={self.shard_parameters_fraction} requires "
                f"memory.zero_stage=3, not {self.zero_stage}; change one of the two"
            )
        if self.offload_parameters_fraction and self.placement != "host":
            raise ValueError(
                f"memory.offload_parameters_fraction={self.offload_parameters_fraction} requires "
                f"memory.placement=host, not {self.placement}; change one of the two"
            )


def streamed(params: Any, specs: Any, mesh: AnyMesh, config: MemoryConfig) -> Any:
    """Choose the parameters of a stack that forward and backward read from host memory.

    The largest parameters come first. A parameter that is replicated over a replica axis stays on
    the device, because its gradients are summed for all layers at once.

    Args:
        params: arrays or ShapeDtypeStructs of the stack.
        specs: the same tree of PartitionSpecs.
        mesh: the run's mesh.
        config: sets the fraction of the stack's bytes to read from host memory.

    Returns:
        The same tree of bools.
    """
    leaves, structure = jax.tree.flatten(params)

    def is_spec(x):
        return isinstance(x, PartitionSpec)

    replicas = {axis for axis in REPLICA_AXES if mesh.shape[axis] > 1}
    is_split = [replicas <= axes_of(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    is_large = largest(leaves, config.offload_parameters_fraction)
    both = [split and large for split, large in zip(is_split, is_large, strict=True)]
    return jax.tree.unflatten(structure, both)


def largest(leaves: Sequence[Any], fraction: float) -> list[bool]:
    """Choose the largest arrays until they contain `fraction` of all bytes.

    Args:
        leaves: arrays or ShapeDtypeStructs.
        fraction: fraction of the bytes of all leaves, in [0, 1].

    Returns:
        A bool per leaf.
    """
    left = fraction * sum(map(num_bytes, leaves))
    chosen = [False] * len(leaves)
    for i in sorted(range(len(leaves)), key=lambda i: -num_bytes(leaves[i])):
        if left > 0:
            chosen[i] = True
            left = left - num_bytes(leaves[i])
    return chosen


def num_bytes(leaf: Any) -> int:
    """Return the bytes of an array or a ShapeDtypeStruct, all its shards together."""
    return leaf.size * leaf.dtype.itemsize


def is_on_host(x: jax.Array) -> bool:
    """Return whether an array of a traced function is stored in host memory."""
    return jax.typeof(x).memory_space == HOST


def to_device(x: jax.Array) -> jax.Array:
    """Move an array of a traced function to device memory."""
    return jax.device_put(x, DEVICE) if is_on_host(x) else x


def zeros_on_host(shape: tuple[int, ...], dtype: Any, *, depth: int = 1) -> jax.Array:
    """Return zeros in host memory, within a traced function.

    They are made on the device and copied piece by piece; a piece has the dims after the first
    `depth`.
    """
    if depth == 0:
        return jax.device_put(jnp.zeros(shape, dtype), HOST)

    def piece(_):
        return zeros_on_host(shape[1:], dtype, depth=depth - 1)

    return jax.lax.map(piece, jnp.arange(shape[0], dtype=jnp.int32))


def in_device_memory(sharding: Any) -> NamedSharding:
    """Return a NamedSharding with the device's default memory kind."""
    return NamedSharding(sharding.mesh, sharding.spec)


def to_where(x: jax.Array, like: jax.Array) -> jax.Array:
    """Move `x` to the memory of `like`; both are arrays of a traced function."""
    return jax.device_put(x, HOST) if is_on_host(like) else to_device(x)
