"""Communication and memory of the modes of tensor parallelism, in steps compiled for H100s."""

import pytest

from benchmarks import tensor_modes
from benchmarks.harness.gpu_estimates import SMALL_BOUNDS
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler


@pytest.mark.parametrize("mode", tensor_modes.MODES)
def test_a_layer_receives_the_elements_of_the_formulas(mode):
    run = tensor_modes.run_of(mode)
    elements = tensor_modes.received(run)
    expected = tensor_modes.expected(mode)
    # Besides kernels and activations, there are biases, and the statistics of norms.
    assert elements == pytest.approx(expected, rel=0.004)
    published = tensor_modes.paper(mode)
    if mode == "3d":
        assert sum(elements.values()) == pytest.approx(published, rel=0.004)
    elif published is not None:
        assert sum(elements.values()) < 0.7 * published


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_estimated_memory_is_that_of_the_compiled_step(mode):
    run = tensor_modes.run_of(mode)
    low, high = SMALL_BOUNDS
    assert low < run.estimate_memory().device_bytes / steps.compiled_bytes(run) < high


def test_products_that_are_saved_before_they_are_split_count_as_split():
    """With train.remat=dots, a step saves sums over `model` that are then split by tokens."""
    overrides = (
        "data.tokenizer=bytes",
        "precision.compute=bfloat16",
        "data.sequence_length=1024",
        "data.global_batch_size=8",
        "train.num_microbatches=1",
        "train.remat=stage,dots",
        "mesh.model=8",
        "model.num_layers=12",
        "model.num_heads=8",
        "model.embed_dim=512",
        "model.num_kv_heads=8",
        "model.mlp_dim=1024",
    )
    run = steps.make_run("llama", overrides)
    assert 0.9 < run.estimate_memory().device_bytes / steps.compiled_bytes(run) < 1.1
