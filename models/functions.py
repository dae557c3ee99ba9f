"""A model as pure functions of its parameters, which the training step and the pipeline call."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import float8_kernels
from models.losses import VocabLogits
from models.stack import (
    Period,
    Stack,
    Sums,
    block_function,
    can_split_tokens,
    checkpoint_policy,
    split_over_mesh,
)
from sharding.jaxprs import walk

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFunctions:
    """A model as pure functions of its parameters; for the pipeline's runtime.

    The model's parameters are a tree of arrays, `params`. `split` separates them into
    `non_stack` (everything except the stacks: embedding, head and `before` functions) and `stacks`
    (stack -> its parameters, with a leading layers dim). `join` is its inverse.
    """

    embed: Callable[[Tree, Tree], Tree]
    blocks: Mapping[str, Callable[[Tree, Tree, Tree, jax.Array], Tree]]
    before: Mapping[str, Callable[[Tree, Tree, Tree], Tree]]
    head: Callable[[Tree, Tree, Tree], tuple[Sums, Sums, dict]]
    # (non_stack, x [B, T, D]) -> logits [B, T, V]; None: the model cannot generate text.
    logits: Callable[[Tree, jax.Array], jax.Array] | None
    # number of blocks per stack, in the order in which stacks run; and of layers per block
    num_layers: Mapping[str, int]
    layers_per_block: Mapping[str, int]
    # (non_stack, x [B, T, D]) -> logits of the vocab; see models/stack.py
    outputs: Callable[[Tree, jax.Array], VocabLogits] | None
    # stack -> paths of the kernels of a block whose products are in float8; see models/layers
    float8_kernels: Mapping[str, tuple[tuple, ...]]
    teach: Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None = None
    # (sums of a step, stack -> number of the layer in each slot) -> path -> change that is added to
    # the parameter after the optimizer's update
    after_update: Callable[[Mapping, Mapping], Mapping[tuple[str, ...], jax.Array]] | None = None
    # Like `teach`, but evaluated with the initial parameters, for preferences: returns arrays that
    # are added to the batches of the run; see models/preference.py.
    reference: Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None = None
    # As from `split`: whether each parameter is frozen; None: no parameter is.
    frozen: dict[str, Tree] | None = None

    def with_teacher_output_types(
        self, non_stack_params: Tree, x: Tree, microbatch: dict[str, Any]
    ) -> dict[str, Any]:
        """Add the types of the teacher outputs to a microbatch's types; the head receives both.

        Args:
            non_stack_params: parameters outside the stacks.
            x: output type of the last stack.
            microbatch: types of the microbatch, without teacher outputs.
        """
        if self.teach is None:
            return microbatch
        return microbatch | jax.eval_shape(self.teach, non_stack_params, x, microbatch)

    def activation_types(
        self, non_stack_params: Tree, microbatch: Tree
    ) -> dict[str, tuple[Tree, Tree]]:
        """Return, per stack, the types of the activations before it and of its blocks.

        Args:
            non_stack_params: parameters outside the stacks, as arrays or ShapeDtypeStructs.
            microbatch: arrays [B, ...] or ShapeDtypeStructs.

        Returns:
            stack -> (type of the input of `before_<stack>`, type of the activations in the stack).
            The two are equal for a stack without `before_<stack>`.
        """
        types = {}
        x = jax.eval_shape(self.embed, non_stack_params, microbatch)
        for name in self.num_layers:
            input_type = x
            if name in self.before:
                x = jax.eval_shape(self.before[name], non_stack_params, input_type, microbatch)
            types[name] = (input_type, x)
        return types

    def split(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Split the model's parameters into `non_stack` and `stacks`."""
        return {
            "non_stack": {name: x for name, x in params.items() if name not in self.num_layers},
            "stacks": {name: params[name]["layers"] for name in self.num_layers},
        }

    def join(self, parts: dict[str, Tree]) -> dict[str, Tree]:
        """Merge `non_stack` and `stacks` into the model's parameters, as the inverse of `split`."""
        stacks = {name: {"layers": layers} for name, layers in parts["stacks"].items()}
        return {**parts["non_stack"], **stacks}


def functions_of(
    model: Any, *, remat: str | None, offload: Sequence[str] = (), in_float8: bool = False
) -> ModelFunctions:
    """Return a model's functions.

    Args:
        model: model, which may be abstract and is not modified.
        remat: values of a block's forward pass that are saved for its backward pass: a key of
            REMAT_POLICIES, or names of activations, separated by commas. None: the blocks have no
            backward pass.
        offload: names of activations that are saved as well, but in host memory.
        in_float8: whether linear layers and experts of the stacks compute in float8; see
            models/layers/float8.py.

    Raises:
        ValueError: if the model has no Stack, has several Stacks without an order, lacks `embed` or
            `head`, or has state other than parameters.
    """
    stacks = _stacks(model)
    _check_module(model)
    without_stacks: Any = nnx.merge(*nnx.split(model))
    for stack in stacks:
        setattr(without_stacks, stack, None)
    non_stack_graph = nnx.split(without_stacks)[0]
    policy = None if remat is None else checkpoint_policy(remat, offload)

    def method(name: str) -> Callable:
        """Return `f(non_stack_params, *args)`, which calls a method of the model."""

        def call(non_stack_params: Tree, *args: Tree) -> Any:
            return getattr(nnx.merge(non_stack_graph, non_stack_params), name)(*args)

        return call

    return ModelFunctions(
        embed=_splitting(method("embed"), next(iter(stacks.values()))),
        blocks=_block_functions(stacks, policy, in_float8=in_float8),
        before={
            key: _splitting(method(f"before_{key}"), stack)
            for key, stack in stacks.items()
            if hasattr(model, f"before_{key}")
        },
        head=method("head"),
        logits=method("logits") if hasattr(model, "logits") else None,
        outputs=method("outputs") if hasattr(model, "outputs") else None,
        num_layers={key: stack.num_layers for key, stack in stacks.items()},
        layers_per_block={key: stack.layers_per_block for key, stack in stacks.items()},
        float8_kernels={
            key: tuple(float8_kernels(stack.layers)) if in_float8 else ()
            for key, stack in stacks.items()
        },
        teach=method("teach") if hasattr(model, "teach") else None,
        after_update=getattr(model, "after_update", None),
    )


def _block_functions(
    stacks: Mapping[str, Stack], policy: Callable | None, *, in_float8: bool
) -> dict[str, Callable]:
    """Return the function of a block of each stack; layers are counted over all stacks."""
    blocks = {}
    first_layer = 0
    for key, stack in stacks.items():
        blocks[key] = block_function(
            stack.layers, policy, first_layer=first_layer, in_float8=in_float8
        )
        first_layer += stack.num_layers * stack.layers_per_block
    return blocks


def _splitting(function: Callable, stack: Stack) -> Callable:
    """Return a function whose result, the input of a stack, is split over the mesh if it may be."""
    if not can_split_tokens(stack.layers):
        return function
    return lambda *args: split_over_mesh(function(*args))


def _check_module(model: Any) -> None:
    """Check that a model has `embed` and `head`, and no state other than parameters."""
    name = type(model).__name__
    for method in ("embed", "head"):
        if not callable(getattr(model, method, None)):
            raise ValueError(
                f"{name} has no method {method!r}; models/stack.py describes what a model needs"
            )
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        if not isinstance(variable, nnx.Param):
            raise ValueError(
                f"{name}.{'.'.join(map(str, path))} is a {type(variable).__name__}: a model may "
                "only hold nnx.Param; for dropout use models.layers.dropout.dropout"
            )


def _stacks(model: Any) -> dict[str, Stack]:
    """Return the model's stacks in the order in which they run."""
    name = type(model).__name__
    stacks = {key: value for key, value in vars(model).items() if isinstance(value, Stack)}
    if not stacks:
        raise ValueError(f"{name} has no attribute of type models.stack.Stack; add one")
    # The order of assignment is lost: NNX sorts attributes when it merges a module.
    order = getattr(model, "stacks", tuple(stacks) if len(stacks) == 1 else ())
    unnamed = sorted(stacks.keys() - set(order))
    if unnamed:
        raise ValueError(
            f"{name} has the stacks {', '.join(sorted(stacks))}, and {', '.join(unnamed)} not in "
            f"{name}.stacks={order}; list all of them there, in the order in which they run"
        )
    return {key: stacks[key] for key in order if key in stacks}


def can_share_vocab(model: Any) -> bool:
    """Return whether the class that defines the model's `embed` and `head` can share the vocab."""
    return _declares(model, "can_share_vocab", {"embed", "head"})


def cannot_split_sequence(model: Any) -> str:
    """Return the name of a class that does not declare that it sees a part of a sequence, or "".

    It is the class of the model, or of one of its blocks, that defines the computation.
    """
    if not _declares(model, "can_split_sequence", {"embed", "head"}):
        return type(model).__name__
    for stack in _stacks(model).values():
        layer = stack.layers
        is_period = isinstance(layer, Period)
        for block in [getattr(layer, name) for name in layer.names] if is_period else [layer]:
            if not _declares(block, "can_split_sequence", {"__call__", "attend"}):
                return type(block).__name__
    return ""


def _declares(module: Any, name: str, methods: set[str]) -> bool:
    """Return the declaration of a class, or of its first base that has one or defines a method."""
    for cls in type(module).__mro__:
        if name in vars(cls):
            return getattr(module, name)
        if methods & vars(cls).keys():
            return False
    return False


def one_layer(layers: Tree) -> Tree:
    """Return the parameters of one layer of a stack as ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def named_activations(model: Any, params: Tree, microbatch: Tree) -> set[str]:
    """Return the names that the model's blocks give to activations.

    Args:
        params: as for `models.check.check`.
        microbatch: as for `models.check.check`.
    """
    # Not the run's own functions: `train.remat` may name activations that do not exist.
    functions = functions_of(model, remat="none")
    parts = functions.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def differentiate(block, params, x, microbatch, number):
        return jax.vjp(lambda params, x: block(params, x, microbatch, number), params, x)

    activation_names: set[str] = set()
    for stack, (_, x) in functions.activation_types(parts["non_stack"], microbatch).items():
        block = functions.blocks[stack]
        args = (one_layer(parts["stacks"][stack]), x, microbatch, number)
        jaxpr = jax.make_jaxpr(partial(differentiate, block))(*args).jaxpr
        names = (eqn for eqn, _ in walk(jaxpr.eqns) if eqn.primitive.name == "name")
        activation_names.update(eqn.params["name"] for eqn in names)
    return activation_names
