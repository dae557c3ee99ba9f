"""Muon: momentum whose matrices are orthogonalized; AdamW for all other parameters.

For a matrix W with gradient G, momentum μ, learning rate γ and weight decay λ:

    B ← μ B + G
    O = orthogonalize(G + μ B)        about U Vᵀ, for the singular value decomposition U S Vᵀ
    W ← W - γ (s O + λ W)             s depends on the shape, see SCALES

Each of the matrices in train/optim/matrices.py is orthogonalized by itself.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training" (2025),
arXiv:2502.16982, section 2.2.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from train.optim.matrices import Matrices, Matrix, on_slots, path_names

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


def _orthogonalize(
    matrix: Matrix, spec: PartitionSpec, dtype: np.dtype
) -> Callable[[jax.Array], jax.Array]:
    """Return a function that orthogonalizes one layer's parameter, or all slots under `vmap`.

    Args:
        matrix: dims of one layer's parameter.
        spec: PartitionSpec of the stack's parameter, with the slot dim.
        dtype: dtype of the Newton-Schulz steps.
    """

    def on_matrices(x: jax.Array) -> tuple[jax.Array]:
        """Orthogonalize arrays [matrices, *inputs, *outputs]."""
        num_inputs = math.prod(x.shape[1 : 1 + len(matrix.inputs)])
        return (newton_schulz(x.reshape(len(x), num_inputs, -1)).reshape(x.shape),)

    spec = matrix.spec_in_order(spec)
    on_parameter = on_slots(on_matrices, [spec], [spec], 1 + len(matrix.batch))

    def run(x: jax.Array) -> jax.Array:
        (result,) = on_parameter(x.transpose(matrix.order).astype(dtype))
        return result.transpose(np.argsort(matrix.order)).astype(x.dtype)

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
