"""The optimizer update, for all parameters at once or one layer at a time from host memory.

State on the device is updated in one go. State in host memory is updated in slices, so that the
device never holds more than one of them:

    for each slot of a stack (or for some rows of another parameter):
        copy master weights and moments to the device
        divide and clip the gradients, apply the optimizer, round
        copy them back, in place

Clipping needs the gradient norm first, so a separate pass computes it. Slicing requires an
optimizer that updates layers separately, and other parameters element by element.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from pipeline.stack_layout import StackLayout
from sharding.memory import is_on_host, to_device, to_where
from sharding.mesh import AnyMesh
from sharding.spec import axes_of
from train.optim.per_layer import map_state
from train.precision import rounded_at_random
from train.state.state_layout import StateLayout
from train.state.train_state import merge

Tree = Any

#: Largest number of elements of a slice of a non-stack parameter.
_SLICE_SIZE = 2**22


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Scalars that are known about a step's gradients before the update."""

    step: jax.Array  # int32, `step` of the state before the update
    weight: jax.Array  # sum of weights, by which the gradients are divided
    norm: jax.Array  # global norm of the divided gradients
    accepted: jax.Array  # bool; if False, the update changes nothing


@dataclasses.dataclass(frozen=True)
class _Group:
    """Parameters in host memory that are updated together, in slices of their first dimension."""

    chosen: Tree  # a bool per parameter: whether it is in the group
    num_slices: int  # per stage
    rows: int  # per slice
    num_stages: int  # pipeline stages over which the first dimension is split


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """Computes new parameters and a new optimizer state from gradients.

    State in host memory is updated in slices: one slot of a stack at a time, and some rows of a
    non-stack parameter at a time. Frozen parameters are not touched.

    Attributes:
        optimizer: without clipping. It must be one of SLICED if any state is in host memory.
        clip_norm: largest global gradient norm; 0: no clipping.
        layouts: stack -> its layout.
        seed: for stochastic rounding.
    """

    optimizer: optax.GradientTransformation
    clip_norm: float
    state_layout: StateLayout
    layouts: Mapping[str, StackLayout]
    mesh: AnyMesh
    seed: int

    def norm(self, grads: Tree, weight: jax.Array) -> jax.Array:
        """Return the global norm of the gradients of trained parameters, divided by `weight`.

        Args:
            grads: sums of gradients, on the device or in host memory.
            weight: sum of weights.
        """
        is_trained = jax.tree.map(lambda _: True, self.state_layout.is_offloaded)  # frozen: None
        grads = _chosen(grads, is_trained)

        def sum_of_squares(grads: Tree) -> jax.Array:
            return optax.tree.norm(jax.tree.map(lambda g: g / weight, grads), squared=True)

        def add(total, grads, *_):
            return total + sum_of_squares(grads), ()

        dtype = jnp.result_type(*jax.tree.leaves(grads))
        on_host = jax.tree.map(is_on_host, grads)
        on_device = jax.tree.map(lambda there: not there, on_host)
        total = jnp.asarray(sum_of_squares(_chosen(grads, on_device)), dtype)
        for group in self.groups:
            group_grads = _chosen(_chosen(grads, group.chosen), on_host)
            if jax.tree.leaves(group_grads):
                zero = jnp.zeros((), dtype)
                total += self._in_slices(group, add, zero, group_grads, (), ())[0]
        return jnp.sqrt(total)

    def __call__(
        self, params: Tree, opt_state: Tree, grads: Tree, outcome: StepOutcome
    ) -> tuple[Tree, Tree]:
        """Return (params, opt_state) after the update, each array in the memory where it was.

        Args:
            params: master weights.
            opt_state: optimizer state.
            grads: sums of gradients.
            outcome: scalars of this step.
        """
        stays_on_device = jax.tree.map(lambda leaf: not leaf, self.state_layout.is_offloaded)
        new_params, new_state = self._updated(
            _chosen(grads, stays_on_device),
            self._chosen_state(opt_state, stays_on_device),
            _chosen(params, stays_on_device),
            _chosen(self._row_ids(), stays_on_device),
            outcome,
        )
        for group in self.groups:
            group_params, group_state = self._update_offloaded(
                group, params, opt_state, grads, outcome
            )
            new_params = merge(new_params, group_params)
            new_state = merge(new_state, group_state)
        return merge(new_params, params), new_state

    def _update_offloaded(
        self, group: _Group, params: Tree, opt_state: Tree, grads: Tree, outcome: StepOutcome
    ) -> tuple[Tree, Tree]:
        """Return (params, opt_state) of a group after its update, with None for other leaves."""
        chosen = group.chosen
        is_of_param = jax.tree.leaves(
            map_state(
                lambda _, is_chosen: is_chosen or None,
                opt_state,
                chosen,
                chosen,
                of_other=lambda _: False,
            )
        )
        params = _chosen(params, chosen)
        grads = _chosen(grads, chosen)
        row_ids = _chosen(self._row_ids(), chosen)
        # Leaves such as step counts belong to no parameter and are shared. Every slice starts with
        # the old value; the new value comes from the update of the state on the device.
        opt_state = self._chosen_state(opt_state, chosen)
        structure = jax.tree.structure(opt_state)

        def leaves_of(state: Tree, *, shared: bool) -> list:
            pairs = zip(jax.tree.leaves(state), is_of_param, strict=True)
            return [leaf for leaf, of_param in pairs if of_param != shared]

        def whole_state(param_leaves: list, shared: list) -> Tree:
            own_leaves = iter(param_leaves)
            shared_leaves = iter(shared)
            return structure.unflatten(
                [next(own_leaves if of_param else shared_leaves) for of_param in is_of_param]
            )

        def update(carry, arrays, old, constants):
            (grads, row_ids) = arrays
            (params, param_leaves) = old
            (shared, outcome) = constants
            params, state = self._updated(
                grads, whole_state(param_leaves, shared), params, row_ids, outcome
            )
            return carry, (params, leaves_of(state, shared=False))

        param_leaves = leaves_of(opt_state, shared=False)
        shared = leaves_of(opt_state, shared=True)
        _, (params, param_leaves) = self._in_slices(
            group, update, (), (grads, row_ids), (params, param_leaves), (shared, outcome)
        )
        return params, whole_state(param_leaves, shared)

    def _updated(
        self, grads: Tree, opt_state: Tree, params: Tree, row_ids: Tree, outcome: StepOutcome
    ) -> tuple[Tree, Tree]:
        """Apply the optimizer to arrays on the device; return (params, opt_state).

        Args:
            grads: sums of gradients.
            opt_state: optimizer state.
            params: master weights.
            row_ids: as for `rounded_at_random`.
            outcome: scalars of this step.
        """

        def divide_and_clip(g):
            g = g / outcome.weight
            if not self.clip_norm:
                return g
            is_small = outcome.norm < self.clip_norm
            return jax.lax.select(is_small, g, g / outcome.norm.astype(g.dtype) * self.clip_norm)

        grads = jax.tree.map(divide_and_clip, grads)
        wide = jax.tree.map(lambda p, g: p.astype(g.dtype), params, grads)
        optimizer = optax.with_extra_args_support(self.optimizer)
        layout = self.state_layout.abstract.params
        updates, new_state = optimizer.update(
            grads, opt_state, wide, row_ids=row_ids, param_layout=layout
        )
        new_params = rounded_at_random(
            optax.apply_updates(wide, updates), params, row_ids, self.seed, outcome.step
        )

        def kept(new, old):
            return jax.tree.map(lambda a, b: jnp.where(outcome.accepted, a, b), new, old)

        return kept(new_params, params), kept(new_state, opt_state)

    def _in_slices(
        self,
        group: _Group,
        body: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]],
        carry: Tree,
        arrays: Tree,
        changing: Tree,
        constants: Tree,
    ) -> tuple[Tree, Tree]:
        """Scan over the slices of a group; return the final (carry, changing).

        Args:
            group: group, which defines the slices.
            body: (carry, slices of arrays, slices of changing, constants) -> (carry, new slices of
                changing). It gets slices on the device.
            carry: scalars, which are summed over the stages at the end.
            arrays: arrays to read, in any memory.
            changing: arrays to update in place, in any memory.
            constants: values that all slices get unchanged.
        """

        def on_stage(carry, arrays, changing, constants):
            def step(state, i):
                carry, changing = state
                start = i * group.rows

                def at(x):
                    return to_device(jax.lax.dynamic_slice_in_dim(x, start, group.rows))

                # All slices must be read before any is written. Otherwise XLA copies the whole
                # arrays instead of updating them in place.
                old = jax.lax.optimization_barrier(jax.tree.map(at, changing))
                carry, new = body(carry, jax.tree.map(at, arrays), old, constants)

                def put(x, value):
                    return jax.lax.dynamic_update_slice_in_dim(x, to_where(value, x), start, 0)

                return (carry, jax.tree.map(put, changing, new)), None

            slices = jnp.arange(group.num_slices, dtype=jnp.int32)
            (carry, changing), _ = jax.lax.scan(step, (carry, changing), slices)
            if group.num_stages > 1:
                carry = jax.lax.psum(carry, "pipeline")
            return carry, changing

        if group.num_stages == 1:
            return on_stage(carry, arrays, changing, constants)
        once = PartitionSpec()
        by_stage = PartitionSpec("pipeline")
        run = jax.shard_map(
            on_stage,
            mesh=self.mesh,
            in_specs=(once, by_stage, by_stage, once),
            out_specs=(once, by_stage),
            axis_names={"pipeline"},
            check_vma=False,
        )
        return run(carry, arrays, changing, constants)

    @cached_property
    def groups(self) -> list[_Group]:
        """The parameters in host memory: those of a stack form one group, any other its own."""
        is_offloaded = self.state_layout.is_offloaded
        leaves = dict(jax.tree_util.tree_leaves_with_path(self.state_layout.abstract.params))
        paths = [path for path, leaf in jax.tree_util.tree_leaves_with_path(is_offloaded) if leaf]

        def marked(chosen: Collection[tuple]) -> Tree:
            return jax.tree_util.tree_map_with_path(lambda path, _: path in chosen, is_offloaded)

        groups = []
        num_stages = self.mesh.shape["pipeline"]
        for stack in dict.fromkeys(path[0].key for path in paths if path[0].key in self.layouts):
            stack_paths = [path for path in paths if path[0].key == stack]
            num_slots = len(self.layouts[stack].layer_of_slot) // num_stages
            groups.append(_Group(marked(stack_paths), num_slots, 1, num_stages))
        for path in paths:
            if path[0].key not in self.layouts:
                num_slices, rows = _slices(leaves[path])
                groups.append(_Group(marked([path]), num_slices, rows, 1))
        return groups

    def _row_ids(self) -> Tree:
        """Return the layer numbers of a stack's slots, and the row numbers of other parameters."""

        # Made within the step, so that the memory estimate can refuse a huge table before.
        def number(path: tuple, param: jax.ShapeDtypeStruct) -> np.ndarray | jax.Array:
            if path[0].key in self.layouts:
                return np.asarray(self.layouts[path[0].key].layer_of_slot, np.int32)
            return jnp.arange(math.prod(param.shape[:1]), dtype=jnp.int32)

        return jax.tree_util.tree_map_with_path(number, self.state_layout.abstract.params)

    def _chosen_state(self, opt_state: Tree, chosen: Tree) -> Tree:
        return map_state(lambda leaf, c: leaf if c else None, opt_state, chosen, chosen)


def _slices(param: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Return (number of slices, rows per slice) for a non-stack parameter.

    A sharded first dimension is not cut: each device has only a part of its rows anyway.
    """
    spec = param.sharding.spec
    axes = axes_of(spec[:1])
    num_rows = param.shape[0]
    if any(param.sharding.mesh.shape[axis] > 1 for axis in axes):
        return 1, num_rows
    local = param.sharding.shard_shape(param.shape)
    max_rows = min(num_rows, max(1, _SLICE_SIZE // math.prod(local[1:])))
    rows = max(n for n in range(1, max_rows + 1) if num_rows % n == 0)
    # If the number of rows has no suitable divisor, e.g. a prime, many tiny slices would cost more
    # than they save.
    return (num_rows // rows, rows) if 4 * rows >= max_rows else (1, num_rows)


def _chosen(tree: Tree, chosen: Tree) -> Tree:
    """Return `tree` with None for leaves that are not chosen (False or None)."""
    return jax.tree.map(
        lambda leaf, c: leaf if c else None, tree, chosen, is_leaf=lambda leaf: leaf is None
    )
