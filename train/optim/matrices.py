"""The matrices of a model, which some optimizers update as matrices; AdamW updates the rest.

Matrices are kernels of linear layers and weights of experts, in stacks. The matrices of each layer
and each expert, and fused queries, keys and values, are updated separately.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from models.adapters import Target, all_targets
from sharding.ops.matrices import Arrays, on_whole_matrices
from sharding.spec import axes_by_dim, spec_of

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """The dims of one layer's parameter that are matrices.

    Attributes:
        batch: dims that count matrices, such as experts, or queries, keys and values.
        inputs: dims of the inputs.
        outputs: dims of the outputs.
    """

    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a parameter of this shape."""
        return math.prod(shape[i] for i in self.inputs), math.prod(shape[i] for i in self.outputs)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims in the order [*batch, *inputs, *outputs]."""
        return (*self.batch, *self.inputs, *self.outputs)

    def spec_in_order(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec of a stack's parameter after its dims but the first are in `order`."""
        axes = axes_by_dim(spec, 1 + len(self.order))
        return spec_of(axes[i] for i in (0, *(1 + i for i in self.order)))


#: Path of a parameter, as strings -> its matrices.
Matrices = Mapping[tuple[str, ...], Matrix]


def matrices_of(
    model: nnx.Module, stacks: Collection[str], not_decayed: Collection[str]
) -> Matrices:
    """Return the matrices of a model's stacks: kernels of linear layers, and weights of experts.

    Args:
        model: abstract model.
        stacks: names of its stacks.
        not_decayed: names of parameters, or of modules, that are not matrices to the optimizer.
    """
    matrices = {}
    for name, target in all_targets(model).items():
        path = tuple(name.split("."))
        if path[-1] != target.weight:  # the name of a linear layer; of an expert's weight otherwise
            path = (*path, target.weight)
        if path[0] in stacks and not {*path} & {*not_decayed}:
            matrices[path] = _matrix_of(target)
    return matrices


def _matrix_of(target: Target) -> Matrix:
    """Return the matrices of a weight in a stack, whose first dim is the layers'."""
    axes = getattr(target.module, target.weight).get_metadata()["out_sharding"][1:]
    dims = range(len(axes))
    first_output = target.num_batch + target.num_inputs
    outputs = dims[first_output:]
    # Fused matrices have a first dim without a name, and so with others after it.
    fused = outputs[: int(len(outputs) > 1 and axes[first_output] is None)]
    return Matrix(
        batch=(*dims[: target.num_batch], *fused),
        inputs=tuple(dims[target.num_batch : first_output]),
        outputs=tuple(outputs[len(fused) :]),
    )


def path_names(path: tuple) -> tuple[str, ...]:
    """Return the keys of a parameter's path as strings."""
    return tuple(str(key.key) for key in path)


def for_matrices(
    name: str,
    matrices: Matrices,
    optimizer: optax.GradientTransformation,
    other: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return `optimizer` for the parameters in `matrices`, and `other` for all others.

    Unlike `optax.multi_transform`, it can be called for a part of the parameters, whose trees have
    None for the rest.

    Args:
        name: key of `optimizer` in the state; that of `other` is "adamw".
        matrices: parameters of `optimizer`.
        optimizer: transformation of the parameters in `matrices`.
        other: transformation of all other parameters.
    """
    parts = {name: optimizer, "adamw": other}

    def pick(tree: Tree, part: str) -> Tree:
        def picked(path: tuple, x: Any) -> Any:
            return x if (path_names(path) in matrices) == (part == name) else None

        return jax.tree_util.tree_map_with_path(picked, tree)

    def init(params: Tree) -> Tree:
        return {key: part.init(pick(params, key)) for key, part in parts.items()}

    def update(updates: Tree, state: Any, params: Tree = None, **others: Any) -> tuple[Tree, Tree]:
        results = {
            key: optax.with_extra_args_support(part).update(
                pick(updates, key), state[key], pick(params, key), **others
            )
            for key, part in parts.items()
        }
        merged = jax.tree.map(
            lambda x, y: y if x is None else x,
            *(updates for updates, _ in results.values()),
            is_leaf=lambda x: x is None,
        )
        return merged, {key: state for key, (_, state) in results.items()}

    return optax.GradientTransformationExtraArgs(init, update)


def on_slots(
    function: Callable[..., Arrays],
    specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    num_batch: int,
) -> Callable[..., Arrays]:
    """Return a function of one layer's arrays, which devices divide for all slots under `vmap`.

    Args:
        function: maps arrays `[matrices, ...]` to a tuple of them, each matrix by itself.
        specs: how each array of a stack is split, with the slot dim.
        out_specs: how each result is split.
        num_batch: number of leading dims of a stack's arrays that count matrices, with the slots.
    """

    def alone(*arrays: jax.Array) -> Arrays:
        batch = arrays[0].shape[: num_batch - 1]
        flat = [x.reshape(math.prod(batch), *x.shape[num_batch - 1 :]) for x in arrays]
        return tuple(x.reshape(*batch, *x.shape[1:]) for x in function(*flat))

    run = custom_vmap(alone)

    # Under vmap, XLA would not know that the matrices can be divided over all devices.
    @run.def_vmap
    def _(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple[Arrays, Any]:
        assert all(in_batched)
        results = on_whole_matrices(function, arrays, specs, out_specs, num_batch)
        return results, (True,) * len(results)

    return run
