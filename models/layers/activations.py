"""Activations and soft caps; both forms of GELU are written so that GPUs compute them cheaply.

Like PyTorch's kernels, they compute in float32 or wider and round once, to the dtype of `x`.
`jax.nn.gelu` has the same values. By XLA's costs for an H100 it takes three times as long, though:
XLA expands `erfc` into two polynomials, of which every element needs one, and `tanh` into a long
chain of dependent operations.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """Return x · Φ(x), where Φ is the cumulative distribution function of the normal distribution.

    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """
    wide = as_float32(x)
    return (0.5 * wide * (1 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return the approximation of GELU by tanh, 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))).

    Since 0.5 · (1 + tanh(z)) = sigmoid(2 · z), an exponential is enough.

    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    wide = as_float32(x)
    double_z = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * jax.nn.sigmoid(double_z)).astype(x.dtype)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x · sigmoid(1.702 · x), an approximation of GELU.

    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    wide = as_float32(x)
    return (wide * jax.nn.sigmoid(1.702 * wide)).astype(x.dtype)


def relu2(x: jax.Array) -> jax.Array:
    """Return the square of max(x, 0).

    Source: So et al. 2021 (arXiv:2109.08668), section 3.
    """
    return jnp.square(jax.nn.relu(x))


def soft_capped(x: jax.Array, softcap: float | None) -> jax.Array:
    """Return softcap · tanh(x / softcap), which is between -softcap and softcap; None: `x`.

    Source: Bello et al. 2016 (arXiv:1611.09940), section 5; Gemma Team 2024 (arXiv:2408.00118).
    """
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def as_float32(x: jax.Array) -> jax.Array:
    """Return `x` in float32, or as it is if it is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


#: Name in configs -> function.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu2": relu2,
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "tanh": jnp.tanh,
}


def check_activation(name: str, *, field: str = "activation") -> None:
    """Raise a ValueError if the value `name` of a field of `model` is not a key of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"model.{field}={name!r} is unknown; choose {', '.join(ACTIVATIONS)}")
