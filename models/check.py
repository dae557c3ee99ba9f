"""Checks that the functions of a model fit together, and follow the rules of models/stack.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.functions import ModelFunctions, one_layer
from models.stack import Sums
from sharding.jaxprs import reads

Tree = Any

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
    "float8_overflows",
    "float8_underflows",
}


def check(functions: ModelFunctions, params: Tree, microbatch: Tree) -> None:
    """Check that the model's functions fit together.

    Args:
        functions: model's functions.
        params: its parameters, in the dtype that it computes in; may be ShapeDtypeStructs.
        microbatch: batch as the model receives it; may be ShapeDtypeStructs.

    Raises:
        ValueError: if activations are not floating or change their type within a stack, or if the
            results of `head` are not as models/stack.py describes them.
    """
    parts = functions.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    _check_floating("embed", jax.eval_shape(functions.embed, parts["non_stack"], microbatch))
    x = None
    for stack, (_, x) in functions.activation_types(parts["non_stack"], microbatch).items():
        if stack in functions.before:
            _check_floating(f"before_{stack}", x)
        layer = one_layer(parts["stacks"][stack])
        y = jax.eval_shape(functions.blocks[stack], layer, x, microbatch, number)
        if _shapes(y) != _shapes(x):
            raise ValueError(
                f"a block of {stack} takes activations {_shapes(x)} and returns {_shapes(y)}; "
                "a block must keep their structure, shapes and dtypes"
            )
    microbatch = functions.with_teacher_output_types(parts["non_stack"], x, microbatch)
    _check_head(functions, parts["non_stack"], x, microbatch)


def _check_head(functions: ModelFunctions, non_stack_params: Tree, x: Tree, batch: dict) -> None:
    """Check the results of a model's head."""
    loss, weight, metrics = jax.eval_shape(functions.head, non_stack_params, x, batch)
    for name, sums in (("loss", loss), ("weight", weight)):
        values = list(sums.values()) if isinstance(sums, dict) else [sums]
        if not values or not all(hasattr(value, "shape") for value in values):
            raise ValueError(
                f"head's {name} is of type {type(sums).__name__}; it must be a scalar, or a dict "
                "of scalars that is not empty"
            )
    # The sum of a metric with weights of its own may be an array.
    scalars = {name: x[1:] if isinstance(x, tuple) else x for name, x in metrics.items()}
    for name, values in {"loss": loss, "weight": weight, **scalars}.items():
        for value in jax.tree.leaves(values):
            if value.shape:
                raise ValueError(
                    f"head's {name} has the shape {value.shape}; it must be a scalar, a sum over "
                    "tokens"
                )
    names, weight_names = (set(x) if isinstance(x, dict) else None for x in (loss, weight))
    if names != weight_names:
        raise ValueError(
            f"head's sums of losses are {_describe(loss)}, and its sums of weights "
            f"{_describe(weight)}; return a scalar for both, or dicts with the same keys"
        )
    for name in sorted(RESERVED_METRICS & {*metrics, *(names or ())}):
        raise ValueError(f"head's metric {name!r} has a name that the step itself uses; rename it")
    for name, value in metrics.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        if name in (names or ()):
            raise ValueError(f"head's metric {name!r} has the name of a loss; rename it")
        if isinstance(value, tuple | list | dict) and not is_pair:
            raise ValueError(
                f"head's metric {name!r} must be a sum, or a pair (sum, sum of its weights)"
            )
        if names is not None and not is_pair:
            raise ValueError(
                f"head has several losses, so its metric {name!r} must be a pair (sum, sum of its "
                "weights)"
            )
    _check_weights(functions, non_stack_params, x, batch, names)


def _check_weights(
    functions: ModelFunctions, non_stack_params: Tree, x: Tree, batch: dict, names: set[str] | None
) -> None:
    """Check that each sum of losses has one array of weights.

    Args:
        functions: model's functions.
        non_stack_params: parameters outside the stacks.
        x: input of the head.
        batch: batch of the head.
        names: names of the losses; None: there is only one.
    """

    def arrays_read(result: Callable[[Any, Any], jax.Array]) -> list[str]:
        def run(batch: dict, non_stack_params: Tree, x: Tree) -> jax.Array:
            return result(*functions.head(non_stack_params, x, batch)[:2])

        is_read = reads(run, batch, non_stack_params, x)
        return sorted(name for name in batch if any(jax.tree.leaves(is_read[name])))

    weights = [name for name in batch if name.endswith("weights")]
    if names is None:
        read = arrays_read(lambda loss, _: loss) if len(weights) > 1 else []
        if len({*read} & {*weights}) > 1:
            raise ValueError(
                f"head's loss depends on {' and '.join(sorted({*read} & {*weights}))}, but has one "
                "sum of weights; return a dict of sums of losses, and a dict of their weights"
            )
        return
    for name in sorted(names):
        read = arrays_read(lambda _, weight, name=name: weight[name])
        if len(read) != 1 or read[0] not in weights:
            raise ValueError(
                f"head's weight of the loss {name!r} depends on {', '.join(read) or 'nothing'} of "
                "the batch; with several losses, it must be the sum of one array of weights"
            )


def _describe(sums: Sums) -> str:
    return f"{{{', '.join(sums)}}}" if isinstance(sums, dict) else "a scalar"


def _check_floating(function: str, x: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{function} returns {leaf.dtype}{list(leaf.shape)} at "
                f"x{jax.tree_util.keystr(path)}; activations must be floating, so put other arrays "
                "into the batch"
            )


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
