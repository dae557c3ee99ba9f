"""Smaller updates the nearer a parameter is to the embedding: layer-wise learning-rate decay."""

import dataclasses
from collections.abc import Mapping
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
      embedding: paths of the parameters outside the stacks that `embed` reads.
    """

    first_layers: Mapping[str, int]
    num_layers: int
    embedding: frozenset[tuple]


def depths_of(parts: Parts, params: Tree, batch: Tree) -> Depths:
    """Returns the depths of a model's parameters.

    Args:
      params, batch: as for models.stack.check.
    """
    ends = parts.split(params)["ends"]
    jaxpr = jax.make_jaxpr(parts.embed)(ends, batch).jaxpr
    _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(ends)]
    first_layers, num_layers = {}, 0
    for stack, count in parts.num_layers.items():
        first_layers[stack] = num_layers
        num_layers += count
    return Depths(
        first_layers=first_layers,
        num_layers=num_layers,
        embedding=frozenset(path for path, read in zip(paths, is_read, strict=False) if read),
    )


def scaled_by_depth(
    optimizer: optax.GradientTransformation, decay: float, depths: Depths
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with its updates times a power of `decay`; its state stays as it is.

    Of L layers, those of layer l (from 0) are times decay^(L - l), the embedding's times
    decay^(L + 1), and what comes after the layers stays as it is. `update` takes a further argument
    `numbers`: a tree like the updates, of int32 with the numbers of each one's slots in its stack.

    Source: Clark et al., "ELECTRA" (2020), appendix; Bao et al., "BEiT" (2021), and the function
    `param_groups_lrd` of He et al., "Masked Autoencoders" (2021).
    """
    wrapped, num_layers = optax.with_extra_args_support(optimizer), depths.num_layers

    def scaled(path: tuple, update: jax.Array, numbers: jax.Array) -> jax.Array:
        if path[0].key in depths.first_layers:
            layers = depths.first_layers[path[0].key] + jnp.asarray(numbers)
            factors = jnp.power(decay, num_layers - layers).astype(update.dtype)
            return update * factors.reshape(-1, *[1] * (update.ndim - 1))
        return update * decay ** (num_layers + 1) if path in depths.embedding else update

    def update(updates: Tree, state: Any, params: Tree = None, **others: Any) -> tuple[Tree, Any]:
        updates, state = wrapped.update(updates, state, params, **others)
        return jax.tree_util.tree_map_with_path(scaled, updates, others["numbers"]), state

    return optax.GradientTransformationExtraArgs(wrapped.init, update)
