"""The parts of a model: embed, stacks of identical blocks, and head.

    batch --embed--> x --stack of blocks--> x --head--> (loss_sum, weight_sum, metrics)

A model is an `nnx.Module` with

- `embed(batch) -> x`, which turns tokens or patches into activations.
- One or more attributes of type `Stack`, whose blocks are called as `block(x, batch, keys) -> x`. A
  model with several stacks lists them in the order in which they run:
  `stacks = ("encoder", "decoder")`.
- Optionally `before_<stack>(x, batch) -> x`, which runs before the first block of that stack, e.g.
  to embed decoder inputs. It may return another structure or other shapes.
- `head(x, batch) -> (loss_sum, weight_sum, metrics)`, which returns scalars: sums over the tokens
  of the batch. Sums of all microbatches, devices and batches are added up before they are divided:
  the loss and the metrics by the sum of weights. A metric with weights of its own is a pair
  (sum, sum of its weights); the first can be several sums, `Extremes` of models/metrics.py. If
  losses with different weights are added, `loss_sum` and `weight_sum` are dicts with an entry per
  loss, which is also a metric of that name. The loss is then the sum of the means. Each sum of
  weights is then the sum of one array of the batch, `weights` or `*_weights`, because a training
  step scales these to the same sum.

`x` is an array or a tree of arrays, all of a floating dtype. It keeps its structure, shapes and
dtypes within a stack. `batch` is a dict of arrays with a leading batch dim. During training,
`batch["dropout_keys"]` is key[B], and `keys` are these keys with the layer's number folded in;
otherwise there are no such keys, and `keys` is None. `batch["index"]`, uint32[B], has the number of
each example in the run. A block finds the number of its layer, counted from 0 over all stacks, in
`batch["layer"]`, int32[].

B is the number of examples in the batch that a model sees. In a training step these are the
examples of one microbatch on one replica; a model knows of no other microbatch or replica.

A model runs with `mesh.context` too if its class and those of its blocks have
`can_split_sequence = True`; one that overrides `embed` or `head`, or `__call__` or `attend` of a
block, must declare it again. In a step it then sees only some tokens of every row. Attention takes
care of that; for positions, for whole rows and for losses of whole rows a model uses
sharding/ops/sequence.py.

The `__call__` of a model (such as `GPT2.__call__`) and of a `Stack`, and `run_layers`, are for use
from Python and to check converted models; training runs the same blocks through
pipeline/runtime.

Blocks name activations with `jax.ad_checkpoint.checkpoint_name`. A config can then save only these
for the backward pass, or move them to host memory between the forward and the backward pass.

A class can declare further properties:

- `can_share_vocab = True`: `embed` and `head` can compute with a part of the vocab, because they
  use `models.layers.basic.lookup` and `models.losses.chunked_vocab_loss`. A subclass that overrides
  either of the two methods must declare it again. It may be a property that depends on the config.
- `can_split_tokens = True`, in the class of a block: it mixes tokens only in `Attention`, `MLP` and
  `across_tokens` of models/layers/transformer.py, or calls `gather_tokens` before it mixes or
  slices them. Between such blocks, tokens may be split over devices; see sharding/logical.py.
- `teach(x, batch) -> arrays [B, ...]`: the model learns from a teacher, which is the exponential
  moving average (EMA) of its own parameters (`train.ema_decay`). Before a step, the stacks run with
  the teacher's parameters and without dropout, and `teach` receives their output instead of `head`.
  `head` then finds the arrays that `teach` returned in its batch.
- `outputs(x) -> models.losses.VocabLogits`: the logits of the vocab, for
  `data.objective=preference`.
- `sees_whole_batch = True`: `head` or `teach` compares examples of the whole batch with each other,
  using sharding/logical.py. Such a batch is a single microbatch.
- `loss_stacks = ("mtp",)`: stacks at the end that only a loss needs; a generation leaves them out.
- `objectives = ("causal_lm",)`: the model only supports these values of `data.objective`.
- `after_update(sums, layer_of_slot) -> {path: change}`: changes of parameters that no gradient
  makes, from the sums of a whole batch; they are added after each update by the optimizer.
  `layer_of_slot` is int[slots] for each stack, whose parameters have a leading dim of slots; -1 is
  padding.
- `not_decayed = ("class_token",)`: names of parameters, or of modules that contain them, without
  weight decay. Weight decay applies to matrices and tables, but never to a vector, `bias` or
  `scale`. The `layers` axis of a stack does not count: a vector in each block is still a vector.
"""

import contextlib
import re
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fields.numbers import MAX_LAYERS
from models.layers.basic import float8_kernels, use_float8
from models.layers.lora import use_dropout
from sharding.context_values import bound
from sharding.logical import constrain_residual

Tree = Any

#: Sums of losses, or of their weights: of one loss, or name of a loss -> its sum.
Sums = jax.Array | dict[str, jax.Array]

#: Primitives whose results are never saved: functions made by `models.layers.basic.recomputed`, and
#: views and casts, whose argument is saved instead.
_RECOMPUTED = (
    "remat_opt",
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "convert_element_type",
    "sharding_constraint",
)


def _saves_what_is_costly(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that recomputes norms, activations and views."""
    return primitive.name not in _RECOMPUTED


#: What layers keep by `train.remat`, unless it is a list of names: the values of a block's forward
#: pass that are saved for its backward pass. All others are recomputed.
REMAT_POLICIES: dict[str, Callable] = {
    "none": _saves_what_is_costly,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

_only_layers: ContextVar[jax.Array | None] = ContextVar("only_layers", default=None)


def only_layers(numbers: jax.Array) -> contextlib.AbstractContextManager:
    """Make stacks that are constructed in this context have only some of their layers.

    Args:
        numbers: int32[n], numbers of the layers. Their parameters are bitwise the same as in a full
            stack.
    """
    return bound(_only_layers, numbers)


def layer_numbers(num_layers: int) -> jax.Array:
    """Return the numbers of the layers that a stack of `num_layers` layers has here, int32[n]."""
    numbers = _only_layers.get()
    return jnp.arange(num_layers, dtype=jnp.int32) if numbers is None else numbers


MakeBlock = Callable[[nnx.Rngs], nnx.Module]


class Period(nnx.Module):
    """Blocks of several kinds, one after another, which together are one block of a stack.

    The layers of a model that repeats a pattern, such as five layers with a sliding window and one
    without, are a stack of such periods: `block_0`, `block_1`, ... Each of these blocks is a layer:
    it has a number of its own, and saves its own values for the backward pass.
    """

    def __init__(self, make_blocks: Sequence[MakeBlock], rngs: nnx.Rngs):
        self.names = tuple(f"block_{number}" for number in range(len(make_blocks)))
        for name, make in zip(self.names, make_blocks, strict=True):
            setattr(self, name, make(rngs))

    @property
    def can_split_tokens(self) -> bool:
        """Whether the tokens may be split between all of the blocks."""
        return all(can_split_tokens(getattr(self, name)) for name in self.names)


def periods(
    types: Sequence[Hashable],
) -> tuple[tuple[Sequence[Hashable], int], tuple[Sequence[Hashable], int] | None]:
    """Divide the layers of a model into one stack of periods, or two if that makes shorter periods.

    Args:
        types: type of each layer.

    Returns:
        For each stack, the types of the layers of a period, and the number of periods; None instead
        of a second stack. For `wwwfwwwfw` they are `wwwf` twice and `w` once.
    """

    def period(types: Sequence[Hashable]) -> tuple[Sequence[Hashable], int]:
        size = len(types)
        lengths = (n for n in range(1, size + 1) if size % n == 0)
        length = next(n for n in lengths if types[n:] == types[:-n])
        return types[:length], size // length

    whole = period(types)
    if len(whole[0]) == 1:
        return whole, None
    cuts = [(period(types[:cut]), period(types[cut:])) for cut in reversed(range(1, len(types)))]
    first, second = min(cuts, key=lambda two: len(two[0][0]) + len(two[1][0]))
    is_shorter = len(first[0]) + len(second[0]) < len(whole[0])
    return (first, second) if is_shorter else (whole, None)


def number_in_period(path: Sequence[str]) -> int:
    """Return the number, in its period, of the block that a parameter belongs to; 0 without one.

    Args:
        path: keys of the parameter in the tree of all parameters.
    """
    names = [name for name in path if re.fullmatch(r"block_\d+", name)]
    return int(names[0].removeprefix("block_")) if names else 0


class Stack(nnx.Module):
    """`num_layers` identical blocks whose parameters are stacked on a leading `layers` axis.

    Args:
        make_block: returns a block; or several functions that return the blocks of a `Period`.
        num_layers: number of blocks or periods.
        rngs: random keys for the initialization.
    """

    def __init__(
        self, make_block: MakeBlock | Sequence[MakeBlock], num_layers: int, *, rngs: nnx.Rngs
    ):
        if not callable(make_block):
            several = [*make_block]
            make_block = several[0] if len(several) == 1 else partial(Period, several)
        if num_layers > MAX_LAYERS:
            raise ValueError(
                f"the model has a stack of {num_layers} layers, but at most {MAX_LAYERS} are "
                "supported; choose fewer"
            )
        make = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})

        @nnx.split_rngs(splits=num_layers)
        def make_layers(rngs: nnx.Rngs) -> nnx.Module:
            if _only_layers.get() is None:
                return make(rngs)
            numbers = layer_numbers(num_layers)
            # Each layer has its own RNG key, so some layers can be made without the others.
            graph, keys = nnx.split(rngs)
            return make(nnx.merge(graph, jax.tree.map(lambda x: x[numbers], keys)))

        self.layers = make_layers(rngs)
        self.num_layers = num_layers

    @property
    def layers_per_block(self) -> int:
        """Number of layers of a block: more than 1 for a `Period`."""
        return len(self.layers.names) if isinstance(self.layers, Period) else 1

    @property
    def block_paths(self) -> tuple[tuple[str, ...], ...]:
        """Path of each layer of a block in the parameters of the block; () without a `Period`."""
        names = self.layers.names if isinstance(self.layers, Period) else ()
        return tuple((name,) for name in names) or ((),)

    def __call__(self, x: Any, batch: Tree) -> Any:
        """Apply all blocks to `x`."""
        block = block_function(self.layers, None, first_layer=0)
        return run_layers(block, nnx.split(self.layers)[1], x, batch)


def run_stacks(model: Any, x: Any, batch: Tree) -> Any:
    """Apply the stacks that a generation needs to the output of `embed`, each with `before_`."""
    for name in model.stacks:
        if name in getattr(model, "loss_stacks", ()):
            continue
        if hasattr(model, f"before_{name}"):
            x = getattr(model, f"before_{name}")(x, batch)
        stack = getattr(model, name)
        x = x if stack is None else stack(x, batch)
    return x


def run_layers(block: Callable, layers: Tree, x: Tree, batch: Tree) -> Tree:
    """Apply blocks to `x`, one after another.

    Args:
        block: function as returned by `block_function`.
        layers: parameters of the blocks, stacked along a leading layers dim.
        x: activations.
        batch: dict of arrays [B, ...].
    """

    def body(x, layer):
        return block(layer[0], x, batch, layer[1]), None

    numbers = jnp.arange(len(jax.tree.leaves(layers)[0]), dtype=jnp.int32)
    return jax.lax.scan(body, x, (layers, numbers))[0]


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


def saved_names(remat: str) -> tuple[str, ...]:
    """Return the names of activations that layers keep; () if it is a key of REMAT_POLICIES."""
    return () if remat in REMAT_POLICIES else tuple(remat.split(","))


def checkpoint_policy(remat: str, offload: Sequence[str]) -> Callable:
    """Return a policy for `jax.checkpoint`: which values a block saves for its backward pass."""
    policies = jax.checkpoint_policies
    saves = REMAT_POLICIES.get(remat) or policies.save_only_these_names(*saved_names(remat))
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


def can_split_tokens(block: nnx.Module) -> bool:
    """Return whether the class of a block declares that its tokens may be split between blocks."""
    return getattr(block, "can_split_tokens", False)


def split_over_mesh(x: Tree, unchanged: Tree = None) -> Tree:
    """Split activations over the mesh as between two blocks; see sharding/logical.py.

    Args:
        x: activations, as `embed`, a block or a `before` function returns them. Arrays of other
            shapes than [B, T, D] stay as they are: their model splits them.
        unchanged: arrays that stay as they are where they are in `x`.
    """
    same = {id(leaf) for leaf in jax.tree.leaves(unchanged)}

    def split(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.ndim != 3 or id(leaf) in same else constrain_residual(leaf)

    return jax.tree.map(split, x)


def block_function(
    blocks: nnx.Module, policy: Callable | None, *, first_layer: int, in_float8: bool = False
) -> Callable:
    """Return `block(params, x, microbatch, number, scaling=None)`, one block of a stack.

    `number` is the block's number within the stack, int32[], from 0. `scaling` has the scales of
    the block's products in float8; None: current scaling.

    Args:
        blocks: any block of the stack, or all of them, stacked.
        policy: policy for `jax.checkpoint`; None saves everything that the backward pass reads.
        first_layer: number of the stack's first layer, counted from 0 over all stacks. Layer n of
            all stacks folds 1 + n into the dropout keys, so no two layers draw the same masks.
        in_float8: whether linear layers and experts compute in float8; see models/layers/float8.py.
    """
    if not isinstance(blocks, Period):
        return _layer_function(
            nnx.split(blocks)[0], policy, first_layer=first_layer, in_float8=in_float8
        )
    names = blocks.names
    in_blocks = [path[0] for path in float8_kernels(blocks)]
    functions = [
        _layer_function(
            nnx.split(getattr(blocks, name))[0],
            policy,
            first_layer=first_layer + place,
            in_float8=in_float8,
        )
        for place, name in enumerate(names)
    ]

    def period(params, x, microbatch, number, scaling=None):
        for name, function in zip(names, functions, strict=True):
            of_block = scaling
            if scaling is not None:
                start = in_blocks.index(name)
                of_block = scaling[start : start + in_blocks.count(name)]
            x = function(params[name], x, microbatch, len(names) * number, of_block)
        return x

    return period


def _layer_function(
    graph, policy: Callable | None, *, first_layer: int, in_float8: bool
) -> Callable:
    """Return the function of one layer; arguments as for `block_function`.

    Args:
        graph: graph definition of the layer.
        policy: as there.
        first_layer: number of the layer for `number` 0.
        in_float8: as there.
    """

    def block(params, x, microbatch, number, scaling=None):
        batch = microbatch | {"layer": number + first_layer}
        keys = batch.get("dropout_keys")
        if keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1 + first_layer + number)
        layer = nnx.merge(graph, params)
        if in_float8:
            use_float8(layer, scaling)
        use_dropout(layer, keys)
        y = layer(x, batch, keys)
        return split_over_mesh(y, unchanged=x) if can_split_tokens(layer) else y

    return block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)
