"""Updates as long as the weights that they change, tensor by tensor: what LAMB and LARS do."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import optax

Tree = Any


def scale_by_layers_trust_ratio(
    stacks: Collection[str], adapted: Callable[[Tree], Tree], coefficient: float = 1.0
) -> optax.GradientTransformation:
    """Returns updates times `coefficient` × norm of the weights / norm of the update.

    A stack's arrays are `[slots, ...]`, and every slot is a tensor by itself: the norm is never one
    over several layers, and slots that are padding (zeros) stay as they are.

    Args:
      stacks: first keys of parameters whose first dim is that of slots.
      adapted: tree of arrays -> tree of bools; the other updates stay as they are.

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
