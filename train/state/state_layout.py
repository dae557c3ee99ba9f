"""Layout of the training state: shapes, shardings and memory kinds, in the step and in checkpoints.

The state has two forms. In the step, the arrays of a stack have one *slot* per layer and possibly
padding: `[slots, ...]`, split over the pipeline stages. In a checkpoint they are `[layers, ...]`,
which does not depend on the mesh. For example, 5 layers on 2 stages:

    layers   0 1 2 3 4
    slots    0 1 2 | 3 4 -      ("-" is padding, "|" the border between the stages)

This module converts the whole state between the two forms; initialize.py converts new parameters.
They are identical unless a stage has several chunks, or the stages are uneven.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from models.stack import logical_axes
from pipeline.stack_layout import StackLayout
from sharding.gather_modes import GatherMode, all_once, kept_axes, stack_gather_modes
from sharding.logical import Rules
from sharding.memory import HOST_KIND, MemoryConfig, in_device_memory, largest
from sharding.mesh import AnyMesh
from sharding.rules import partition_specs, split_first_dims
from sharding.spec import axes_by_dim, spec_of
from sharding.zero import spec_of_state, split_over_replicas
from train.optim.per_layer import map_state
from train.state.amax_history import HISTORY_SPEC
from train.state.initialize import StateInit, StateSpec
from train.state.train_state import MAY_LACK, TrainState, zeros_of

Tree = Any

ON_DEVICE = MemoryConfig()


class StateLayout:
    """The layout of a run's state in its two forms, and conversions between them.

    Args:
        layouts: stack -> its layout.
        memory: which state is split over `data` too, and which is in host memory.

    Attributes:
        abstract: state in the step, as ShapeDtypeStructs with shardings.
        portable: state in a checkpoint, also as ShapeDtypeStructs with shardings.
        param_specs: PartitionSpec of every parameter in the step.
        gather_modes: GatherMode per parameter.
        kept_axes: frozenset per parameter of the mesh axes over which it is not gathered.
        is_offloaded: bool per parameter, None for frozen ones: whether its master weights or its
            optimizer state are in host memory.

    Raises:
        ValueError: a parameter cannot be laid out on the mesh (see sharding/rules.py).
    """

    def __init__(
        self,
        state_spec: StateSpec,
        mesh: AnyMesh,
        rules: Rules,
        layouts: Mapping[str, StackLayout],
        memory: MemoryConfig = ON_DEVICE,
    ):
        self._spec = state_spec
        self._mesh = mesh
        self._layouts = layouts
        layers = jax.eval_shape(lambda: state_spec.state(state_spec.params()))
        self._param_types = layers.params
        layout_of_param = jax.tree_util.tree_map_with_path(
            lambda path, _: layouts.get(path[0].key, _PLAIN), layers.params
        )
        layout_of = self._per_leaf(
            layers, lambda _, layout: layout, lambda _: _PLAIN, layout_of_param
        )
        self._layout_of = _with_history(layout_of, lambda stack: layouts[stack])
        slots = jax.eval_shape(self._to_slots, layers)
        axes = logical_axes(state_spec.model)
        param_specs = partition_specs(slots.params, axes, rules, mesh)
        is_layers = jax.tree_util.tree_map_with_path(
            lambda path, _: path[0].key in layouts, slots.params
        )
        if memory.zero_stage:
            param_specs = split_over_replicas(param_specs, slots.params, is_layers, mesh)
        param_specs = split_first_dims(param_specs, slots.params, is_layers, mesh)
        self.param_specs = param_specs
        self.kept_axes = kept_axes(axes, rules)
        self.gather_modes = self._gather_modes(slots.params, param_specs, memory)
        kinds, is_offloaded = self._memory_kinds(slots, memory)
        self.is_offloaded = state_spec.trained(is_offloaded)
        specs = self._per_leaf(
            slots,
            lambda leaf, param, spec: spec_of_state(leaf.shape, param.shape, spec, mesh),
            lambda _: PartitionSpec(),
            slots.params,
            param_specs,
        )
        specs = _with_history(specs, lambda _: HISTORY_SPEC)
        portable = jax.tree.map(self._portable_spec, layers, specs, self._layout_of)
        self.abstract: TrainState = jax.tree.map(self._on_mesh, slots, specs, kinds)
        self.portable: TrainState = jax.tree.map(self._on_mesh, layers, portable, kinds)

    def initial(self, params: Tree | None = None) -> TrainState:
        """Create the initial state, each shard on its own device, bitwise equal on any mesh.

        Stacks in host memory pass through the device one layer at a time.

        Args:
            params: initial parameters, laid out as in `portable`; they are deleted. By default the
                model initializes them.
        """
        if params is None:
            return self.state_init.from_scratch()
        return self.state_init.from_params(params)

    @functools.cached_property
    def state_init(self) -> StateInit:
        """Create the initial state."""
        return StateInit(
            spec=self._spec,
            layouts=self._layouts,
            layout_of=self._layout_of,
            abstract=self.abstract,
            portable=self.portable,
        )

    def elements_of_layer(self) -> int:
        """Return how many elements a device keeps of a layer that is gathered by itself.

        If there are several stacks, this is the smallest number; 0 if no layer is gathered.
        """

        def elements(stack: str) -> int:
            leaves = jax.tree.leaves(self.abstract.params[stack])
            modes = jax.tree.leaves(self.gather_modes[stack])
            by_layer = [leaf for leaf, m in zip(leaves, modes, strict=True) if m != GatherMode.ONCE]
            return sum(math.prod(x.sharding.shard_shape(x.shape)[1:]) for x in by_layer)

        return min(filter(None, map(elements, self._layouts)), default=0)

    def to_portable(self, state: TrainState) -> TrainState:
        """Convert a state to the form of a checkpoint.

        Arrays that had to be converted are in host memory; the others are not copied.
        """

        def convert(leaf, layout, target):
            if layout.is_plain:
                return leaf
            leaf = jax.device_put(leaf, in_device_memory(leaf.sharding))
            layers = _converter(layout.to_layers, in_device_memory(target.sharding))(leaf)
            return jax.device_put(layers, target.sharding.with_memory_kind(HOST_KIND))

        return jax.tree.map(convert, state, self._layout_of, self.portable)

    def layers_of(self, params: Tree) -> Tree:
        """Return parameters of the step in the form of a checkpoint; for compiled functions."""
        return jax.tree.map(
            lambda leaf, layout: layout.to_layers(leaf), params, self._layout_of.params
        )

    def from_portable(self, state: TrainState) -> TrainState:
        """Convert a state of a checkpoint to the form of the step.

        Arrays that have to be converted are deleted. Fields of `MAY_LACK` that are None become
        zeros.
        """
        lacking = {name: getattr(self.portable, name) for name in MAY_LACK}
        lacking = {name: part for name, part in lacking.items() if getattr(state, name) is None}
        state = dataclasses.replace(state, **jax.tree.map(zeros_of, lacking))

        def convert(leaf, layout, here, target):
            if layout.is_plain:
                return leaf
            layers = jax.device_put(leaf, in_device_memory(here.sharding))
            slots = _converter(layout.to_slots, in_device_memory(target.sharding))(layers)
            leaf.delete()
            return jax.device_put(slots, target.sharding)

        return jax.tree.map(convert, state, self._layout_of, self.portable, self.abstract)

    def _to_slots(self, layers: TrainState) -> TrainState:
        return jax.tree.map(lambda x, layout: layout.to_slots(x), layers, self._layout_of)

    def _per_leaf(
        self, state: TrainState, of_param: Callable, of_other: Callable, *like_params: Tree
    ) -> TrainState:
        """Map a function over the state, with one value per parameter.

        `of_param(leaf, *values)` is called for parameters and for leaves of the optimizer state
        that belong to a parameter, such as its moments. The values are taken from the trees
        `like_params`, at that parameter. `of_other(leaf)` is called for all other leaves.
        """
        return TrainState(
            step=of_other(state.step),
            num_skipped=of_other(state.num_skipped),
            num_nonfinite_in_a_row=of_other(state.num_nonfinite_in_a_row),
            params=jax.tree.map(of_param, state.params, *like_params),
            opt_state=map_state(
                of_param,
                state.opt_state,
                self._spec.trained(self._param_types),
                *map(self._spec.trained, like_params),
                of_other=of_other,
            ),
            spikes=jax.tree.map(of_other, state.spikes),
            loss_scale=jax.tree.map(of_other, state.loss_scale),
            amax_history=jax.tree.map(of_other, state.amax_history),
        )

    def _portable_spec(self, leaf, spec: PartitionSpec, layout) -> PartitionSpec:
        """Return the spec of an array in a checkpoint: `pipeline` splits another dim than layers.

        Then all layers of a slice are on one device, and can be permuted there.
        """
        if layout.is_plain:
            return spec
        parts = list(axes_by_dim(spec, len(leaf.shape)))
        layer_axes = parts[0]
        parts[0] = ()
        for dim in range(1, len(parts)):
            axes = (*parts[dim], *layer_axes)
            if leaf.shape[dim] % math.prod(self._mesh.shape[axis] for axis in axes) == 0:
                parts[dim] = axes
                break
        return spec_of(parts)

    def _gather_modes(self, params: Tree, specs: Tree, memory: MemoryConfig) -> Tree:
        """Choose when each parameter is gathered; only stacks are gathered by layer."""
        modes = {
            name: stack_gather_modes(params[name], specs[name], self._mesh, memory)
            if name in self._layouts
            else all_once(specs[name])
            for name in params
        }
        streams = GatherMode.STREAMED in jax.tree.leaves(modes)
        if memory.offload_parameters_fraction and not streams:
            sizes = " × ".join(f"mesh.{axis}={self._mesh.shape[axis]}" for axis in ("data", "fsdp"))
            raise ValueError(
                f"memory.offload_parameters_fraction={memory.offload_parameters_fraction}: on "
                f"{sizes} no parameter of a stack can be read from the host one layer at a time, "
                "because all are replicated; set memory.zero_stage to 1, 2 or 3"
            )
        return modes

    def _memory_kinds(self, slots: TrainState, memory: MemoryConfig) -> tuple[TrainState, Tree]:
        """Return the memory kind of every leaf ("": the device's default), and `is_offloaded`."""
        leaves, structure = jax.tree.flatten(slots.params)
        are_large = largest(leaves, memory.optimizer_fraction)
        are_cut = (bool(leaf.shape) for leaf in leaves)  # scalars stay: they have no slices
        offloaded = structure.unflatten(a and b for a, b in zip(are_large, are_cut, strict=True))
        is_offloaded = jax.tree.map(
            lambda is_large, mode: is_large or mode is GatherMode.STREAMED,
            offloaded,
            self.gather_modes,
        )

        def kind(on_host):
            return HOST_KIND if on_host else ""

        kinds = self._per_leaf(slots, lambda _, on_host: kind(on_host), lambda _: "", offloaded)
        return dataclasses.replace(kinds, params=jax.tree.map(kind, is_offloaded)), is_offloaded

    def _on_mesh(self, leaf, spec: PartitionSpec, kind: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._mesh, spec, memory_kind=kind or None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _with_history(tree: TrainState, of_stack: Callable[[str], Any]) -> TrainState:
    """Return a tree like the state, with a value per stack for the history of largest values."""
    if tree.amax_history is None:
        return tree
    return dataclasses.replace(tree, amax_history={s: of_stack(s) for s in tree.amax_history})


@functools.cache
def _converter(convert: Callable, sharding: NamedSharding) -> Callable:
    """Return the jitted conversion of an array; cached, so that equal arrays share it."""
    return jax.jit(convert, out_shardings=sharding)


_PLAIN = StackLayout(num_layers=1, chunks=(((0, 1),),))
