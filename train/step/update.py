"""The optimizer's update: of all parameters at once, or one layer at a time from host memory."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from sharding.memory import is_on_host, to_device, to_where
from sharding.mesh import AnyMesh
from sharding.pipeline.layout import Layout
from sharding.rules import axes_of
from train.precision import rounded_at_random
from train.state.layout import StateLayout
from train.state.train_state import merged

Tree = Any

#: Elements of a parameter outside the stacks that are on the device at once.
_SLICE_SIZE = 2**22


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step knows of its gradients before the update: scalars."""

    step: jax.Array  # int32, of the state before it
    weight: jax.Array  # that the gradients are divided by
    norm: jax.Array  # of all of them together, once divided
    accepted: jax.Array  # bool; False changes nothing


@dataclasses.dataclass(frozen=True)
class _Group:
    """Parameters that are updated together, some rows of their first dim after others."""

    chosen: Tree  # a bool per parameter
    num_slices: int  # on each stage
    rows: int  # of a slice
    num_stages: int  # that the first dim is split over


class Update:
    """The way from gradients to new parameters and a new optimizer state.

    What lies in host memory is updated one slot of its stack after another, and outside the stacks
    a few rows of one array after others, so that the device never holds more of it. What is frozen
    has no part in any of it, and stays where and as it is.

    Args:
      optimizer: clips nothing; elementwise, if `moved` marks anything.
      clip_norm: the largest norm of all gradients together; 0: any.
      state: of the run.
      layouts: of every stack.
      seed: of rounding at random.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        clip_norm: float,
        state: StateLayout,
        layouts: Mapping[str, Layout],
        mesh: AnyMesh,
        seed: int,
    ):
        self._optimizer = optax.with_extra_args_support(optimizer)
        self._clip_norm, self._seed = clip_norm, seed
        self._layouts, self._mesh = layouts, mesh
        params, moved = state.abstract.params, state.moved
        self._trained = jax.tree.map(lambda _: True, moved)
        self._stays = jax.tree.map(lambda moved: not moved, moved)
        self._groups = self._grouped(params, moved)
        self._numbers = jax.tree_util.tree_map_with_path(self._number, params)

    def norm(self, grads: Tree, weight: jax.Array) -> jax.Array:
        """Returns the norm of all gradients of what is trained, each divided by `weight`."""
        grads = _chosen(grads, self._trained)

        def sum_of_squares(grads: Tree) -> jax.Array:
            return optax.tree.norm(jax.tree.map(lambda g: g / weight, grads), squared=True)

        def add(total, grads, *_):
            return total + sum_of_squares(grads), ()

        dtype = jnp.result_type(*jax.tree.leaves(grads))
        on_host = jax.tree.map(is_on_host, grads)
        on_device = jax.tree.map(lambda there: not there, on_host)
        total = jnp.asarray(sum_of_squares(_chosen(grads, on_device)), dtype)
        for group in self._groups:
            of_group = _chosen(_chosen(grads, group.chosen), on_host)
            if jax.tree.leaves(of_group):
                zero = jnp.zeros((), dtype)
                total += self._in_slices(group, add, zero, of_group, (), ())[0]
        return jnp.sqrt(total)

    def __call__(
        self, params: Tree, opt_state: Tree, grads: Tree, outcome: StepOutcome
    ) -> tuple[Tree, Tree]:
        """Returns (params, opt_state) after the update, each where it was."""
        stays = self._stays
        new_params, new_state = self._updated(
            _chosen(grads, stays),
            self._chosen_state(opt_state, stays),
            _chosen(params, stays),
            _chosen(self._numbers, stays),
            outcome,
        )
        for group in self._groups:
            of_group, state_of_group = self._moved_group(group, params, opt_state, grads, outcome)
            new_params = merged(new_params, of_group)
            new_state = merged(new_state, state_of_group)
        return merged(new_params, params), new_state

    def _moved_group(
        self, group: _Group, params: Tree, opt_state: Tree, grads: Tree, outcome: StepOutcome
    ) -> tuple[Tree, Tree]:
        """Returns (params, opt_state) of what the group has, None for the others."""
        chosen = group.chosen
        is_of_param = jax.tree.leaves(
            optax.tree_utils.tree_map_params(
                self._optimizer,
                lambda _, c: True if c else None,
                opt_state,
                chosen,
                transform_non_params=lambda _: False,
            )
        )
        params, grads = _chosen(params, chosen), _chosen(grads, chosen)
        numbers = _chosen(self._numbers, chosen)
        # Counts and the like are shared: every slice begins with the same, and what becomes of them
        # elsewhere is taken.
        opt_state = self._chosen_state(opt_state, chosen)
        structure = jax.tree.structure(opt_state)

        def leaves_of(state: Tree, *, shared: bool) -> list:
            pairs = zip(jax.tree.leaves(state), is_of_param, strict=True)
            return [leaf for leaf, of_param in pairs if of_param != shared]

        def whole_state(own: list, shared: list) -> Tree:
            own_leaves, shared_leaves = iter(own), iter(shared)
            return structure.unflatten(
                [next(own_leaves if of_param else shared_leaves) for of_param in is_of_param]
            )

        def update(carry, arrays, old, constants):
            (grads, numbers), (params, own), (shared, outcome) = arrays, old, constants
            params, state = self._updated(grads, whole_state(own, shared), params, numbers, outcome)
            return carry, (params, leaves_of(state, shared=False))

        own, shared = leaves_of(opt_state, shared=False), leaves_of(opt_state, shared=True)
        _, (params, own) = self._in_slices(
            group, update, (), (grads, numbers), (params, own), (shared, outcome)
        )
        return params, whole_state(own, shared)

    def _updated(
        self, grads: Tree, opt_state: Tree, params: Tree, numbers: Tree, outcome: StepOutcome
    ) -> tuple[Tree, Tree]:
        """Returns (params, opt_state) of what is here, all of it on the device.

        Args:
          numbers: as for `rounded_at_random`.
        """

        def ready(g):
            g = g / outcome.weight
            if not self._clip_norm:
                return g
            is_small = outcome.norm < self._clip_norm
            return jax.lax.select(is_small, g, g / outcome.norm.astype(g.dtype) * self._clip_norm)

        grads = jax.tree.map(ready, grads)
        wide = jax.tree.map(lambda p, g: p.astype(g.dtype), params, grads)
        updates, new_state = self._optimizer.update(grads, opt_state, wide, numbers=numbers)
        new_params = rounded_at_random(
            optax.apply_updates(wide, updates), params, numbers, self._seed, outcome.step
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
        """Returns (carry, changing) after all slices of a group.

        Args:
          body: (carry, slices of arrays, slices of changing, constants) -> (carry, new slices of
            changing).
          carry: scalars that are summed over the stages in the end.
          arrays, changing: wherever they lie; slices of them are on the device.
        """

        def of_stage(carry, arrays, changing, constants):
            def step(state, i):
                carry, changing = state
                start = i * group.rows

                def at(x):
                    return to_device(jax.lax.dynamic_slice_in_dim(x, start, group.rows))

                # Read before anything is written in its place: else XLA copies the whole.
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
            return of_stage(carry, arrays, changing, constants)
        once, by_stage = PartitionSpec(), PartitionSpec("pipeline")
        run = jax.shard_map(
            of_stage,
            mesh=self._mesh,
            in_specs=(once, by_stage, by_stage, once),
            out_specs=(once, by_stage),
            axis_names={"pipeline"},
            check_vma=False,
        )
        return run(carry, arrays, changing, constants)

    def _grouped(self, params: Tree, moved: Tree) -> list[_Group]:
        """Returns what is moved: each stack's parameters together, and every other one alone."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(params))
        paths = [path for path, is_moved in jax.tree_util.tree_leaves_with_path(moved) if is_moved]

        def marked(chosen: Collection[tuple]) -> Tree:
            return jax.tree_util.tree_map_with_path(lambda path, _: path in chosen, moved)

        groups, num_stages = [], self._mesh.shape["pipeline"]
        for stack in dict.fromkeys(path[0].key for path in paths if path[0].key in self._layouts):
            of_stack = [path for path in paths if path[0].key == stack]
            num_slots = len(self._layouts[stack].layer_of_slot) // num_stages
            groups.append(_Group(marked(of_stack), num_slots, 1, num_stages))
        for path in paths:
            if path[0].key not in self._layouts:
                num_slices, rows = _slices(leaves[path])
                groups.append(_Group(marked([path]), num_slices, rows, 1))
        return groups

    def _number(self, path: tuple, param: jax.ShapeDtypeStruct) -> np.ndarray:
        """Returns the numbers of the layers in a parameter's slots, or those of its rows."""
        if path[0].key in self._layouts:
            return np.asarray(self._layouts[path[0].key].layer_of_slot, np.int32)
        return np.arange(math.prod(param.shape[:1]), dtype=np.int32)

    def _chosen_state(self, opt_state: Tree, chosen: Tree) -> Tree:
        return optax.tree_utils.tree_map_params(
            self._optimizer, lambda leaf, c: leaf if c else None, opt_state, chosen
        )


def _slices(param: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Returns how many slices of how many rows to cut a parameter into.

    A dim that devices share out is not cut: each of them has few of its rows anyway.
    """
    spec = param.sharding.spec
    axes = axes_of(PartitionSpec(*spec[:1]))
    num_rows = param.shape[0]
    if any(param.sharding.mesh.shape[axis] > 1 for axis in axes):
        return 1, num_rows
    local = param.sharding.shard_shape(param.shape)
    most = min(num_rows, max(1, _SLICE_SIZE // math.prod(local[1:])))
    rows = max(n for n in range(1, most + 1) if num_rows % n == 0)
    # A number of rows that has no fitting divisor, such as a prime, is not worth so many slices.
    return (num_rows // rows, rows) if 4 * rows >= most else (1, num_rows)


def _chosen(tree: Tree, chosen: Tree) -> Tree:
    """Returns `tree` with None for what is not chosen: False or None."""
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(lambda leaf, c: leaf if c else None, tree, chosen, is_leaf=is_none)
