"""Muon: momentum whose matrices are orthogonalized; AdamW for all other parameters.

For a matrix W with gradient G, momentum μ, learning rate γ and weight decay λ:

    B ← μ B + G
    O = orthogonalize(G + μ B)        about U Vᵀ, for the singular value decomposition U S Vᵀ
    W ← W - γ (s O + λ W)             s depends on the shape, see SCALES

Matrices are kernels of linear layers and weights of experts, in stacks. The matrices of each
layer and each expert, and fused queries, keys and values, are orthogonalized separately.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training" (2025),
arXiv:2502.16982, section 2.2.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from models.adapters import Target, all_targets
from sharding.ops.matrices import on_whole_matrices
from sharding.spec import axes_by_dim, spec_of

Tree = Any

#: Coefficients of a Newton-Schulz step, as published.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_STEPS = 5
#: Smallest norm that a matrix is divided by.
_EPSILON = 1e-7

#: Factors of an orthogonalized update, for a matrix with these numbers of inputs and outputs.
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),
    "original": lambda inputs, outputs: math.sqrt(max(1, outputs / inputs)),
}


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


def scale_by_muon(
    matrices: Matrices, momentum: float, scale: str, compute_dtype: np.dtype
) -> optax.GradientTransformationExtraArgs:
    """Orthogonalize the momentum of matrices, and scale it by their shape.

    Args:
        matrices: matrices of every parameter that it is called with.
        momentum: momentum, with Nesterov's look-ahead.
        scale: one of SCALES.
        compute_dtype: dtype of the Newton-Schulz steps.
    """
    trace = optax.trace(momentum, nesterov=True) if momentum else optax.identity()

    def update(
        updates: Tree, state: Any, params: Tree = None, param_layout: Tree = None, **_: Any
    ) -> tuple[Tree, Any]:
        specs = {} if param_layout is None else dict(jax.tree.leaves_with_path(param_layout))
        updates, state = trace.update(updates, state, params)

        def orthogonal(path: tuple, x: jax.Array) -> jax.Array:
            matrix = matrices[path_names(path)]
            target = specs.get(path)
            spec = PartitionSpec() if target is None else target.sharding.spec
            run = _orthogonalize(matrix, spec, compute_dtype)
            return run(x) * SCALES[scale](*matrix.sizes(x.shape))

        return jax.tree_util.tree_map_with_path(orthogonal, updates), state

    return optax.GradientTransformationExtraArgs(trace.init, update)


def for_matrices(
    matrices: Matrices, optimizer: optax.GradientTransformation, other: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return `optimizer` for the parameters in `matrices`, and `other` for all others.

    Unlike `optax.multi_transform`, it can be called for a part of the parameters, whose trees have
    None for the rest.
    """
    parts = {"muon": optimizer, "adamw": other}

    def pick(tree: Tree, name: str) -> Tree:
        def picked(path: tuple, x: Any) -> Any:
            return x if (path_names(path) in matrices) == (name == "muon") else None

        return jax.tree_util.tree_map_with_path(picked, tree)

    def init(params: Tree) -> Tree:
        return {name: part.init(pick(params, name)) for name, part in parts.items()}

    def update(updates: Tree, state: Any, params: Tree = None, **others: Any) -> tuple[Tree, Tree]:
        results = {
            name: optax.with_extra_args_support(part).update(
                pick(updates, name), state[name], pick(params, name), **others
            )
            for name, part in parts.items()
        }
        merged = jax.tree.map(
            lambda x, y: y if x is None else x,
            *(updates for updates, _ in results.values()),
            is_leaf=lambda x: x is None,
        )
        return merged, {name: state for name, (_, state) in results.items()}

    return optax.GradientTransformationExtraArgs(init, update)


def _orthogonalize(
    matrix: Matrix, spec: PartitionSpec, dtype: np.dtype
) -> Callable[[jax.Array], jax.Array]:
    """Return a function that orthogonalizes one layer's parameter, or all slots under `vmap`.

    Args:
        matrix: dims of one layer's parameter.
        spec: PartitionSpec of the stack's parameter, with the slot dim.
        dtype: dtype of the Newton-Schulz steps.
    """
    num_batch = 1 + len(matrix.batch)
    order = (0, *(1 + i for i in (*matrix.batch, *matrix.inputs, *matrix.outputs)))

    def on_matrices(x: jax.Array) -> jax.Array:
        """Orthogonalize arrays [matrices, *inputs, *outputs]."""
        num_inputs = math.prod(x.shape[1 : 1 + len(matrix.inputs)])
        return newton_schulz(x.reshape(len(x), num_inputs, -1)).reshape(x.shape)

    def in_order(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Call a function of arrays [slots, *batch, *inputs, *outputs]."""
        result = function(x.transpose(order).astype(dtype))
        return result.transpose(np.argsort(order)).astype(x.dtype)

    def alone(x: jax.Array) -> jax.Array:
        return on_matrices(x.reshape(-1, *x.shape[num_batch:])).reshape(x.shape)

    def on_mesh(x: jax.Array) -> jax.Array:
        axes = axes_by_dim(spec, x.ndim)
        return on_whole_matrices(on_matrices, x, spec_of(axes[i] for i in order), num_batch)

    @custom_vmap
    def run(x: jax.Array) -> jax.Array:
        return in_order(alone, x[None])[0]

    # Under vmap, XLA would not know that the matrices can be divided over all devices.
    @run.def_vmap
    def _(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        return in_order(on_mesh, x), True

    return run


def newton_schulz(x_BMN: jax.Array) -> jax.Array:
    """Return matrices with the same singular vectors, and singular values from about 0.7 to 1.2.

    Args:
        x_BMN: matrices; all-zero ones do not change.

    Source: Jordan et al. (2024), as in `torch.optim.Muon`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = x_BMN.shape[1] > x_BMN.shape[2]
    x = x_BMN.swapaxes(1, 2) if is_tall else x_BMN
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    norm = jnp.sqrt(jnp.square(wide).sum((1, 2), keepdims=True))
    x = (wide / jnp.maximum(norm, _EPSILON)).astype(x.dtype)
    for _ in range(_NUM_STEPS):
        gram = x @ x.swapaxes(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(1, 2) if is_tall else x
