"""Tests of attention against a plain float64 reference, and of which positions see which."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from models.layers import attention

#: float64 rounds at 1e-16; sums over at most 300 keys of values near 1 stay far below this.
TOLERANCE = 1e-12


def draw(num_queries: int, num_keys: int, dtype: DTypeLike = np.float64):
    """Return q, k, v and a cotangent for 2 examples and 3 heads of size 8."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, 3, 8) for length in (num_queries, num_keys, num_keys, num_queries)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def reference(q, k, v, dy, *, is_causal):
    """Return the output and the gradients of q, k and v, computed in numpy."""
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
@pytest.mark.thorough(but=["lengths0-True", "lengths0-False", "lengths1-True"])
@pytest.mark.drawn(2)
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
    """Inputs are rounded first, so only arithmetic differs: about 8 units in the last place."""
    arrays = [jnp.asarray(x, dtype) for x in draw(130, 130, np.float32)]
    y, _ = reference(*(np.asarray(x, np.float64) for x in arrays), is_causal=True)
    ours = attention.attend(*arrays[:3], is_causal=True)
    assert ours.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(ours, np.float64), y, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("position", [0, 63, 128, 299])
def test_attend_gradients_vanish_after_the_position(position):
    """Position 128 is not in the first block."""
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


def test_attend_propagates_nan():
    """A non-finite activation must reach the loss, so that the step is skipped."""
    q, k, v, _ = (jnp.asarray(x) for x in draw(130, 130, np.float32))
    y = attention.attend(q, k.at[0, 3].set(jnp.nan), v, is_causal=True)
    assert (
        np.all(np.isnan(y[0, 3:])) and np.all(np.isfinite(y[0, :3])) and np.all(np.isfinite(y[1]))
    )


def general_reference(
    q, k, v, dy, *, is_causal=False, window=None, segments=None, bias=None, scale
):
    """Return the output and the gradients of q, k, v and the bias, in numpy, head by head."""
    num_groups = q.shape[2] // k.shape[2]
    k_all = np.repeat(k, num_groups, axis=2)
    v_all = np.repeat(v, num_groups, axis=2)
    bias = np.zeros((1, 1, 1, 1)) if bias is None else bias
    logits = np.einsum("BTNH,BSNH->BNTS", q, k_all) * scale + bias
    distance = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])[None]
    visible = np.ones_like(logits, bool)
    if is_causal:
        visible &= (distance >= 0)[None, None]
    if window is not None:
        visible &= (distance < window)[None, None]
    if segments is not None:
        visible &= (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", weights, v_all)
    dweights = np.einsum("BTNH,BSNH->BNTS", dy, v_all)
    dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))

    def of_kv_heads(x_BSNH):
        return x_BSNH.reshape(*k.shape[:3], num_groups, -1).sum(axis=3)

    dq = np.einsum("BNTS,BSNH->BTNH", dlogits, k_all) * scale
    dk = of_kv_heads(np.einsum("BNTS,BTNH->BSNH", dlogits, q) * scale)
    dv = of_kv_heads(np.einsum("BNTS,BTNH->BSNH", weights, dy))
    summed = tuple(dim for dim, size in enumerate(bias.shape) if size == 1)
    return y, (dq, dk, dv, dlogits.sum(axis=summed, keepdims=True))


def packed(length: int) -> np.ndarray:
    """Return segment ids of 2 rows with two texts, or with padding at the start or at the end."""
    ids = np.ones((2, length), np.int32)
    ids[0, length // 2 :] = 2
    ids[0, -2:] = 0
    ids[1, :3] = 0
    return ids


GENERAL = {
    "groups": {"is_causal": True},
    "groups, all visible": {},
    "scale": {"is_causal": True, "scale": 1.0},
    "window of 1": {"is_causal": True, "window": 1},
    "window": {"is_causal": True, "window": 7},
    "window beyond a block": {"is_causal": True, "window": 140},
    "segments": {"segments": True},
    "segments, causal": {"is_causal": True, "segments": True},
    "segments, window": {"is_causal": True, "segments": True, "window": 5},
    "bias": {"bias": (1, 6, None, None)},
    "bias, causal": {"is_causal": True, "bias": (1, 6, None, None)},
    "bias of each example": {"bias": (2, 6, None, None)},
    "bias of all heads": {"bias": (2, 1, None, None)},
    "bias of keys": {"bias": (2, 1, 1, None), "is_causal": True},
    "all": {"is_causal": True, "segments": True, "window": 20, "bias": (1, 6, None, None)},
}


@pytest.mark.thorough(but=["groups-9", "groups, all visible-9", "groups, all visible-300"])
@pytest.mark.drawn(5)
@pytest.mark.parametrize("length", [9, 300])
@pytest.mark.parametrize("case", GENERAL)
def test_attend_with_options_equals_reference_with_gradients(case, length):
    """6 heads share 2 key-value heads; 300 queries make three blocks."""
    options = dict(GENERAL[case])
    rng = np.random.default_rng(0)

    def draw(heads):
        return rng.standard_normal((2, length, heads, 8))

    q = draw(6)
    k = draw(2)
    v = draw(2)
    dy = draw(6)
    scale = options.pop("scale", 8**-0.5)
    segments: Any = (packed(length), packed(length)) if options.pop("segments", False) else None
    shape = options.pop("bias", None)
    bias = (
        None if shape is None else rng.standard_normal([length if n is None else n for n in shape])
    )
    y, grads = general_reference(q, k, v, dy, scale=scale, segments=segments, bias=bias, **options)
    with jax.enable_x64(True):

        def ours(q, k, v, bias):
            return attention.attend(
                q,
                k,
                v,
                is_causal=options.get("is_causal", False),
                window=options.get("window"),
                segments=segments,
                bias=bias,
                scale=scale,
            )

        arrays = [None if x is None else jnp.asarray(x) for x in (q, k, v, bias)]
        found, vjp = jax.vjp(ours, *arrays)
        np.testing.assert_allclose(found, y, rtol=TOLERANCE, atol=TOLERANCE)
        for gradient, expected in zip(vjp(jnp.asarray(dy)), grads, strict=True):
            if gradient is not None:
                np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-11)


def test_attend_to_another_sequence_equals_reference():
    rng = np.random.default_rng(0)
    q, dy = rng.standard_normal((2, 2, 5, 4, 8))
    k, v = rng.standard_normal((2, 2, 9, 4, 8))
    segments: Any = (np.ones((2, 5), np.int32), packed(9) != 0)
    y, grads = general_reference(q, k, v, dy, segments=segments, scale=8**-0.5)
    with jax.enable_x64(True):
        found, vjp = jax.vjp(
            lambda *a: attention.attend(*a, is_causal=False, segments=segments),
            *map(jnp.asarray, (q, k, v)),
        )
        np.testing.assert_allclose(found, y, rtol=TOLERANCE, atol=TOLERANCE)
        for gradient, expected in zip(vjp(jnp.asarray(dy)), grads[:3], strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_attend_implementations_agree():
    """`jax.nn.dot_product_attention`, which accelerators run, gets the same masks."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 20, 6, 8)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 2, 20, 2, 8)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((1, 6, 20, 20)), jnp.float32)
    ids = jnp.asarray(packed(20))
    options = {"is_causal": True, "window": 6, "segments": (ids, ids), "bias": bias}
    ours = attention.attend(q, k, v, **options, scale=0.7)
    with attention.use("plain"):
        theirs = attention.attend(q, k, v, **options, scale=0.7)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.thorough
def test_attend_returns_the_mean_for_queries_that_see_no_key():
    """As in `jax.nn.dot_product_attention`. Such rows are padding; no key is padding."""
    rng = np.random.default_rng(0)
    q, k, v, dy = jnp.asarray(rng.standard_normal((4, 1, 4, 2, 8)), jnp.float32)
    ids = jnp.array([[1, 1, 7, 7]], jnp.int32), jnp.array([[1, 1, 1, 0]], jnp.int32)
    mask = (ids[0][:, :, None] == ids[1][:, None, :])[:, None]

    def ours(*a):
        return attention.attend(*a, is_causal=False, segments=ids)

    def theirs(*a):
        return jax.nn.dot_product_attention(*a, mask=mask)

    (y, vjp) = jax.vjp(ours, q, k, v)
    (expected, their_vjp) = jax.vjp(theirs, q, k, v)
    for found, wanted in zip((y, *vjp(dy)), (expected, *their_vjp(dy)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
