"""Parameters on their way into a step, and gradients on their way out of it.

Inside the step `pipeline`, `data` and `fsdp` are handled by hand: what fsdp or ZeRO split is put
together before use, once a step or one layer at a time, and gradients are summed over `data` and
`fsdp` once, when all microbatches are done, or one layer at a time.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.collectives import psum
from sharding.estimate.memory_estimate import counted_as
from sharding.memory import MemoryConfig, is_on_host, streamed, to_device
from sharding.mesh import REPLICA_AXES, AnyMesh
from sharding.rules import axes_of
from sharding.zero import one_layer_at_a_time

#: Mesh axes whose communication is written out by hand.
MANUAL_AXES = ("pipeline", "data", "fsdp")

Tree = Any


class GatherMode(enum.IntEnum):
    """How a parameter comes to be whole on the device."""

    ONCE = 0  # once a step
    BY_LAYER = 1  # one layer at a time; a stack's alone
    STREAMED = 2  # likewise, and parts of the others wait in host memory, their gradients too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a run's parameters lie on its mesh, and what is sent of them."""

    mesh: AnyMesh  # all axes Auto
    # {"ends": ..., "layers": {stack: ...}}, the PartitionSpec of every parameter; every leaf of
    # `layers` has its dim of slots first, split over `pipeline`.
    specs: dict[str, Tree]
    memory: MemoryConfig = MemoryConfig()  # what replicas share out, which `specs` show already
    compute_dtype: str | None = None  # of parameters as the model gets them; None: their own
    reduce_dtype: str | None = None  # that gradients are summed in over devices; None: their own

    def of_ends(self) -> "Shards":
        """Returns the ways of what is outside the stacks, gone once a step."""
        once = jax.tree.map(lambda _: GatherMode.ONCE, self.specs["ends"], is_leaf=is_spec)
        return Shards(self.specs["ends"], self, ("pipeline",), once)

    def of_stack(self, name: str, params: Tree) -> "Shards":
        """Returns the ways of a stack's parameters.

        Args:
          params: this device's arrays of the stack, or ShapeDtypeStructs of them.
        """
        specs = self.specs["layers"][name]
        params = jax.tree.map(self._whole, params, specs)
        gather_modes = jax.tree.map(
            lambda by_layer, streams: GatherMode.STREAMED if streams else GatherMode(by_layer),
            one_layer_at_a_time(params, self.memory),
            streamed(params, specs, self.mesh, self.memory),
        )
        return Shards(specs, self, (), gather_modes, has_slots=True)

    def _whole(self, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """Returns a stand-in for all shards of a parameter together: of its size, in one dim."""
        axes = [axis for axis in axes_of(spec) if axis in MANUAL_AXES]
        size = x.size * math.prod(self.mesh.shape[axis] for axis in axes)
        return jax.ShapeDtypeStruct((size,), x.dtype)


def check_specs(sharing: Sharing, *, shares_vocab: bool) -> None:
    """Refuses layouts for which a stage would compute with a part of a parameter.

    From `memory.zero_stage=1` on parameters may be split over `data`.

    Args:
      shares_ends: the stages share the ends, so these may be split over `pipeline`.

    Raises:
      ValueError: names the parameter.
    """
    specs, mesh = sharing.specs, sharing.mesh
    split = {axis for axis in ("data", "pipeline") if mesh.shape[axis] > 1}
    split -= {"data"} if sharing.memory.zero_stage else set()
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        name = ".".join(str(key.key) for key in path[1:])
        of_layers = path[0].key == "layers"
        first = axes_of(PartitionSpec(*spec[:1]))
        if of_layers and "pipeline" in split - first:
            raise ValueError(
                f"parameter {name} is laid out as {spec}: layers must be split over 'pipeline'; "
                "set rules.layers=pipeline"
            )
        if of_layers and "fsdp" in first and mesh.shape["fsdp"] > 1:
            raise ValueError(
                f"parameter {name} is laid out as {spec}: layers can be split over 'pipeline' "
                "alone; set rules.layers=pipeline, and split another dim over 'fsdp'"
            )
        rest = axes_of(PartitionSpec(*spec[1:])) | (first - {"pipeline"} if of_layers else first)
        rest -= {"pipeline"} if shares_vocab and not of_layers else set()
        for axis in sorted(split & rest):
            raise ValueError(
                f"parameter {name} is laid out as {spec}: nothing but layers can be split over "
                f"'pipeline', and nothing but the batch over 'data'; take {axis!r} out of the "
                "rule, and split over 'fsdp' or set memory.zero_stage instead"
            )


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def manual_specs(specs: Tree) -> Tree:
    """Returns the specs with the axes alone that are handled by hand."""

    def manual(spec: PartitionSpec) -> PartitionSpec:
        parts = (part if isinstance(part, tuple) else (part,) for part in spec)
        kept = (tuple(axis for axis in part if axis in MANUAL_AXES) or None for part in parts)
        return PartitionSpec(*kept)

    return jax.tree.map(manual, specs, is_leaf=is_spec)


class Shards:
    """How a group of parameters lies on the devices, and the ways from there and back.

    Args:
      specs: the PartitionSpec of each parameter at rest.
      sharing: of the run. With `zero_stage=1` sums over `data` are whole on every device before
        each takes its part.
      axes: over which gradients are summed, beside those of REPLICA_AXES.
      ways: a Way per parameter. Layers are without the leading dim of slots that `specs` name.
      has_slots: whether that dim is there.
    """

    def __init__(
        self,
        specs: Tree,
        sharing: Sharing,
        axes: tuple[str, ...],
        gather_modes: Tree,
        *,
        has_slots: bool = False,
    ):
        self._specs, self._mesh, self._axes = specs, sharing.mesh, axes
        self._gather_modes, self._has_slots = gather_modes, has_slots
        self._slices = sharing.memory.zero_stage == 1
        self._compute_dtype, self._reduce_dtype = sharing.compute_dtype, sharing.reduce_dtype

    def together(self, params: Tree) -> Tree:
        """Returns the parameters whole and on the device, but for those that go layer by layer."""

        def together(x, spec, mode):
            if mode == GatherMode.STREAMED or mode == GatherMode.BY_LAYER and not is_on_host(x):
                return x
            gathered = lambda x: x if mode else self._gathered(x, spec, 0)  # noqa: E731
            if not (is_on_host(x) and self._has_slots):
                return gathered(self._ready(x))
            # Slot by slot, as the device may have no room for all in the master's dtype.
            at = lambda i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)  # noqa: E731
            slots = jnp.arange(len(x), dtype=jnp.int32)
            return gathered(jax.lax.map(lambda i: self._ready(at(i)), slots))

        return counted_as("parameters", self._map(together, params))

    def layer(self, params: Tree) -> Tree:
        """Returns one layer's parameters whole, from what `together` gave of it."""

        def layer(x, spec, mode):
            return self._gathered(self._ready(x), spec, 1) if mode else x

        return self._map(layer, params)

    def _ready(self, x: jax.Array) -> jax.Array:
        """Returns a part of a parameter on the device, in the dtype that the model computes in."""
        x = to_device(x)
        return x if self._compute_dtype is None else x.astype(self._compute_dtype)

    def scattered(self, grads: Tree) -> Tree:
        """Returns one layer's gradients as `reduced` takes them; None stays None."""

        def scattered(grad, spec, mode):
            if grad is None or not mode or not self._dims(spec):
                return grad
            return self._scattered(self._to_send(grad), spec, 1).astype(grad.dtype)

        return self._map(scattered, grads)

    def reduced(self, grads: Tree) -> Tree:
        """Returns gradients summed over all that computed them, and split as parameters are.

        A gradient is not summed over axes that split its parameter otherwise than by replica.
        """

        def reduced(grad, spec, mode):
            over = {*self._axes, *REPLICA_AXES} - axes_of(spec)
            axes = [a for a in MANUAL_AXES if a in over and self._mesh.shape[a] > 1]
            if not axes and (mode or not self._dims(spec)):
                return grad
            narrow = self._to_send(grad)
            narrow = narrow if mode else self._scattered(narrow, spec, 0)
            return psum(narrow, tuple(axes)).astype(grad.dtype)

        return self._map(reduced, grads)

    def _to_send(self, grad: jax.Array) -> jax.Array:
        return grad if self._reduce_dtype is None else grad.astype(self._reduce_dtype)

    def _map(self, function: Callable, tree: Tree) -> Tree:
        return jax.tree.map(
            function, tree, self._specs, self._gather_modes, is_leaf=lambda x: x is None
        )

    def _gathered(self, x: jax.Array, spec: PartitionSpec, skip: int) -> jax.Array:
        def gathered(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims(spec):
                x = jax.lax.all_gather(x, axes, axis=dim - skip, tiled=True)
            return x

        return self._by_hand(gathered, x, spec, skip)

    def _scattered(self, grad: jax.Array, spec: PartitionSpec, skip: int) -> jax.Array:
        def scattered(grad: jax.Array) -> jax.Array:
            for dim, axes in self._dims(spec):
                sliced = tuple(axis for axis in axes if self._slices and axis == "data")
                rest = tuple(axis for axis in axes if axis not in sliced)
                if rest:
                    grad = jax.lax.psum_scatter(
                        grad, rest, scatter_dimension=dim - skip, tiled=True
                    )
                for axis in sliced:
                    size = grad.shape[dim - skip] // self._mesh.shape[axis]
                    grad, start = psum(grad, (axis,)), jax.lax.axis_index(axis) * size
                    grad = jax.lax.dynamic_slice_in_dim(grad, start, size, dim - skip)
            return grad

        return self._by_hand(scattered, grad, spec, skip)

    def _by_hand(
        self, function: Callable, x: jax.Array, spec: PartitionSpec, skip: int
    ) -> jax.Array:
        """Returns `function(x)` with the axes that split other dims manual as well.

        Else XLA would put x together over these before it gathers or scatters.
        """
        dims = {dim for dim, _ in self._dims(spec)}
        free = {a for a, n in self._mesh.shape.items() if n > 1 and a not in MANUAL_AXES}
        parts = [part if isinstance(part, tuple) else (part,) for part in spec]
        parts = [tuple(axis for axis in part if axis in free) or None for part in parts]
        if not dims:
            return x
        if not any(parts) or any(parts[dim] for dim in dims):
            return function(x)
        own = PartitionSpec(*parts[skip:])
        by_hand = jax.shard_map(
            function, in_specs=own, out_specs=own, axis_names=free, check_vma=False
        )
        return by_hand(x)

    def _dims(self, spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
        """Returns the dims that are split over replicas, each with the axes, major first."""
        found = []
        for dim, part in enumerate(spec):
            part = part if isinstance(part, tuple) else (part,)
            axes = tuple(a for a in part if a in REPLICA_AXES and self._mesh.shape[a] > 1)
            found += [(dim, axes)] if axes else []
        return found


def total(tree: Tree, mesh: AnyMesh, axes: tuple[str, ...]) -> Tree:
    """Returns `tree` summed over those of the axes that have more than one device."""
    return psum(tree, tuple(axis for axis in axes if mesh.shape[axis] > 1))


def on_shards(function: Callable, mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `function` run on every device with its shards of the manual axes."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # Axes of size 1 too: XLA then sees no partly manual mesh unless it has to.
        axis_names={axis for axis, size in mesh.shape.items() if size == 1 or axis in MANUAL_AXES},
        check_vma=False,
    )
