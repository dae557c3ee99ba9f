"""Smaller updates the nearer a parameter is to the embedding: layer-wise learning-rate decay."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from models.stack import Parts

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depths:
    """Where parameters lie between embedding and head.

    Attributes:
      first_layers: stack -> the number of its first layer, counted over all stacks from 0.
      num_layers: of all stacks together.
      ends: path of a parameter outside the stacks -> the layer that it makes x ready for; -1 of
        what `embed` reads. What none of them reads, but the head alone, is not there.
    """

    first_layers: Mapping[str, int]
    num_layers: int
    ends: Mapping[tuple, int]


def depths_of(parts: Parts, params: Tree, batch: Tree) -> Depths:
    """Returns the depths of a model's parameters.

    Args:
      params, batch: as for models.stack.check.
    """
    ends = parts.split(params)["ends"]
    depths = dict.fromkeys(_read_by(parts.embed, ends, batch), -1)
    types, first_layers, num_layers = parts.types(ends, batch), {}, 0
    for stack, count in parts.num_layers.items():
        if stack in parts.before:
            for path in _read_by(parts.before[stack], ends, types[stack][0], batch):
                depths.setdefault(path, num_layers)  # what is read twice counts where it is first
        first_layers[stack] = num_layers
        num_layers += count
    return Depths(first_layers=first_layers, num_layers=num_layers, ends=depths)


def _read_by(function: Callable, ends: Tree, *args: Tree) -> list[tuple]:
    """Returns the paths of the parameters in `ends` that `function(ends, *args)` depends on."""
    jaxpr = jax.make_jaxpr(function)(ends, *args).jaxpr
    _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(ends)]
    return [path for path, read in zip(paths, is_read, strict=False) if read]


def scaled_by_depth(
    optimizer: optax.GradientTransformation, decay: float, depths: Depths
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with its updates times a power of `decay`; its state stays as it is.

    Of L layers, those of layer l (from 0) are times decay^(L - l), as is what makes x ready for
    layer l; the embedding's are times decay^(L + 1), and the head's stay as they are. `update`
    takes a further argument `numbers`: a tree like the updates, of int32 with the numbers of each
    one's slots in its stack.

    Source: Clark et al., "ELECTRA" (2020), appendix; Bao et al., "BEiT" (2021), and the function
    `param_groups_lrd` of He et al., "Masked Autoencoders" (2021).
    """
    wrapped, num_layers = optax.with_extra_args_support(optimizer), depths.num_layers

    def scaled(path: tuple, update: jax.Array, numbers: jax.Array) -> jax.Array:
        if path[0].key in depths.first_layers:
            layers = depths.first_layers[path[0].key] + jnp.asarray(numbers)
            factors = jnp.power(decay, num_layers - layers).astype(update.dtype)
            return update * factors.reshape(-1, *[1] * (update.ndim - 1))
        return update * decay ** (num_layers - depths.ends.get(path, num_layers))

    def update(updates: Tree, state: Any, params: Tree = None, **others: Any) -> tuple[Tree, Any]:
        updates, state = wrapped.update(updates, state, params, **others)
        return jax.tree_util.tree_map_with_path(scaled, updates, others["numbers"]), state

    return optax.GradientTransformationExtraArgs(wrapped.init, update)
