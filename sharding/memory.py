"""The `memory` section of a run's config, and operations on arrays in host memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from fields.field import field
from fields.section import Section

#: Placement that lets train/planning/memory/fitter.py choose settings with which the run fits.
AUTO = "auto"

#: Memory kind of arrays in host memory, and the memory spaces within a jitted function.
HOST_KIND = "pinned_host"
HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


def _budget(doc: str) -> Any:
    """Declare a memory budget in GiB."""
    remedy = "give GiB, or None for nine tenths of the available memory"
    return field(None, doc, gt=0, remedy=remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section, section="memory"):
    """How the training state is sharded, and how much of it is stored in host memory.

    With `memory.placement=host`, host memory holds the master weights and optimizer state of
    `offload_optimizer_fraction` of all parameters. Each layer is copied to the device only while it
    is updated. For `offload_parameters_fraction` of the stacks, master weights and gradients stay
    in host memory during forward and backward too, and the device has no copy of them beyond the
    current layer. See docs/memory.md.
    """

    zero_stage: int = field(
        0,
        "State that is sharded over replicas instead of replicated (ZeRO). 0: nothing, 1: "
        "optimizer state and master weights, 2: gradients too, 3: parameters too, which are "
        "gathered one layer at a time.",
        choices=(0, 1, 2, 3),
    )
    shard_parameters_fraction: float = field(
        1.0,
        "With `zero_stage=3` or `mesh.fsdp`: fraction of the layers' bytes that is gathered one "
        "layer at a time, the largest parameters first. The rest is gathered once per step, as in "
        "stage 2.",
        ge=0,
        le=1,
    )
    placement: str = field(
        "device",
        "Where the training state is stored. `device`: everything in device memory. `host`: "
        "optimizer state and master weights in host memory. `auto`: choose the fastest settings "
        "that fit the memory budget.",
        choices=("device", "host", AUTO),
    )
    offload_optimizer_fraction: float = field(
        1.0,
        "With `placement=host`: fraction of the bytes of all parameters whose optimizer state and "
        "master weights are in host memory, the largest parameters first.",
        ge=0,
        le=1,
    )
    offload_parameters_fraction: float = field(
        0.0,
        "With `placement=host`: fraction of the layers' bytes that forward and backward passes "
        "also read from host memory, one layer at a time.",
        ge=0,
        le=1,
    )
    offload_activations: tuple = field(
        (),
        "Activations that are kept in host memory between a block's forward and backward pass: "
        "names, as for `train.remat`, such as `qkv,mlp`.",
        nonempty=True,
        splits=True,
        remedy="write for example ('qkv',)",
    )
    device_budget: float | None = _budget(
        "Memory of each device that a step may use, in GiB. None: 0.9 of its memory."
    )
    host_budget: float | None = _budget(
        "Memory of each host that a step may use, in GiB. None: 0.9 of its memory."
    )

    @property
    def optimizer_fraction(self) -> float:
        """Fraction of the parameters whose optimizer state is stored in host memory."""
        return self.offload_optimizer_fraction if self.placement == "host" else 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.offload_parameters_fraction and self.placement != "host":
            raise ValueError(
                f"memory.offload_parameters_fraction={self.offload_parameters_fraction} requires "
                f"memory.placement=host, not {self.placement}; change one of the two"
            )


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


def zeros_on_host(shape: tuple[int, ...], dtype: Any, *, num_loop_dims: int = 1) -> jax.Array:
    """Return zeros in host memory, within a traced function.

    They are made on the device and copied one piece at a time, so that the device never holds all
    of them: nested loops run over the first `num_loop_dims` dims, and a piece has the other dims.
    """
    if num_loop_dims == 0:
        return jax.device_put(jnp.zeros(shape, dtype), HOST)

    def piece(_):
        return zeros_on_host(shape[1:], dtype, num_loop_dims=num_loop_dims - 1)

    return jax.lax.map(piece, jnp.arange(shape[0], dtype=jnp.int32))


def in_device_memory(sharding: Any) -> NamedSharding:
    """Return a NamedSharding with the device's default memory kind."""
    return NamedSharding(sharding.mesh, sharding.spec)


def to_where(x: jax.Array, like: jax.Array) -> jax.Array:
    """Move `x` to the memory of `like`; both are arrays of a traced function."""
    return jax.device_put(x, HOST) if is_on_host(like) else to_device(x)
