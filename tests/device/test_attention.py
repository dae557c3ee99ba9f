"""Attention as a real GPU computes it, against a float64 reference in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import attention
from sharding import hardware
from tests.models.layers.test_attention import GENERAL, general_reference, packed

pytestmark = pytest.mark.gpu_device

#: Largest relative error of an array, as a ratio of norms: about two units in the last place.
TOLERANCE = {"bfloat16": 1e-2, "float16": 1.5e-3}
#: dtype, length of a sequence, head dim. cuDNN takes a head dim of 20 only padded, and with a bias
#: or documents also the odd lengths.
SHAPES = (("bfloat16", 256, 64), ("bfloat16", 197, 128), ("float16", 37, 20))


def error(found, wanted) -> float:
    found = np.asarray(found, np.float64)
    assert np.all(np.isfinite(found))
    # With a window of 1, gradients of queries and keys are 0. Others have norms over 1.
    return float(np.linalg.norm(found - wanted) / max(1.0, np.linalg.norm(wanted)))


def many_documents(length: int) -> np.ndarray:
    """Return segment ids of 2 rows with more documents than one call of cuDNN's kernel takes."""
    return np.stack([np.arange(length) // 7 + 1, np.arange(length) // 11 + 1]).astype(np.int32)


@pytest.mark.parametrize(("dtype", "length", "head_dim"), SHAPES)
@pytest.mark.parametrize("case", [*GENERAL, "many documents"])
def test_attention_and_its_gradients_equal_the_reference(case, dtype, length, head_dim):
    """6 heads share 2 key-value heads."""
    options = dict(GENERAL.get(case, {"is_causal": True}))
    rng = np.random.default_rng(0)

    def draw(heads):
        return jnp.asarray(rng.standard_normal((2, length, heads, head_dim)), dtype)

    q = draw(6)
    k = draw(2)
    v = draw(2)
    dy = draw(6)
    scale = options.pop("scale", 1.0) * head_dim**-0.5
    segments = packed(length) if options.pop("segments", False) else None
    if case == "many documents":
        segments = many_documents(length)
    pair = None if segments is None else (segments, segments)
    shape = options.pop("bias", None)
    bias = None
    if shape is not None:
        bias = jnp.asarray(rng.standard_normal([length if n is None else n for n in shape]), dtype)

    def ours(q, k, v, bias):
        return attention.attend(
            q,
            k,
            v,
            is_causal=options.get("is_causal", False),
            window=options.get("window"),
            segments=None if pair is None else (jnp.asarray(segments), jnp.asarray(segments)),
            bias=bias,
            scale=scale,
        )

    with hardware.use(hardware.hardware_of(jax.devices()[0])), attention.recorded_kernels() as used:
        y, grads = jax.jit(lambda *a: _with_grads(ours, *a))(q, k, v, bias, dy)
    assert {selected.kernel for selected in used} == {"cudnn"}

    wide = [None if a is None else np.asarray(a, np.float64) for a in (q, k, v, dy, bias)]
    wanted, wanted_grads = general_reference(
        *wide[:4], scale=scale, segments=pair, bias=wide[4], **options
    )
    assert error(y, wanted) < TOLERANCE[dtype]
    for found, expected in zip(grads, wanted_grads, strict=True):
        if found is not None:
            assert error(found, expected) < 2 * TOLERANCE[dtype]


def _with_grads(function, q, k, v, bias, dy):
    y, vjp = jax.vjp(function, q, k, v, bias)
    return y, vjp(dy)
