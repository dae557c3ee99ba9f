"""Layer-wise trust ratio of LAMB and LARS: scales every update to the norm of its weights."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import optax

Tree = Any


def scale_by_layers_trust_ratio(
    stacks: Collection[str], adapted: Callable[[Tree], Tree], coefficient: float = 1.0
) -> optax.GradientTransformation:
    """Multiply updates by `coefficient` × norm of the weights / norm of the update.

    Norms are taken per layer. A stack's array `[slots, ...]` holds one tensor per slot,
    so its norms are taken for each slot, never over several layers. Slots that are padding are all
    zeros, and their updates do not change.

    Args:
        stacks: first keys of parameters whose leading dimension is slots.
        adapted: tree of arrays -> tree of bools: the updates to scale. Others do not change.
        coefficient: trust coefficient.

    Source: You et al., "Large Batch Training of Convolutional Networks" (2017), section 4; "Large
    Batch Optimization for Deep Learning" (2019), section 3.
    """
    ratio = optax.scale_by_trust_ratio(trust_coefficient=coefficient)

    def of_tensor(update: jax.Array, param: jax.Array) -> Any:
        return ratio.update(update, optax.EmptyState(), param)[0]

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        def scaled(path: tuple, update: jax.Array, param: jax.Array, is_adapted: bool) -> Any:
            if not is_adapted:
                return update
            in_stack = path[0].key in stacks
            return (jax.vmap(of_tensor) if in_stack else of_tensor)(update, param)

        mask = adapted(updates)
        return jax.tree_util.tree_map_with_path(scaled, updates, params, mask), state

    return optax.GradientTransformation(optax.init_empty_state, update)
