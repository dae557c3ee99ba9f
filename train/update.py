"""The optimizer's update: of all parameters at once, or one layer at a time from host memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sharding.memory import to_device, to_where
from sharding.pipeline.layout import Layout
from train.precision import rounded_at_random

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a step knows of its gradients before the update: scalars."""

    step: jax.Array  # int32, of the state before it
    weight: jax.Array  # that the gradients are divided by
    norm: jax.Array  # of all of them together, once divided
    accepted: jax.Array  # bool; False changes nothing


class Update:
    """The way from gradients to new parameters and a new optimizer state.

    What lies in host memory is updated one slot of its stack after another, and outside the stacks
    one array after another, so that the device never holds more of it.

    Args:
      optimizer: clips nothing; elementwise, if `moved` marks anything.
      clip_norm: the largest norm of all gradients together; 0: any.
      moved: a bool per parameter: its master weights or its optimizer state lie in host memory.
      layouts: of every stack.
      seed: of rounding at random.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        clip_norm: float,
        moved: Tree,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        seed: int,
    ):
        self._optimizer, self._clip_norm, self._seed = optimizer, clip_norm, seed
        self._moved, self._layouts, self._mesh = moved, layouts, mesh

    def norm(self, grads: Tree, weight: jax.Array) -> jax.Array:
        """Returns the norm of all gradients together, each divided by `weight`."""

        def sum_of_squares(grads: Tree) -> jax.Array:
            return optax.tree.norm(jax.tree.map(lambda g: g / weight, grads), squared=True)

        def add(total, grads, *_):
            return total + sum_of_squares(grads), ()

        dtype = jnp.result_type(*jax.tree.leaves(grads))
        total = jnp.asarray(sum_of_squares(self._chosen(grads, self._stays)), dtype)
        for stack, chosen in self._groups():
            of_group = self._chosen(grads, chosen)
            if stack is None:
                total += sum_of_squares(jax.tree.map(to_device, of_group))
            else:
                zero = jnp.zeros((), dtype)
                total += self._over_slots(stack, add, zero, of_group, (), ())[0]
        return jnp.sqrt(total)

    def __call__(
        self, params: Tree, opt_state: Tree, grads: Tree, judgement: Judgement
    ) -> tuple[Tree, Tree]:
        """Returns (params, opt_state) after the update, each where it was."""
        stays = self._stays
        new_params, new_state = self._updated(
            self._chosen(grads, stays),
            self._chosen_state(opt_state, stays),
            self._chosen(params, stays),
            judgement,
            {stack: jnp.asarray(layout.layer_of_slot) for stack, layout in self._layouts.items()},
        )
        for stack, chosen in self._groups():
            of_group, state_of_group = self._moved_group(
                stack, chosen, params, opt_state, grads, judgement
            )
            new_params = _merged(new_params, of_group)
            new_state = _merged(new_state, state_of_group)
        return new_params, new_state

    def _moved_group(
        self, stack: str | None, chosen: Tree, params: Tree, opt_state: Tree, grads: Tree, judgement
    ) -> tuple[Tree, Tree]:
        """Returns (params, opt_state) of what is chosen, None for the others."""
        is_of_param = jax.tree.leaves(
            optax.tree_utils.tree_map_params(
                self._optimizer,
                lambda _, c: True if c else None,
                opt_state,
                chosen,
                transform_non_params=lambda _: False,
            )
        )
        params, grads = self._chosen(params, chosen), self._chosen(grads, chosen)
        # Counts and the like are shared: every slot begins with the same, and what becomes of them
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
            (grads, numbers), (params, own), (shared, judgement) = arrays, old, constants
            layers = {} if stack is None else {stack: numbers}
            params, state = self._updated(
                grads, whole_state(own, shared), params, judgement, layers
            )
            return carry, (params, leaves_of(state, shared=False))

        own, shared = leaves_of(opt_state, shared=False), leaves_of(opt_state, shared=True)
        constants = (shared, judgement)
        if stack is None:
            on_device = jax.tree.map(to_device, (grads, own, params))
            grads_there, own_there, params_there = on_device
            _, new = update((), (grads_there, ()), (params_there, own_there), constants)
            params, own = jax.tree.map(to_where, new, (params, own))
        else:
            numbers = jnp.asarray(self._layouts[stack].layer_of_slot)
            _, (params, own) = self._over_slots(
                stack, update, (), (grads, numbers), (params, own), constants
            )
        return params, whole_state(own, shared)

    def _updated(
        self, grads: Tree, opt_state: Tree, params: Tree, judgement: Judgement, layers: Tree
    ) -> tuple[Tree, Tree]:
        """Returns (params, opt_state) of what is here, all of it on the device.

        Args:
          layers: stack -> the numbers of the layers that its arrays hold.
        """

        def ready(g):
            g = g / judgement.weight
            if not self._clip_norm:
                return g
            is_small = judgement.norm < self._clip_norm
            return jax.lax.select(is_small, g, g / judgement.norm.astype(g.dtype) * self._clip_norm)

        grads = jax.tree.map(ready, grads)
        wide = jax.tree.map(lambda p, g: p.astype(g.dtype), params, grads)
        updates, new_state = self._optimizer.update(grads, opt_state, wide)
        new_params = rounded_at_random(
            optax.apply_updates(wide, updates), params, layers, self._seed, judgement.step
        )

        def kept(new, old):
            return jax.tree.map(lambda a, b: jnp.where(judgement.accepted, a, b), new, old)

        return kept(new_params, params), kept(new_state, opt_state)

    def _over_slots(
        self,
        stack: str,
        body: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]],
        carry: Tree,
        arrays: Tree,
        changing: Tree,
        constants: Tree,
    ) -> tuple[Tree, Tree]:
        """Returns (carry, changing) after all slots.

        Args:
          body: (carry, slices of arrays, slices of changing, constants) -> (carry, new slices of
            changing).
          carry: scalars that are summed over the stages in the end.
          arrays, changing: `[slots, ...]`, wherever they lie; a slice is `[1, ...]`, on the device.
        """
        num_stages = self._mesh.shape["pipeline"]
        num_slots = len(self._layouts[stack].layer_of_slot) // num_stages

        def of_stage(carry, arrays, changing, constants):
            def step(state, i):
                carry, changing = state
                at = lambda x: to_device(jax.lax.dynamic_slice_in_dim(x, i, 1))  # noqa: E731
                # Read before anything is written in its place: else XLA copies the whole.
                old = jax.lax.optimization_barrier(jax.tree.map(at, changing))
                carry, new = body(carry, jax.tree.map(at, arrays), old, constants)

                def put(x, value):
                    return jax.lax.dynamic_update_slice_in_dim(x, to_where(value, x), i, 0)

                return (carry, jax.tree.map(put, changing, new)), None

            slots = jnp.arange(num_slots, dtype=jnp.int32)
            (carry, changing), _ = jax.lax.scan(step, (carry, changing), slots)
            if num_stages > 1:
                carry = jax.lax.psum(carry, "pipeline")
            return carry, changing

        if num_stages == 1:
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

    @property
    def _stays(self) -> Tree:
        return jax.tree.map(lambda moved: not moved, self._moved)

    def _groups(self) -> Iterator[tuple[str | None, Tree]]:
        """Yields a stack and which of its parameters are moved; then None and one other, each."""
        paths = [p for p, moved in jax.tree_util.tree_leaves_with_path(self._moved) if moved]
        stacks = dict.fromkeys(p[0].key for p in paths if p[0].key in self._layouts)
        for stack in stacks:
            yield stack, self._marked(lambda p, s=stack: p in paths and p[0].key == s)
        for path in paths:
            if path[0].key not in stacks:
                yield None, self._marked(lambda p, own=path: p == own)

    def _marked(self, is_chosen: Callable[[tuple], bool]) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, _: is_chosen(path), self._moved)

    def _chosen(self, params: Tree, chosen: Tree) -> Tree:
        return jax.tree.map(lambda leaf, c: leaf if c else None, params, chosen)

    def _chosen_state(self, opt_state: Tree, chosen: Tree) -> Tree:
        return optax.tree_utils.tree_map_params(
            self._optimizer, lambda leaf, c: leaf if c else None, opt_state, chosen
        )


def _merged(tree: Tree, other: Tree) -> Tree:
    """Returns `tree` with what it lacks (None) from `other`."""
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=is_none)
