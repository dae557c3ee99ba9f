"""Attention over a sequence that is split over the devices of a ring, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.layers import blocked_attention, cudnn_attention
from models.layers.masks import Mask, Options
from models.layers.ring_attention import BlockKernel, RingOptions, attend_on_ring
from sharding.mesh import MeshConfig, make_mesh
from sharding.ops.sequence import SequenceSplit
from tests.models.layers import cudnn_stand_in

KERNELS = {
    "blocked": BlockKernel(forward=blocked_attention.forward, backward=blocked_attention.backward),
    "cudnn": BlockKernel(
        forward=functools.partial(cudnn_attention.forward, can_pack=True),
        backward=functools.partial(cudnn_attention.backward, can_pack=True),
    ),
}
LENGTH = 48


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def arrays(num_kv_heads: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (2, LENGTH, 4, 8)
    kv_shape = (2, LENGTH, num_kv_heads, 8)
    return {
        "q": jax.random.normal(keys[0], shape, jnp.float64),
        "k": jax.random.normal(keys[1], kv_shape, jnp.float64),
        "v": jax.random.normal(keys[2], kv_shape, jnp.float64),
        "table": jax.random.normal(keys[3], (16, 4), jnp.float64),
        "sinks": jnp.asarray([[-1.0, 0.5, 2.0, 0.0]]),
    }


def segment_ids() -> jax.Array:
    lengths = [[7, 20, 13, 8], [30, 1, 10, 7]]
    return jnp.asarray([np.repeat([1, 2, 3, 0], row) for row in lengths], jnp.int32)


def bias_of(table, q_positions, k_positions):
    distances = jnp.abs(q_positions[:, None] - k_positions[None])
    return table[jnp.minimum(distances, len(table) - 1)].transpose(2, 0, 1)[None]


def visible(mask: Mask, ids: jax.Array | None) -> jax.Array:
    """Return bool[B, 1, T, S], whether each query sees each key, by the definition of the mask."""
    q = jnp.arange(LENGTH)[:, None]
    k = jnp.arange(LENGTH)[None]
    is_visible = jnp.ones((2, 1, LENGTH, LENGTH), bool)
    if mask.is_causal:
        is_visible &= k <= q
    if mask.window is not None:
        is_visible &= jnp.abs(q - k) < mask.window
    if ids is not None:
        is_visible &= (ids[:, :, None] == ids[:, None, :])[:, None]
    return is_visible


def on_ring(options: RingOptions, q, k, v, ids, table, sinks):
    order = options.split.order(LENGTH)
    spec = PartitionSpec(None, "context")

    def local(q, k, v, ids, table, sinks):
        return attend_on_ring(options, q, k, v, None if ids is None else (ids, ids), table, sinks)

    ids_spec = None if ids is None else spec
    attend = jax.shard_map(
        local,
        in_specs=(spec, spec, spec, ids_spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
        axis_names={"context"},
        check_vma=False,
    )
    q, k, v = (x[:, order] for x in (q, k, v))
    ids = None if ids is None else ids[:, order]
    return attend(q, k, v, ids, table, sinks)[:, np.argsort(order)]


def attend_plainly(q, k, v, table, sinks, *, is_visible, softcap, has_bias, has_sinks):
    """Return attention by its definition, with two query heads for each key-value head."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    logits = 0.3 * jnp.einsum("btnh,bsnh->bnts", q, k)
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    if has_bias:
        logits += bias_of(table, jnp.arange(LENGTH), jnp.arange(LENGTH))
    if has_sinks:
        shape = (*logits.shape[:3], 1)
        sink = jnp.broadcast_to(sinks[:, :, None, None], shape)
        logits = jnp.concatenate((logits, sink), axis=-1)
        is_visible = jnp.pad(is_visible, [*[(0, 0)] * 3, (0, 1)], constant_values=True)
    weights = jax.nn.softmax(logits, where=is_visible)
    return jnp.einsum("bnts,bsnh->btnh", weights[..., :LENGTH], v)


CASES = {
    "causal on 2": (2, True, None, ""),
    "causal on 6": (6, True, None, ""),
    "causal, documents": (4, True, None, "documents"),
    "causal, bias": (2, True, None, "bias"),
    "causal, documents and bias": (4, True, None, "documents bias"),
    "full": (4, False, None, ""),
    "full, documents and bias": (6, False, None, "documents bias"),
    "window of less than a chunk": (4, True, 5, ""),
    "window of a chunk, documents": (4, True, 6, "documents"),
    "window of two chunks, documents": (4, True, 13, "documents"),
    "window of all but a few": (6, True, 40, ""),
    "window, documents and bias": (4, True, 13, "documents bias"),
    "window around each token": (6, False, 5, ""),
    "window around each token, documents": (4, False, 14, "documents"),
    "window around each token, of all but a few": (4, False, 40, ""),
    "sinks": (4, True, None, "sinks"),
    "sinks, window, documents": (4, True, 13, "sinks documents"),
    "sinks on one device": (1, True, None, "sinks"),
    "sinks on one device, window, documents": (1, True, 13, "sinks documents"),
    "soft cap, window, sinks": (4, True, 13, "softcap sinks"),
    "soft cap, documents": (4, False, None, "softcap documents"),
}
SOFTCAP = 2.0


@pytest.mark.thorough(but=["blocked-causal, documents"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["blocked", "cudnn"])
def test_output_and_gradients_equal_one_device(case, kernel, monkeypatch):
    size, is_causal, window, extras = CASES[case]
    has_segments = "documents" in extras
    has_bias = "bias" in extras
    has_sinks = "sinks" in extras
    softcap = SOFTCAP if "softcap" in extras else None
    if kernel == "cudnn":
        if has_bias and window:
            pytest.skip("no model has a bias and a window")
        if softcap or (window and not is_causal):
            pytest.skip("cuDNN has neither soft caps nor windows around a token")
        cudnn_stand_in.install(monkeypatch)
    mask = Mask(is_causal=is_causal, window=window)
    split = SequenceSplit(num_devices=size, ring_size=size, is_zigzag=is_causal)
    options = RingOptions(
        split=split,
        attention=Options(mask=mask, scale=0.3, softcap=softcap),
        kernel=KERNELS[kernel],
        bias_of=bias_of if has_bias else None,
    )
    ids = segment_ids() if has_segments else None
    inputs = arrays(num_kv_heads=2)
    cotangent = jax.random.normal(jax.random.key(9), inputs["q"].shape, jnp.float64)

    plain = functools.partial(
        attend_plainly,
        is_visible=visible(mask, ids),
        softcap=softcap,
        has_bias=has_bias,
        has_sinks=has_sinks,
    )

    def on_devices(q, k, v, table, sinks):
        extra = table if has_bias else None, sinks if has_sinks else None
        return on_ring(options, q, k, v, ids, *extra)

    def results(function):
        y, pullback = jax.vjp(function, *inputs.values())
        return y, *pullback(cotangent)

    expected = jax.jit(functools.partial(results, plain))()
    with jax.set_mesh(make_mesh(MeshConfig(context=size), jax.devices())):
        actual = jax.jit(functools.partial(results, on_devices))()
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
