"""Stacks of equal blocks, and the cut of a model into embed, stack and head.

A model is an `nnx.Module` with
- `embed(batch) -> x`: tokens or patches become activations;
- one attribute that is a `Stack` of blocks, each called as `block(x, batch, keys) -> x`;
- `head(x, batch) -> (loss_sum, weight_sum, metrics)`: scalars, sums over the batch's tokens.

`batch` is a dict of arrays with a leading batch dim. While training, `batch["dropout_keys"]` is
key[B], and `keys` are these folded with the layer's number; otherwise both are absent (None).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Tree = Any

#: `train.remat`: what the backward pass of a block may read instead of computing it again.
REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nnx.Module):
    """`num_layers` equal blocks whose parameters are stacked on a leading `layers` axis."""

    def __init__(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], num_layers: int, *, rngs: nnx.Rngs
    ):
        make = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = nnx.split_rngs(splits=num_layers)(make)(rngs)
        self.num_layers = num_layers

    def __call__(self, x: jax.Array, batch: Tree) -> jax.Array:
        """Returns `x` after all blocks."""
        graph, layers = nnx.split(self.layers)
        return _run(graph, layers, x, batch, jnp.int32(0), remat="none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A model as three pure functions of its parameters.

    `params` is the model's own tree of arrays; `split` cuts it into `ends` (all but the stack) and
    `layers` (the stack's, with a leading layers dim), and `join` puts such two together.
    """

    embed: Callable[[Tree, Tree], Tree]
    stack: Callable[[Tree, Tree, Tree, jax.Array], Tree]
    head: Callable[[Tree, Tree, Tree], tuple[jax.Array, jax.Array, dict]]
    stack_name: str
    num_layers: int

    def split(self, params: dict[str, Tree]) -> dict[str, Tree]:
        ends = {name: value for name, value in params.items() if name != self.stack_name}
        return {"ends": ends, "layers": params[self.stack_name]["layers"]}

    def join(self, parts: dict[str, Tree]) -> dict[str, Tree]:
        return {**parts["ends"], self.stack_name: {"layers": parts["layers"]}}


def partition(model: Any, *, remat: str) -> Parts:
    """Returns the model's three functions; `model` may be abstract and is left as it is.

    Raises:
      ValueError: the model has not exactly one Stack, or lacks `embed` or `head`.
    """
    name = type(model).__name__
    stacks = [key for key, value in vars(model).items() if isinstance(value, Stack)]
    if len(stacks) != 1:
        raise ValueError(
            f"{name} has {len(stacks)} attributes of type models.stack.Stack; it must have one"
        )
    for method in ("embed", "head"):
        if not callable(getattr(model, method, None)):
            raise ValueError(f"{name} has no method {method!r}; see models/stack.py for the three")
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        if not isinstance(variable, nnx.Param):
            raise ValueError(
                f"{name}.{'.'.join(map(str, path))} is a {type(variable).__name__}: a model holds "
                "parameters alone (nnx.Param); for dropout use models.layers.dropout"
            )
    stack_name = stacks[0]
    stack = getattr(model, stack_name)
    layer_graph = nnx.split(stack.layers)[0]
    without_stack: Any = nnx.merge(*nnx.split(model))
    setattr(without_stack, stack_name, None)
    ends_graph = nnx.split(without_stack)[0]

    def run_stack(layers, x, batch, first_layer):
        return _run(layer_graph, layers, x, batch, first_layer, remat=remat)

    return Parts(
        embed=lambda ends, batch: nnx.merge(ends_graph, ends).embed(batch),
        stack=run_stack,
        head=lambda ends, x, batch: nnx.merge(ends_graph, ends).head(x, batch),
        stack_name=stack_name,
        num_layers=stack.num_layers,
    )


def logical_axes(model: nnx.Module) -> Tree:
    """Returns the model's tree of parameters with a tuple of logical axis names per leaf."""
    state = nnx.to_flat_state(nnx.split(model)[1])
    axes = {}
    for path, variable in state:
        names = variable.get_metadata().get("out_sharding")
        rank = len(variable.get_value().shape)
        if names is None or len(names) == 0:
            in_stack = isinstance(getattr(model, str(path[0]), None), Stack)
            names = ("layers", *[None] * (rank - 1)) if in_stack else (None,) * rank
        axes[path] = tuple(names)
    return nnx.traversals.unflatten_mapping(axes)


def _run(graph, layers, x, batch, first_layer, *, remat: str):
    keys = batch.get("dropout_keys")

    def body(x, layer):
        params, number = layer
        block = nnx.merge(graph, params)
        layer_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        return block(x, batch, layer_keys), None

    if REMAT_POLICIES[remat] is not None:
        body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    numbers = first_layer + 1 + jnp.arange(num_layers, dtype=jnp.int32)
    return jax.lax.scan(body, x, (layers, numbers))[0]
