"""Decoding on GPUs: the compiled program copies no cache, and its time is near the limit."""

import pytest

from benchmarks.decode import predicted
from predict.machines.targets import parse_target
from sharding.tensor import TensorConfig
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

SIZES = (
    "model.num_layers=2",
    "model.embed_dim=4096",
    "model.mlp_dim=14336",
    "model.num_heads=32",
    "model.num_kv_heads=8",
    "model.head_dim=128",
)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("batch_size", [1, 32])
def test_decoding_copies_no_cache_and_is_near_the_limit(batch_size):
    target = parse_target("h100:1x1")
    model = steps.make_run("llama", SIZES).model
    found = predicted(model, target, batch_size, num_slots=4096)
    cache_bytes = 2 * batch_size * 8 * 4096 * 128
    # With one row, the partial sums of its products are larger than its caches.
    assert found["temp_bytes"] < max(cache_bytes, 20e6)
    # The estimate of the memory is the size of the parameters and the caches.
    needed = found["argument_bytes"] + found["temp_bytes"]
    assert needed == pytest.approx(found["estimated_bytes"], rel=0.05)
    assert 0.65 < found["limit_s"] / found["predicted_s"] <= 1


def test_stationary_layout_gathers_no_kernel():
    """A device receives activations of the rows, which are small, and no part of a kernel."""
    target = parse_target("h100:1x4")
    model = steps.make_run("llama", SIZES).model
    figures = predicted(model, target, 16, num_slots=256, tensor=TensorConfig(mode="2d_stationary"))
    kernel_bytes = 2 * 4096 * 14336 // 4
    assert figures["temp_bytes"] < kernel_bytes
    whole = predicted(model, parse_target("h100:1x1"), 16, num_slots=256)
    assert figures["argument_bytes"] == pytest.approx(whole["argument_bytes"] / 4, rel=0.02)
