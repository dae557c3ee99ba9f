"""Activation functions equal PyTorch's, in value and gradient; GELU needs no `tanh` or `erfc`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.layers.activations import ACTIVATIONS

THEIRS = {
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.square(torch.nn.functional.relu(x)),
    "silu": torch.nn.functional.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}
POINTS = np.linspace(-30, 30, 2001)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_equal_pytorch(name):
    with jax.enable_x64(True):
        x = jnp.asarray(POINTS)
        values = ACTIVATIONS[name](x)
        gradients = jax.vmap(jax.grad(ACTIVATIONS[name]))(x)
    theirs = torch.tensor(POINTS, requires_grad=True)
    outputs = THEIRS[name](theirs)
    (their_gradients,) = torch.autograd.grad(outputs.sum(), theirs)
    np.testing.assert_allclose(values, outputs.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradients, their_gradients.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_bfloat16_is_rounded_once(name):
    x = jnp.asarray(POINTS, jnp.bfloat16)
    expected = ACTIVATIONS[name](x.astype(jnp.float32)).astype(jnp.bfloat16)
    found = ACTIVATIONS[name](x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_has_no_slow_primitive(name):
    text = str(jax.make_jaxpr(jax.grad(lambda x: ACTIVATIONS[name](x).sum()))(jnp.ones(3)))
    assert "erfc" not in text and "tanh" not in text
