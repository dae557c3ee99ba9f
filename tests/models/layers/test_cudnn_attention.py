"""Tests of the wrapper around cuDNN's kernel, with a stand-in for the kernel: exact in float64."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import attention, blocked_attention, cudnn_attention, cudnn_kernel
from models.layers.masks import Mask, Operands, Options
from sharding import hardware
from tests.models.layers import cudnn_stand_in

#: As for plain attention in float64; sums have at most 41 keys.
TOLERANCE = 1e-12

H100 = hardware.Hardware(
    platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability=9.0
)
A100 = hardware.Hardware(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", compute_capability=8)
V100 = hardware.Hardware(platform="gpu", device_kind="Tesla V100-SXM2-32GB", compute_capability=7)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def draw(*, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int):
    rng = np.random.default_rng(0)
    shapes = [(3, queries, heads), (3, keys, kv_heads), (3, keys, kv_heads), (3, queries, heads)]
    return [jnp.asarray(rng.standard_normal((*shape, head_dim))) for shape in shapes]


def both(arrays, bias=None, **options):
    """Return (output, gradients) of the wrapper, and of blocked attention."""
    *qkv, dy = arrays
    segments = options.pop("segments", None)
    mask = Mask(**{"is_causal": False, "window": None} | options)
    results = []
    with_cudnn = functools.partial(cudnn_attention.attend_with_cudnn, can_pack=True)
    for kernel in (with_cudnn, blocked_attention.attend_in_blocks):

        def attend(q, k, v, bias, kernel=kernel):
            return kernel(Operands(q, k, v, bias, segments), Options(mask=mask, scale=0.3))

        def with_gradients(q, k, v, bias, dy, attend=attend):
            y, vjp = jax.vjp(attend, q, k, v, bias)
            return y, *vjp(dy)[: 3 if bias is None else 4]

        results.append(jax.jit(with_gradients)(*qkv, bias, dy))
    return results


def check(arrays, **options):
    for found, expected in zip(*both(arrays, **options), strict=True):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("has_documents", [False, True])
def test_values_may_be_smaller_than_keys(monkeypatch, has_documents):
    cudnn_stand_in.install(monkeypatch)
    q, k, v, dy = draw(queries=7, keys=7, heads=4, kv_heads=4, head_dim=12)
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0, 0]] * 3, jnp.int32) if has_documents else None
    segments = None if ids is None else (ids, ids)
    check((q, k, v[..., :5], dy[..., :5]), is_causal=True, segments=segments)


CASES = {
    "all visible": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 5},
}


@pytest.mark.thorough(but=["all visible-lengths0", "all visible-lengths1", "all visible-lengths2"])
@pytest.mark.drawn(3)
@pytest.mark.parametrize("lengths", [(8, 8), (7, 7), (41, 41), (5, 9), (9, 5), (6, 9)])
@pytest.mark.parametrize("case", CASES)
def test_attend_pads_lengths_and_head_dims(monkeypatch, case, lengths):
    cudnn_stand_in.install(monkeypatch)
    queries, keys = lengths
    options = CASES[case]
    if queries > keys:
        options = options | {"window": None}  # with a window, the last queries would see no key
    check(draw(queries=queries, keys=keys, heads=6, kv_heads=2, head_dim=5), **options)


@pytest.mark.parametrize(("has_bias", "length"), [(False, 7), (True, 8)])
def test_attend_pads_an_odd_length_only_if_there_is_a_bias(monkeypatch, has_bias, length):
    cudnn_stand_in.install(monkeypatch)
    forward = cudnn_stand_in.forward
    shapes = []

    def recorded(q, *others):
        shapes.append(q.shape)
        return forward(q, *others)

    monkeypatch.setattr(cudnn_kernel, "forward", recorded)
    bias = jnp.zeros((1, 1, 7, 7)) if has_bias else None
    check(draw(queries=7, keys=7, heads=2, kv_heads=2, head_dim=8), bias=bias)
    assert {shape[1] for shape in shapes} == {length}


def documents(length: int, *starts: Iterable[int]) -> np.ndarray:
    """Return segment ids of 3 rows, in each of which documents begin at these tokens."""
    ids = np.zeros((3, length), np.int32)
    for row, firsts in enumerate(starts):
        for first in firsts:
            ids[row, first:] += 1
    return ids


#: Rows with one document each; with few documents; with one document per token, which takes three
#: calls; with more documents than fit into one call, but in one row only; and with padding, whose
#: id is 0, at the end or at the start.
PACKED = {
    "one": documents(12, (0,), (0,), (0,)),
    "few": documents(23, (0, 1, 9), (0, 20), (0, 5, 6, 22)),
    "each token": documents(22, range(22), range(22), range(22)),
    "uneven": documents(26, range(0, 26, 2), (0,), (0, 25)),
    "padded": np.where(
        np.arange(14) < np.array([[10], [14], [1]]), documents(14, (0, 4), (0,), (0,)), 0
    ),
    "padded first": np.where(
        np.arange(14) >= np.array([[3], [0], [13]]), documents(14, (0, 4), (0, 7), (0,)), 0
    ),
}


@pytest.mark.thorough(but=["all visible-one", "all visible-few", "all visible-padded first"])
@pytest.mark.drawn(3)
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("case", CASES)
def test_attend_passes_documents_to_the_kernel(monkeypatch, case, packed):
    cudnn_stand_in.install(monkeypatch)
    ids = jnp.asarray(PACKED[packed])
    length = ids.shape[1]
    arrays = draw(queries=length, keys=length, heads=4, kv_heads=2, head_dim=8)
    check(arrays, segments=(ids, ids), **CASES[case])


def test_attend_passes_documents_of_another_sequence_to_the_kernel(monkeypatch):
    cudnn_stand_in.install(monkeypatch)
    q_ids = jnp.asarray(np.where(np.arange(9) < np.array([[9], [4], [1]]), 1, 0))
    k_ids = jnp.asarray(np.where(np.arange(14) < np.array([[3], [13], [7]]), 1, 0))
    check(
        draw(queries=9, keys=14, heads=4, kv_heads=4, head_dim=8),
        segments=(q_ids.astype(jnp.int32), k_ids.astype(jnp.int32)),
    )


def test_attend_returns_zero_for_queries_that_see_no_key(monkeypatch):
    """Such queries are padding, and no key is padding; no result may become NaN."""
    cudnn_stand_in.install(monkeypatch)
    ids = [jnp.asarray(rows, jnp.int32) for rows in ([[1, 1, 0, 0]] * 3, [[1, 1, 1, 1]] * 3)]
    arrays = draw(queries=4, keys=4, heads=2, kv_heads=2, head_dim=8)
    found, expected = both(arrays, segments=tuple(ids))
    assert not np.any(found[0][:, 2:])
    np.testing.assert_allclose(found[0][:, :2], expected[0][:, :2], rtol=TOLERANCE)
    assert all(np.all(np.isfinite(x)) for x in found)


@pytest.mark.thorough(
    but=["all visible-False-shape0", "all visible-False-shape1", "all visible-False-shape2"]
)
@pytest.mark.drawn(3)
@pytest.mark.parametrize("shape", [(1, 4, 9, 9), (3, 4, 9, 9), (3, 1, 9, 9), (3, 1, 1, 9)])
@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_attend_adds_a_bias_and_returns_its_gradient(monkeypatch, case, shape, has_segments):
    cudnn_stand_in.install(monkeypatch)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(shape))
    # With a bias, segments need not be contiguous. In Swin's shifted windows they are not.
    ids = jnp.asarray(np.arange(9)[None] % 2 + np.zeros((3, 1), int), jnp.int32)
    segments = (ids, ids) if has_segments else None
    arrays = draw(queries=9, keys=9, heads=4, kv_heads=4, head_dim=8)
    check(arrays, bias=bias, segments=segments, **CASES[case])


def arrays_of(dtype: str, *, head_dim: int = 64, length: int = 64) -> tuple[Any, Any, Any]:
    array = jax.ShapeDtypeStruct((2, length, 4, head_dim), dtype)
    return array, array, array


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "kernel"),
    [
        (H100, "bfloat16", 256, "cudnn"),
        (H100, "float16", 40, "cudnn"),
        (H100, "float32", 64, "plain"),
        (H100, "float64", 64, "blocked"),
        (A100, "bfloat16", 128, "cudnn"),
        (A100, "bfloat16", 256, "plain"),
        (V100, "float16", 64, "plain"),
        (hardware.ANY, "bfloat16", 64, "blocked"),
    ],
)
def test_select_kernel_depends_on_the_hardware_of_the_trace(device, dtype, head_dim, kernel):
    with hardware.use(device):
        selected = attention.select_kernel(Operands(*arrays_of(dtype, head_dim=head_dim)))
    assert selected.kernel == kernel
    assert (selected.scores_bytes > 0) == (kernel == "plain")


def test_select_kernel_is_plain_if_configured():
    with hardware.use(H100), attention.use("plain"):
        selected = attention.select_kernel(Operands(*arrays_of("bfloat16")))
    assert (selected.kernel, selected.why) == ("plain", "model.attention=plain")
    assert selected.scores_bytes == 4 * 2 * 4 * 64 * 64


def test_select_kernel_counts_documents_as_a_mask_on_devices_that_cannot_pack():
    ids: Any = jax.ShapeDtypeStruct((2, 64), "int32")
    operands = Operands(*arrays_of("bfloat16"), None, (ids, ids))
    with hardware.use(A100):
        selected = attention.select_kernel(operands)
    assert selected.kernel == "cudnn"
    assert selected.scores_bytes == 2 * 2 * 64 * 64
    with hardware.use(H100):
        assert attention.select_kernel(operands).scores_bytes == 0


def test_kernel_traces_without_a_gpu():
    """Shapes are all that tracing needs, and results have the documented shapes."""
    q = jax.ShapeDtypeStruct((2, 63, 4, 64), "bfloat16")
    ids = jax.ShapeDtypeStruct((2, 63), "int32")

    def loss(q, k, v, ids):
        y = attention.attend(q, k, v, is_causal=True, segments=(ids, ids))
        assert y.shape == q.shape
        return jnp.sum(y.astype(jnp.float32))

    with hardware.use(H100):
        grads = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, q, q, ids)
    assert {(g.shape, g.dtype.name) for g in grads} == {(q.shape, "bfloat16")}
