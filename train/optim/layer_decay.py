"""Layer-wise learning-rate decay: the closer a parameter is to the input, the smaller its updates.

With L layers and decay d, updates are multiplied by:

    embedding   layer 0   layer 1   ...   layer L-1   head
    d^(L+1)     d^L       d^(L-1)   ...   d           1
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.functions import ModelFunctions
from models.stack import number_in_period
from sharding.jaxprs import reads

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depths:
    """The depth of every parameter between embedding and head.

    Attributes:
        first_layers: stack -> the number of its first layer, counted from 0 over all stacks.
        layers_per_block: stack -> the number of layers of a block, which a path names in a
            `models.stack.Period`.
        num_layers: number of layers of all stacks together.
        non_stack_params: path of a non-stack parameter -> its depth. It is -1 if `embed` reads the
            parameter, and the number of the stack's first layer if `before_<stack>` does.
            Parameters that only the head reads are missing.
    """

    first_layers: Mapping[str, int]
    layers_per_block: Mapping[str, int]
    num_layers: int
    non_stack_params: Mapping[tuple, int]


def depths_of(functions: ModelFunctions, params: Tree, batch: Tree) -> Depths:
    """Find the depth of each parameter by tracing which of the model's functions read it.

    Args:
        functions: model's functions.
        params: parameters, as for models.check.check.
        batch: batch, as for models.check.check.
    """
    non_stack_params = functions.split(params)["non_stack"]
    depths = dict.fromkeys(_read_by(functions.embed, non_stack_params, batch), -1)
    types = functions.activation_types(non_stack_params, batch)
    first_layers = {}
    num_layers = 0
    for stack, count in functions.num_layers.items():
        if stack in functions.before:
            for path in _read_by(functions.before[stack], non_stack_params, types[stack][0], batch):
                depths.setdefault(path, num_layers)  # the first function that reads it counts
        first_layers[stack] = num_layers
        num_layers += count * functions.layers_per_block[stack]
    return Depths(
        first_layers=first_layers,
        layers_per_block=functions.layers_per_block,
        num_layers=num_layers,
        non_stack_params=depths,
    )


def _read_by(function: Callable, non_stack_params: Tree, *args: Tree) -> list[tuple]:
    """Return the paths of the parameters that `function(non_stack_params, *args)` depends on."""
    is_read = reads(function, non_stack_params, *args)
    return [path for path, read in jax.tree_util.tree_leaves_with_path(is_read) if read]


def scaled_by_depth(
    optimizer: optax.GradientTransformation, decay: float, depths: Depths
) -> optax.GradientTransformationExtraArgs:
    """Multiply an optimizer's updates by a power of `decay`; its state is unchanged.

    With L layers, the updates of layer l (from 0) are multiplied by decay^(L - l). The same factor
    applies to the parameters of `before_<stack>`, if l is the stack's first layer. The embedding's
    updates are multiplied by decay^(L + 1), the head's are unchanged.

    Args:
        optimizer: optimizer to wrap.
        decay: in (0, 1].
        depths: depths of the parameters.

    Returns:
        A transformation whose `update` takes an additional argument `row_ids`: a tree like
        the updates, int32[slots] with the block number of every slot within its stack.

    Source: Clark et al., "ELECTRA" (2020), appendix; Bao et al., "BEiT" (2021), and the function
    `param_groups_lrd` of He et al., "Masked Autoencoders" (2021).
    """
    wrapped = optax.with_extra_args_support(optimizer)
    num_layers = depths.num_layers

    def scaled(path: tuple, update: jax.Array, row_ids: jax.Array) -> jax.Array:
        stack, *names = (str(entry.key) for entry in path)
        if stack in depths.first_layers:
            first = depths.first_layers[stack] + number_in_period(names)
            layers = first + depths.layers_per_block[stack] * jnp.asarray(row_ids)
            factors = jnp.power(decay, num_layers - layers).astype(update.dtype)
            return update * factors.reshape(-1, *[1] * (update.ndim - 1))
        return update * decay ** (num_layers - depths.non_stack_params.get(path, num_layers))

    def update(updates: Tree, state: Any, params: Tree = None, **others: Any) -> tuple[Tree, Any]:
        updates, state = wrapped.update(updates, state, params, **others)
        return jax.tree_util.tree_map_with_path(scaled, updates, others["row_ids"]), state

    return optax.GradientTransformationExtraArgs(wrapped.init, update)
