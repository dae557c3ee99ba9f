"""Stacks of equal blocks, and the cut of a model into embed, stacks and head.

A model is an `nnx.Module` with
- `embed(batch) -> x`: tokens or patches become activations;
- attributes that are a `Stack` of blocks, each called as `block(x, batch, keys) -> x`; a model with
  several names them in the order in which they run: `stacks = ("encoder", "decoder")`;
- for a stack that x is made ready for, such as a decoder, `before_<attribute>(x, batch) -> x`,
  which may return another structure or other shapes;
- `head(x, batch) -> (loss_sum, weight_sum, metrics)`: scalars, sums over the batch's tokens.

A model whose `embed` and `head` compute with a part of the vocab, because they use
`models.layers.basic.lookup` and `models.losses.chunked_vocab_loss`, says so:
`can_share_vocab = True`. A class that changes either says it again.

A model that learns from an average of itself has `teach(x, batch) -> arrays [B, ...]` too. Before
a step its stacks run with the average's parameters (`train.ema_decay`) and without dropout, `teach`
takes what they end with in place of `head`, and `head` finds in its batch what that returned.
A model whose `head` or `teach` compares the examples of the whole batch with each other, by means
of sharding/logical.py, says so: `sees_whole_batch = True`. Its batch is one microbatch.

A model for certain `data.objective` alone names them: `objectives = ("causal_lm",)`.

Weight decay is for matrices and tables, not for what is called `bias` or `scale`. A class names
what else has none, parameters or modules that hold them: `not_decayed = ("class_token",)`.

`x` is an array or a tree of arrays, all floating, and keeps its structure, shapes and dtypes within
a stack. `batch` is a dict of arrays with a leading batch dim. While training,
`batch["dropout_keys"]` is key[B], and `keys` are these folded with the layer's number; otherwise
both are absent (None). A block finds its layer's number, counted over all stacks from 0, as
`batch["layer"]`, int32[].

Blocks name activations by `jax.ad_checkpoint.checkpoint_name`, so that a config can keep these
alone for the backward pass, or move them to host memory in between.
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
from jax.extend.core import jaxprs_in_params

Tree = Any

#: `train.remat`, if it is not a list of names: what the backward pass of a block may read instead
#: of computing it again.
REMAT_POLICIES: dict[str, Callable] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

#: What the step itself measures; see train/step/train_step.py.
RESERVED_METRICS = {
    *("loss", "weight", "grad_norm", "learning_rate", "loss_scale"),
    *("num_skipped", "num_nonfinite_in_a_row", "num_stuck_in_a_row"),
}


_only_layers: ContextVar[jax.Array | None] = ContextVar("only_layers", default=None)


@contextlib.contextmanager
def only_layers(numbers: jax.Array) -> Iterator[None]:
    """Lets stacks that are made within the block have some of their layers alone.

    Args:
      numbers: int32[n], of the layers. They are the same to the bit as among all.
    """
    token = _only_layers.set(numbers)
    try:
        yield
    finally:
        _only_layers.reset(token)


class Stack(nnx.Module):
    """`num_layers` equal blocks whose parameters are stacked on a leading `layers` axis."""

    def __init__(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], num_layers: int, *, rngs: nnx.Rngs
    ):
        make = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})

        @nnx.split_rngs(splits=num_layers)
        def make_layers(rngs: nnx.Rngs) -> nnx.Module:
            numbers = _only_layers.get()
            if numbers is None:
                return make(rngs)
            graph, keys = nnx.split(rngs)
            return make(nnx.merge(graph, jax.tree.map(lambda x: x[numbers], keys)))

        self.layers = make_layers(rngs)
        self.num_layers = num_layers

    def __call__(self, x: Any, batch: Tree) -> Any:
        """Returns `x` after all blocks."""
        graph, layers = nnx.split(self.layers)
        return run_layers(_block(graph, None, first_site=1), layers, x, batch)


def run_layers(block: Callable, layers: Tree, x: Tree, batch: Tree) -> Tree:
    """Returns `x` after the blocks of `layers`, `[layers, ...]`."""

    def body(x, layer):
        return block(layer[0], x, batch, layer[1]), None

    numbers = jnp.arange(len(jax.tree.leaves(layers)[0]), dtype=jnp.int32)
    return jax.lax.scan(body, x, (layers, numbers))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A model as pure functions of its parameters; see `Model` in sharding/pipeline.

    `params` is the model's own tree of arrays; `split` cuts it into `ends` (all but the stacks) and
    `layers` (stack -> its parameters, with a leading layers dim), and `join` puts them together.
    """

    embed: Callable[[Tree, Tree], Tree]
    blocks: Mapping[str, Callable[[Tree, Tree, Tree, jax.Array], Tree]]
    before: Mapping[str, Callable[[Tree, Tree, Tree], Tree]]
    head: Callable[[Tree, Tree, Tree], tuple[jax.Array, jax.Array, dict]]
    num_layers: Mapping[str, int]  # of every stack, in the order in which they run
    teach: Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None = None

    def with_teacher_outputs(self, ends: Tree, x: Tree, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns types of the batch that the head gets.

        Args:
          x: type of what the last stack returns.
        """
        if self.teach is None:
            return batch
        return batch | jax.eval_shape(self.teach, ends, x, batch)

    def types(self, ends: Tree, batch: Tree) -> dict[str, tuple[Tree, Tree]]:
        """Returns stack -> types of what comes before it, and of what its blocks take and return.

        Args:
          ends, batch: arrays, or ShapeDtypeStructs of them.
        """
        types, x = {}, jax.eval_shape(self.embed, ends, batch)
        for name in self.num_layers:
            given = x
            if name in self.before:
                x = jax.eval_shape(self.before[name], ends, given, batch)
            types[name] = (given, x)
        return types

    def split(self, params: dict[str, Tree]) -> dict[str, Tree]:
        ends = {name: value for name, value in params.items() if name not in self.num_layers}
        return {"ends": ends, "layers": {name: params[name]["layers"] for name in self.num_layers}}

    def join(self, parts: dict[str, Tree]) -> dict[str, Tree]:
        stacks = {name: {"layers": layers} for name, layers in parts["layers"].items()}
        return {**parts["ends"], **stacks}


def partition(model: Any, *, remat: str, offload: Sequence[str] = ()) -> Parts:
    """Returns the model's functions; `model` may be abstract and is left as it is.

    Args:
      remat: what a block's backward finds: a key of REMAT_POLICIES, or names of activations, with
        commas between them.
      offload: names of activations that it finds too, and that lie in host memory meanwhile.

    Raises:
      ValueError: the model has no Stack, or several in no order, or lacks `embed` or `head`, or
        holds other state than parameters.
    """
    name = type(model).__name__
    stacks = _stacks(model)
    for method in ("embed", "head"):
        if not callable(getattr(model, method, None)):
            raise ValueError(f"{name} has no method {method!r}; see models/stack.py for the three")
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        if not isinstance(variable, nnx.Param):
            raise ValueError(
                f"{name}.{'.'.join(map(str, path))} is a {type(variable).__name__}: a model holds "
                "parameters alone (nnx.Param); for dropout use models.layers.basic.dropout"
            )
    without_stacks: Any = nnx.merge(*nnx.split(model))
    for stack in stacks:
        setattr(without_stacks, stack, None)
    ends_graph = nnx.split(without_stacks)[0]
    blocks, first_site, policy = {}, 1, _policy(remat, offload)
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
    """Returns the model's stacks in the order in which they run."""
    name = type(model).__name__
    found = {key: value for key, value in vars(model).items() if isinstance(value, Stack)}
    if not found:
        raise ValueError(f"{name} has no attribute of type models.stack.Stack; it must have one")
    # Not the order of assignment: NNX sorts the attributes of what it puts together.
    order = getattr(model, "stacks", tuple(found) if len(found) == 1 else ())
    unnamed = sorted(found.keys() - set(order))
    if unnamed:
        raise ValueError(
            f"{name} has the stacks {', '.join(sorted(found))}, and {', '.join(unnamed)} not in "
            f"{name}.stacks={order}; name all there, in the order in which they run"
        )
    return {key: found[key] for key in order if key in found}


def check(parts: Parts, params: Tree, batch: Tree) -> None:
    """Checks that the model's functions fit each other.

    Args:
      params: the model's, in the dtype that it computes in; ShapeDtypeStructs do.
      batch: as the model gets it; ShapeDtypeStructs do.

    Raises:
      ValueError: activations are not floating or change on their way, the head's sums are no
        scalars, or a metric has a name that is taken.
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
                "structure, shapes and dtypes must stay"
            )
    batch = parts.with_teacher_outputs(cut["ends"], x, batch)
    loss, weight, metrics = jax.eval_shape(parts.head, cut["ends"], x, batch)
    for name, value in {"loss": loss, "weight": weight, **metrics}.items():
        if value.shape:
            raise ValueError(
                f"head's {name} has the shape {value.shape}; it must be a sum: a scalar"
            )
    for name in sorted(RESERVED_METRICS & metrics.keys()):
        raise ValueError(f"head's metric {name!r} has a name that the step itself uses; rename it")


def _check_floating(function: str, x: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{function} returns {leaf.dtype}{list(leaf.shape)} at "
                f"x{jax.tree_util.keystr(path)}; activations must be floating, and what is not "
                "belongs in the batch"
            )


def can_share_vocab(model: Any) -> bool:
    """Returns whether the class whose `embed` and `head` the model has says that they can."""
    for cls in type(model).__mro__:
        if "can_share_vocab" in vars(cls):
            return cls.can_share_vocab
        if {"embed", "head"} & vars(cls).keys():
            return False
    return False


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)


def one_layer(layers: Tree) -> Tree:
    """Returns ShapeDtypeStructs of one layer of a stack's parameters."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


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


def _policy(remat: str, offload: Sequence[str]) -> Callable | None:
    """Returns what `jax.checkpoint` takes; None keeps all as it is."""
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
    """Returns the names that the model's blocks give to activations.

    Args:
      params, batch: as for `check`.
    """
    parts = partition(model, remat="none")
    cut = parts.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def differentiate(block, params, x, batch, number):
        return jax.vjp(lambda params, x: block(params, x, batch, number), params, x)

    found: set[str] = set()
    for stack, (_, x) in parts.types(cut["ends"], batch).items():
        block, args = parts.blocks[stack], (one_layer(cut["layers"][stack]), x, batch, number)
        found |= _names(jax.make_jaxpr(partial(differentiate, block))(*args).jaxpr)
    return found


def _names(jaxpr) -> set[str]:
    inner = [_names(j) for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params)]
    own = {eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "name"}
    return own.union(*inner)


def _block(graph, policy: Callable | None, *, first_site: int):
    """Returns `block(params, x, batch, number)`.

    Args:
      policy: of `jax.checkpoint`; None: all that the backward reads is kept.
      first_site: what layer 0 folds into the dropout keys: a number that nothing else folds in.
    """

    def block(params, x, batch, number):
        batch = batch | {"layer": number + (first_site - 1)}
        keys = batch.get("dropout_keys")
        if keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, first_site + number)
        return nnx.merge(graph, params)(x, batch, keys)

    return block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)
