"""Stacks of identical blocks, and the split of a model into embed, stacks and head.

    batch --embed--> x --stack of blocks--> x --head--> (loss_sum, weight_sum, metrics)

A model is an `nnx.Module` with

- `embed(batch) -> x`, which turns tokens or patches into activations.
- One or more attributes of type `Stack`, whose blocks are called as `block(x, batch, keys) -> x`. A
  model with several stacks lists them in the order in which they run:
  `stacks = ("encoder", "decoder")`.
- Optionally `before_<stack>(x, batch) -> x`, which runs before the first block of that stack, e.g.
  to embed decoder inputs. It may return another structure or other shapes.
- `head(x, batch) -> (loss_sum, weight_sum, metrics)`, which returns scalars: sums over the tokens
  of the batch.

`x` is an array or a tree of arrays, all of a floating dtype. It keeps its structure, shapes and
dtypes within a stack. `batch` is a dict of arrays with a leading batch dim. During training,
`batch["dropout_keys"]` is key[B], and `keys` are these keys with the layer's number folded in;
otherwise there are no such keys, and `keys` is None. A block finds the number of its layer, counted
from 0 over all stacks, in `batch["layer"]`, int32[].

Blocks name activations with `jax.ad_checkpoint.checkpoint_name`. A config can then save only these
for the backward pass, or move them to host memory between the forward and the backward pass.

A class can declare further properties:

- `can_share_vocab = True`: `embed` and `head` can compute with a part of the vocab, because they
  use `models.layers.basic.lookup` and `models.losses.chunked_vocab_loss`. A subclass that overrides
  either of the two methods must declare it again.
- `teach(x, batch) -> arrays [B, ...]`: the model learns from a teacher, which is the exponential
  moving average (EMA) of its own parameters (`train.ema_decay`). Before a step, the stacks run with
  the teacher's parameters and without dropout, and `teach` receives their output instead of `head`.
  `head` then finds the arrays that `teach` returned in its batch.
- `sees_whole_batch = True`: `head` or `teach` compares examples of the whole batch with each other,
  using sharding/logical.py. Such a batch is a single microbatch.
- `objectives = ("causal_lm",)`: the model only supports these values of `data.objective`.
- `not_decayed = ("class_token",)`: names of parameters, or of modules that contain them, without
  weight decay. Weight decay applies to matrices and tables, but never to a `bias` or `scale`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.jaxprs import walk

Tree = Any

#: Policies for `train.remat`, unless it is a list of names: which values of a block's forward pass
#: are saved for its backward pass. All others are recomputed.
REMAT_POLICIES: dict[str, Callable] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

#: Names of metrics that the step computes itself; see train/step/train_step.py.
RESERVED_METRICS = {
    "loss",
    "weight",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "num_skipped",
    "num_nonfinite_in_a_row",
    "num_stuck_in_a_row",
}


_only_layers: ContextVar[jax.Array | None] = ContextVar("only_layers", default=None)


@contextlib.contextmanager
def only_layers(numbers: jax.Array) -> Iterator[None]:
    """Make stacks that are constructed in this context have only some of their layers.

    Args:
        numbers: int32[n], numbers of the layers. Their parameters are bitwise the same as in a full
            stack.
    """
    token = _only_layers.set(numbers)
    try:
        yield
    finally:
        _only_layers.reset(token)


class Stack(nnx.Module):
    """`num_layers` identical blocks whose parameters are stacked on a leading `layers` axis."""

    def __init__(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], num_layers: int, *, rngs: nnx.Rngs
    ):
        make = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})

        @nnx.split_rngs(splits=num_layers)
        def make_layers(rngs: nnx.Rngs) -> nnx.Module:
            numbers = _only_layers.get()
            if numbers is None:
                return make(rngs)
            # Each layer has its own RNG key, so some layers can be made without the others.
            graph, keys = nnx.split(rngs)
            return make(nnx.merge(graph, jax.tree.map(lambda x: x[numbers], keys)))

        self.layers = make_layers(rngs)
        self.num_layers = num_layers

    def __call__(self, x: Any, batch: Tree) -> Any:
        """Apply all blocks to `x`."""
        graph, layers = nnx.split(self.layers)
        return run_layers(_block(graph, None, first_site=1), layers, x, batch)


def run_layers(block: Callable, layers: Tree, x: Tree, batch: Tree) -> Tree:
    """Apply blocks to `x`, one after another.

    Args:
        block: function as returned by `_block`.
        layers: parameters of the blocks, stacked along a leading layers dim.
        x: activations.
        batch: dict of arrays [B, ...].
    """

    def body(x, layer):
        return block(layer[0], x, batch, layer[1]), None

    numbers = jnp.arange(len(jax.tree.leaves(layers)[0]), dtype=jnp.int32)
    return jax.lax.scan(body, x, (layers, numbers))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A model as pure functions of its parameters; see `Model` in sharding/pipeline.

    The model's parameters are a tree of arrays, `params`. `split` separates them into `ends`
    (everything except the stacks) and `layers` (stack -> its parameters, with a leading layers
    dim). `join` is its inverse.
    """

    embed: Callable[[Tree, Tree], Tree]
    blocks: Mapping[str, Callable[[Tree, Tree, Tree, jax.Array], Tree]]
    before: Mapping[str, Callable[[Tree, Tree, Tree], Tree]]
    head: Callable[[Tree, Tree, Tree], tuple[jax.Array, jax.Array, dict]]
    num_layers: Mapping[str, int]  # number of layers per stack, in the order in which stacks run
    teach: Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None = None

    def with_teacher_outputs(self, ends: Tree, x: Tree, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the types of the batch that the head receives, teacher outputs included.

        Args:
            ends: non-stack parameters.
            x: output type of the last stack.
            batch: types of the batch, without teacher outputs.
        """
        if self.teach is None:
            return batch
        return batch | jax.eval_shape(self.teach, ends, x, batch)

    def types(self, ends: Tree, batch: Tree) -> dict[str, tuple[Tree, Tree]]:
        """Return, per stack, the types of the activations before it and of its blocks.

        Args:
            ends: non-stack parameters, as arrays or ShapeDtypeStructs.
            batch: arrays [B, ...] or ShapeDtypeStructs.

        Returns:
            stack -> (type of the input of `before_<stack>`, type of the activations in the stack).
            The two are equal for a stack without `before_<stack>`.
        """
        types = {}
        x = jax.eval_shape(self.embed, ends, batch)
        for name in self.num_layers:
            given = x
            if name in self.before:
                x = jax.eval_shape(self.before[name], ends, given, batch)
            types[name] = (given, x)
        return types

    def split(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Split the model's parameters into `ends` and `layers`."""
        ends = {name: value for name, value in params.items() if name not in self.num_layers}
        return {"ends": ends, "layers": {name: params[name]["layers"] for name in self.num_layers}}

    def join(self, parts: dict[str, Tree]) -> dict[str, Tree]:
        """Merge `ends` and `layers` into the model's parameters, as the inverse of `split`."""
        stacks = {name: {"layers": layers} for name, layers in parts["layers"].items()}
        return {**parts["ends"], **stacks}


def partition(model: Any, *, remat: str, offload: Sequence[str] = ()) -> Parts:
    """Return a model's functions.

    Args:
        model: the model, which may be abstract and is not modified.
        remat: values of a block's forward pass that are saved for its backward pass: a key of
            REMAT_POLICIES, or names of activations, separated by commas.
        offload: names of activations that are saved as well, but in host memory.

    Raises:
        ValueError: if the model has no Stack, has several Stacks without an order, lacks `embed` or
            `head`, or has state other than parameters.
    """
    name = type(model).__name__
    stacks = _stacks(model)
    for method in ("embed", "head"):
        if not callable(getattr(model, method, None)):
            raise ValueError(
                f"{name} has no method {method!r}; models/stack.py describes what a model needs"
            )
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        if not isinstance(variable, nnx.Param):
            raise ValueError(
                f"{name}.{'.'.join(map(str, path))} is a {type(variable).__name__}: a model may "
                "only hold nnx.Param; for dropout use models.layers.basic.dropout"
            )
    without_stacks: Any = nnx.merge(*nnx.split(model))
    for stack in stacks:
        setattr(without_stacks, stack, None)
    ends_graph = nnx.split(without_stacks)[0]
    blocks = {}
    first_site = 1
    policy = _policy(remat, offload)
    for key, stack in stacks.items():
        blocks[key] = _block(nnx.split(stack.layers)[0], policy, first_site=first_site)
        first_site += stack.num_layers

    def before(key: str):
        return lambda ends, x, batch: getattr(nnx.merge(ends_graph, ends), f"before_{key}")(
            x, batch
        )

    return Parts(
        embed=lambda ends, batch: nnx.merge(ends_graph, ends).embed(batch),
        blocks=blocks,
        before={key: before(key) for key in stacks if hasattr(model, f"before_{key}")},
        head=lambda ends, x, batch: nnx.merge(ends_graph, ends).head(x, batch),
        num_layers={key: stack.num_layers for key, stack in stacks.items()},
        teach=(
            (lambda ends, x, batch: nnx.merge(ends_graph, ends).teach(x, batch))
            if hasattr(model, "teach")
            else None
        ),
    )


def _stacks(model: Any) -> dict[str, Stack]:
    """Return the model's stacks in the order in which they run."""
    name = type(model).__name__
    found = {key: value for key, value in vars(model).items() if isinstance(value, Stack)}
    if not found:
        raise ValueError(f"{name} has no attribute of type models.stack.Stack; add one")
    # The order of assignment is lost: NNX sorts attributes when it merges a module.
    order = getattr(model, "stacks", tuple(found) if len(found) == 1 else ())
    unnamed = sorted(found.keys() - set(order))
    if unnamed:
        raise ValueError(
            f"{name} has the stacks {', '.join(sorted(found))}, and {', '.join(unnamed)} not in "
            f"{name}.stacks={order}; list all of them there, in the order in which they run"
        )
    return {key: found[key] for key in order if key in found}


def check(parts: Parts, params: Tree, batch: Tree) -> None:
    """Check that the model's functions fit together.

    Args:
        parts: the model's functions.
        params: its parameters, in the dtype that it computes in; may be ShapeDtypeStructs.
        batch: a batch as the model receives it; may be ShapeDtypeStructs.

    Raises:
        ValueError: if activations are not floating or change their type within a stack, if a result
            of `head` is not a scalar, or if the name of a metric is reserved.
    """
    cut = parts.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    _check_floating("embed", jax.eval_shape(parts.embed, cut["ends"], batch))
    x = None
    for stack, (_, x) in parts.types(cut["ends"], batch).items():
        if stack in parts.before:
            _check_floating(f"before_{stack}", x)
        layer = one_layer(cut["layers"][stack])
        y = jax.eval_shape(parts.blocks[stack], layer, x, batch, number)
        if _shapes(y) != _shapes(x):
            raise ValueError(
                f"a block of {stack} takes activations {_shapes(x)} and returns {_shapes(y)}; "
                "a block must keep their structure, shapes and dtypes"
            )
    batch = parts.with_teacher_outputs(cut["ends"], x, batch)
    loss, weight, metrics = jax.eval_shape(parts.head, cut["ends"], x, batch)
    for name, value in {"loss": loss, "weight": weight, **metrics}.items():
        if value.shape:
            raise ValueError(
                f"head's {name} has the shape {value.shape}; it must be a scalar, a sum over tokens"
            )
    for name in sorted(RESERVED_METRICS & metrics.keys()):
        raise ValueError(f"head's metric {name!r} has a name that the step itself uses; rename it")


def _check_floating(function: str, x: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{function} returns {leaf.dtype}{list(leaf.shape)} at "
                f"x{jax.tree_util.keystr(path)}; activations must be floating, so put other arrays "
                "into the batch"
            )


def can_share_vocab(model: Any) -> bool:
    """Return whether the class that defines the model's `embed` and `head` can share the vocab."""
    for cls in type(model).__mro__:
        if "can_share_vocab" in vars(cls):
            return cls.can_share_vocab
        if {"embed", "head"} & vars(cls).keys():
            return False
    return False


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)


def one_layer(layers: Tree) -> Tree:
    """Return the parameters of one layer of a stack as ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def logical_axes(model: nnx.Module) -> Tree:
    """Return a tree like the model's parameters, with a tuple of logical axis names per leaf."""
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


def _policy(remat: str, offload: Sequence[str]) -> Callable | None:
    """Return a policy for `jax.checkpoint`, or None if everything is to be saved."""
    if remat == "none" and not offload:
        return None
    policies = jax.checkpoint_policies
    saves = REMAT_POLICIES.get(remat) or policies.save_only_these_names(*remat.split(","))
    moves = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive, *args, **params):
        is_moved = primitive.name == "name" and params["name"] in offload
        return (moves if is_moved else saves)(primitive, *args, **params)

    return policy


def named_activations(model: Any, params: Tree, batch: Tree) -> set[str]:
    """Return the names that the model's blocks give to activations.

    Args:
        model: the model.
        params: as for `check`.
        batch: as for `check`.
    """
    parts = partition(model, remat="none")
    cut = parts.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def differentiate(block, params, x, batch, number):
        return jax.vjp(lambda params, x: block(params, x, batch, number), params, x)

    found: set[str] = set()
    for stack, (_, x) in parts.types(cut["ends"], batch).items():
        block = parts.blocks[stack]
        args = (one_layer(cut["layers"][stack]), x, batch, number)
        jaxpr = jax.make_jaxpr(partial(differentiate, block))(*args).jaxpr
        names = (eqn for eqn, _ in walk(jaxpr.eqns) if eqn.primitive.name == "name")
        found.update(eqn.params["name"] for eqn in names)
    return found


def _block(graph, policy: Callable | None, *, first_site: int):
    """Return `block(params, x, batch, number)`, which applies one layer of a stack.

    Args:
        graph: graph definition of the block.
        policy: policy for `jax.checkpoint`; None saves everything that the backward pass reads.
        first_site: number that layer 0 folds into the dropout keys; layer n folds in
            first_site + n. No two layers of a model fold in the same number.
    """

    def block(params, x, batch, number):
        batch = batch | {"layer": number + (first_site - 1)}
        keys = batch.get("dropout_keys")
        if keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, first_site + number)
        return nnx.merge(graph, params)(x, batch, keys)

    return block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)
