"""Attention against a plain float64 reference, and that no position sees what follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from models import attention

#: float64 rounds at 1e-16; sums over at most 300 keys of values near 1 stay far below this.
TOLERANCE = 1e-12


def draw(num_queries: int, num_keys: int, dtype: DTypeLike = np.float64):
    """Returns q, k, v and a cotangent of 2 examples and 3 heads of size 8."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, 3, 8) for length in (num_queries, num_keys, num_keys, num_queries)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def reference(q, k, v, dy, *, is_causal):
    """Returns the output and the gradients of q, k and v, in numpy."""
    scale = q.shape[-1] ** -0.5
    logits = np.einsum("BTNH,BSNH->BNTS", q, k) * scale
    if is_causal:
        hidden = np.triu(np.ones(logits.shape[2:], bool), 1)
        logits = np.where(hidden, -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", weights, v)
    dweights = np.einsum("BTNH,BSNH->BNTS", dy, v)
    dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * scale
    dq = np.einsum("BNTS,BSNH->BTNH", dlogits, k)
    dk = np.einsum("BNTS,BTNH->BSNH", dlogits, q)
    return y, (dq, dk, np.einsum("BNTS,BTNH->BSNH", weights, dy))


# 130 and 300 queries make blocks of unequal size; (5, 9) and (9, 5) have other numbers of keys.
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (130, 130), (300, 300), (5, 9), (9, 5)])
def test_attend_equals_reference_with_gradients(lengths, is_causal):
    q, k, v, dy = draw(*lengths)
    y, grads = reference(q, k, v, dy, is_causal=is_causal)
    with jax.enable_x64(True):
        ours, vjp = jax.vjp(
            lambda q, k, v: attention.attend(q, k, v, is_causal=is_causal),
            *map(jnp.asarray, (q, k, v)),
        )
        assert ours.dtype == jnp.float64
        np.testing.assert_allclose(ours, y, rtol=TOLERANCE, atol=TOLERANCE)
        for found, expected in zip(vjp(jnp.asarray(dy)), grads, strict=True):
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_attend_narrow_dtypes_are_close(dtype, tolerance):
    """Rounds q, k, v first, so what differs is the arithmetic: about 8 units in the last place."""
    arrays = [jnp.asarray(x, dtype) for x in draw(130, 130, np.float32)]
    y, _ = reference(*(np.asarray(x, np.float64) for x in arrays), is_causal=True)
    ours = attention.attend(*arrays[:3], is_causal=True)
    assert ours.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(ours, np.float64), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("position", [0, 63, 128, 299])
def test_attend_gradients_vanish_after_the_position(position):
    """`position` 128 is the first of a later block."""
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x) for x in draw(300, 300)[:3])
        grads = jax.grad(
            lambda *a: jnp.sum(attention.attend(*a, is_causal=True)[:, position]), argnums=(1, 2)
        )(q, k, v)
        for grad in grads:
            assert not np.any(grad[:, position + 1 :])
            assert position == 0 or np.all(np.any(grad[:, : position + 1], axis=(0, 2, 3)))


def test_attend_stays_finite_for_large_logits():
    q, k, v, dy = (jnp.asarray(x) * 100 for x in draw(130, 130, np.float32))
    y, vjp = jax.vjp(lambda *a: attention.attend(*a, is_causal=True), q, k, v)
    assert all(np.all(np.isfinite(x)) for x in (y, *vjp(dy)))


def test_attend_passes_nan_on():
    """A non-finite activation must reach the loss, where the step is skipped."""
    q, k, v, _ = (jnp.asarray(x) for x in draw(130, 130, np.float32))
    y = attention.attend(q, k.at[0, 3].set(jnp.nan), v, is_causal=True)
    assert (
        np.all(np.isnan(y[0, 3:])) and np.all(np.isfinite(y[0, :3])) and np.all(np.isfinite(y[1]))
    )
