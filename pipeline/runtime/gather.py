"""Gathers sharded parameters for use in a step, and reduces gradients back to their shards.

Inside the step, all axes except `model` are manual, so these collectives are explicit. Parameters
that fsdp or ZeRO split are all-gathered before use, either once per step or one layer at a time.
Gradients are summed over all manual axes except `pipeline` once after all microbatches, or layer by
layer. Experts are not gathered over the axes that divide them (`kept_axes`): tokens go to them.
sharding/gather_modes.py has the table of these modes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pipeline.runtime.trees import is_none
from sharding.collectives import psum
from sharding.gather_modes import GatherMode
from sharding.labels import counted_as
from sharding.memory import is_on_host, to_device
from sharding.mesh import REPLICA_AXES, SHARD_AXES, AnyMesh
from sharding.spec import axes_by_dim, axes_of, is_spec, restrict, spec_of, without
from sharding.zero import ZERO_AXES

#: Mesh axes whose collectives are explicit; `shard_map` is manual over them.
MANUAL_AXES = ("pipeline", *REPLICA_AXES)

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSharding:
    """How a run's parameters are sharded, and the dtypes of gathers and reductions."""

    mesh: AnyMesh  # all axes are Auto
    # {"non_stack": ..., "stacks": {stack: ...}}: the PartitionSpec of every parameter. Leaves of
    # `layers` have a leading slot dim, split over `pipeline`.
    specs: dict[str, Tree]
    gather_modes: dict[str, Tree]  # the same trees, with the GatherMode of every parameter
    # The same trees, with the frozenset of axes over which a parameter is never gathered.
    kept_axes: dict[str, Tree]
    zero_stage: int = 0  # `memory.zero_stage`; with 1, gradients are all-reduced, then cut
    compute_dtype: str | None = None  # dtype of parameters in the model; None = unchanged
    reduce_dtype: str | None = None  # dtype of gradient reductions over devices; None = unchanged

    def non_stack_gatherer(self) -> "ParamGatherer":
        """Return the gatherer of the parameters that are in no stack."""
        specs = self.specs["non_stack"]
        modes = self.gather_modes["non_stack"]
        return ParamGatherer(specs, self, ("pipeline",), modes, self.kept_axes["non_stack"])

    def stack_gatherer(self, name: str) -> "ParamGatherer":
        """Return the gatherer of the parameters of the stack of this name."""
        modes = self.gather_modes["stacks"][name]
        kept_axes = self.kept_axes["stacks"][name]
        specs = self.specs["stacks"][name]
        return ParamGatherer(specs, self, (), modes, kept_axes, has_slots=True)


def check_specs(param_sharding: ParamSharding, *, shares_vocab: bool) -> None:
    """Check that no stage would compute with only a part of a parameter.

    Parameters may be split over `data` only if `memory.zero_stage` is at least 1.

    Args:
        param_sharding: parameters' specs, mesh and ZeRO stage.
        shares_vocab: whether the stages share embedding and head, so that non-stack parameters may
            be split over `pipeline`.

    Raises:
        ValueError: names the parameter and its spec.
    """
    specs = param_sharding.specs
    mesh = param_sharding.mesh
    split = {axis for axis in ("data", "pipeline") if mesh.shape[axis] > 1}
    split -= {"data"} if param_sharding.zero_stage else set()
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    kept_axes = jax.tree.leaves(param_sharding.kept_axes)
    for (path, spec), kept in zip(leaves, kept_axes, strict=True):
        name = ".".join(str(key.key) for key in path[1:])
        is_stack = path[0].key == "stacks"
        first = axes_of(spec[:1])
        if is_stack and "pipeline" in split - first:
            raise ValueError(
                f"parameter {name} has the spec {spec}, but layers must be split over 'pipeline'; "
                "set rules.layers=pipeline"
            )
        sharded = sorted(axis for axis in first & {*SHARD_AXES} if mesh.shape[axis] > 1)
        if is_stack and sharded:
            raise ValueError(
                f"parameter {name} has the spec {spec}, but layers can be split only over "
                f"'pipeline'; set rules.layers=pipeline, and split another dim over {sharded[0]!r}"
            )
        other_axes = axes_of(spec[1:]) | (first - {"pipeline"} if is_stack else first)
        other_axes -= {"pipeline"} if shares_vocab and not is_stack else set()
        for axis in sorted(split & (other_axes - kept)):
            raise ValueError(
                f"parameter {name} has the spec {spec}, but only layers can be split over "
                f"'pipeline', and only the batch over 'data'; remove {axis!r} from the rule, and "
                "split over 'fsdp' or set memory.zero_stage instead"
            )


def manual_specs(specs: Tree) -> Tree:
    """Return the specs restricted to the manual axes."""
    return jax.tree.map(lambda spec: restrict(spec, MANUAL_AXES), specs, is_leaf=is_spec)


class ParamGatherer:
    """Gathers a group of sharded parameters, and reduces their gradients back to shards.

    Args:
        specs: PartitionSpec of each parameter as stored.
        param_sharding: run's mesh, ZeRO stage and dtypes. With `zero_stage=1` gradients are
            all-reduced over `data` before each replica takes its part; otherwise they are
            reduce-scattered.
        axes: axes over which gradients are summed in addition to REPLICA_AXES.
        gather_modes: GatherMode per parameter.
        kept_axes: axes per parameter over which it is not gathered.
        has_slots: whether parameters have a leading slot dim. `gather_layer` and `scattered` take
            arrays without this dim, although `specs` always include it.
    """

    def __init__(
        self,
        specs: Tree,
        param_sharding: ParamSharding,
        axes: tuple[str, ...],
        gather_modes: Tree,
        kept_axes: Tree,
        *,
        has_slots: bool = False,
    ):
        # Without the axes over which a parameter is not gathered.
        self._specs = jax.tree.map(
            lambda spec, kept: spec_of(without(axes_by_dim(spec), kept)),
            specs,
            kept_axes,
            is_leaf=is_spec,
        )
        self._kept_axes = kept_axes
        self._mesh = param_sharding.mesh
        self._axes = axes
        self._gather_modes = gather_modes
        self._has_slots = has_slots
        self._slices = param_sharding.zero_stage == 1
        self._compute_dtype = param_sharding.compute_dtype
        self._reduce_dtype = param_sharding.reduce_dtype

    def gather_once(self, params: Tree) -> Tree:
        """Return the parameters on the device, gathered if their mode is ONCE.

        Parameters with mode BY_LAYER stay sharded, and STREAMED ones stay in host memory as well:
        `gather_layer` gathers them.
        """

        def gather_once(x, spec, mode):
            if mode is GatherMode.STREAMED:
                return x
            if mode is GatherMode.BY_LAYER and not is_on_host(x):
                return self._in_blocks(x, spec)

            def gathered(x):
                x = self._in_blocks(x, spec)
                return self._gathered(x, spec, 0) if mode is GatherMode.ONCE else x

            if not (is_on_host(x) and self._has_slots):
                return gathered(self._ready(x))

            # Cast slot by slot: the device may have no room for all slots in the master dtype.
            def at(i):
                return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

            slots = jnp.arange(len(x), dtype=jnp.int32)
            return gathered(jax.lax.map(lambda i: self._ready(at(i)), slots))

        return counted_as("parameters", self._map(gather_once, params))

    def gather_layer(self, params: Tree) -> Tree:
        """Return one layer's parameters, gathered.

        Args:
            params: one slot of the result of `gather_once`.
        """

        def gather_layer(x, spec, mode):
            return x if mode is GatherMode.ONCE else self._gathered(self._ready(x), spec, 1)

        return self._map(gather_layer, params)

    def _ready(self, x: jax.Array) -> jax.Array:
        """Return an array on the device, in the dtype in which the model computes."""
        x = to_device(x)
        return x if self._compute_dtype is None else x.astype(self._compute_dtype)

    def scattered(self, grads: Tree) -> Tree:
        """Reduce-scatter one layer's gradients whose parameters are gathered by layer.

        The result is what `reduced` and the gradient buffers expect. None stays None.
        """

        def scattered(grad, spec, mode):
            if grad is None or mode is GatherMode.ONCE or not self._dims(spec):
                return grad
            return self._scattered(self._to_send(grad), spec, 1).astype(grad.dtype)

        return self._map(scattered, grads)

    def reduced(self, grads: Tree) -> Tree:
        """Sum gradients over all devices that contributed, and split them like their parameters.

        A gradient is not summed over an axis that splits its parameter: over replica axes
        `_scattered` has summed it, and over other axes, such as `pipeline` with a shared
        vocabulary or `expert` with experts, each device has its own part. None stays None.
        """

        def reduced(grad, spec, mode, kept):
            if grad is None:
                return None
            is_by_layer = mode is not GatherMode.ONCE
            over = {*self._axes, *REPLICA_AXES} - axes_of(spec) - kept
            axes = [a for a in MANUAL_AXES if a in over and self._mesh.shape[a] > 1]
            if not axes and (is_by_layer or not self._dims(spec)):
                return self._out_of_blocks(grad, spec)
            narrow = self._to_send(grad)
            # Gradients by layer have been scattered already, in `scattered`.
            narrow = narrow if is_by_layer else self._scattered(narrow, spec, 0)
            narrow = psum(narrow, tuple(axes)).astype(grad.dtype)
            return self._out_of_blocks(narrow, spec)

        return self._map(reduced, grads, self._kept_axes)

    def _to_send(self, grad: jax.Array) -> jax.Array:
        return grad if self._reduce_dtype is None else grad.astype(self._reduce_dtype)

    def _map(self, function: Callable, tree: Tree, *others: Tree) -> Tree:
        return jax.tree.map(
            function, tree, self._specs, self._gather_modes, *others, is_leaf=is_none
        )

    def _gathered(self, x: jax.Array, spec: PartitionSpec, skip: int) -> jax.Array:
        def gathered(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims(spec):
                x = jax.lax.all_gather(x, axes, axis=dim - skip, tiled=True)
            return x

        return self._with_all_axes_manual(gathered, x, spec, skip)

    def _scattered(self, grad: jax.Array, spec: PartitionSpec, skip: int) -> jax.Array:
        def scattered(grad: jax.Array) -> jax.Array:
            for dim, axes in self._dims(spec):
                # ZeRO 1 all-reduces over these axes and slices; all else is a reduce-scatter.
                sliced = tuple(a for a in axes if self._slices and a in ZERO_AXES)
                scatter_axes = tuple(axis for axis in axes if axis not in sliced)
                if scatter_axes:
                    grad = jax.lax.psum_scatter(
                        grad, scatter_axes, scatter_dimension=dim - skip, tiled=True
                    )
                for axis in sliced:
                    size = grad.shape[dim - skip] // self._mesh.shape[axis]
                    grad = psum(grad, (axis,))
                    start = jax.lax.axis_index(axis) * size
                    grad = jax.lax.dynamic_slice_in_dim(grad, start, size, dim - skip)
            return grad

        return self._with_all_axes_manual(scattered, grad, spec, skip)

    def _with_all_axes_manual(
        self, function: Callable, x: jax.Array, spec: PartitionSpec, skip: int
    ) -> jax.Array:
        """Run `function(x)` with the automatic axes that split x manual as well.

        Otherwise XLA would gather x over these axes before it gathers or scatters.

        Args:
            function: collective over the replica axes.
            x: array.
            spec: PartitionSpec of the parameter, with the slot dim.
            skip: number of leading dims of `spec` that x does not have.
        """
        free = self._free_axes()
        parts = axes_by_dim(restrict(spec, free))
        if not self._dims(spec):
            return x
        if not any(parts):
            return function(x)
        free_spec = spec_of(parts[skip:])
        manual = jax.shard_map(
            function, in_specs=free_spec, out_specs=free_spec, axis_names=free, check_vma=False
        )
        return manual(x)

    def _free_axes(self) -> set[str]:
        return {a for a, n in self._mesh.shape.items() if n > 1 and a not in MANUAL_AXES}

    def _in_blocks(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Exchange the parts of dims that both manual and automatic axes split.

        A dim that is split over M devices of manual axes and over A of automatic axes has M · A
        parts, of which the devices (m, a) have part m · A + a, as everywhere in the step. To gather
        over the manual axes, the devices with the same `a` need parts that are neighbours: they get
        part a · M + m. This is done once per step, outside all loops.

        Args:
            x: array with all dims of the spec.
            spec: PartitionSpec of the parameter.
        """
        return self._exchanged(x, spec, undo=False)

    def _out_of_blocks(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Undo `_in_blocks`."""
        return self._exchanged(x, spec, undo=True)

    def _exchanged(self, x: jax.Array, spec: PartitionSpec, *, undo: bool) -> jax.Array:
        automatic = axes_by_dim(restrict(spec, self._free_axes()))
        for dim, manual in self._dims(spec):
            if not automatic[dim]:
                continue
            axes = (*manual, *automatic[dim])
            num_m, num_a = (
                math.prod(self._mesh.shape[axis] for axis in part)
                for part in (manual, automatic[dim])
            )
            # Device m · A + a gets the part that device a · M + m has.
            pairs = [(a * num_m + m, m * num_a + a) for m in range(num_m) for a in range(num_a)]
            if undo:
                pairs = [(device, source) for source, device in pairs]
            x = self._with_all_axes_manual(
                functools.partial(jax.lax.ppermute, axis_name=axes, perm=pairs), x, spec, 0
            )
        return x

    def _dims(self, spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
        """Return the dims that are split over replicas, each with its axes, major first."""
        split_dims = []
        for dim, part in enumerate(axes_by_dim(spec)):
            axes = tuple(a for a in part if a in REPLICA_AXES and self._mesh.shape[a] > 1)
            split_dims += [(dim, axes)] if axes else []
        return split_dims


def total(tree: Tree, mesh: AnyMesh, axes: tuple[str, ...]) -> Tree:
    """Return `tree` summed over the given axes that have more than one device."""
    return psum(tree, tuple(axis for axis in axes if mesh.shape[axis] > 1))


def on_shards(function: Callable, mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable:
    """Return `function`, run on every device with its shards over the manual axes."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # Axes of size 1 are manual too, so that XLA sees a partly manual mesh only if necessary.
        axis_names={axis for axis, size in mesh.shape.items() if size == 1 or axis in MANUAL_AXES},
        check_vma=False,
    )
