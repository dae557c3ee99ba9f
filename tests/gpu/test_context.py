"""Sequences that are split over GPUs: what is sent, how much memory they take, what is hidden."""

import collections

import pytest

from benchmarks.harness import gpu_estimates
from predict.machines.datasheets import machine_of
from predict.program.communication import collectives
from predict.time.prediction import predict
from tests.gpu import steps
from tests.gpu.test_estimates import SPLIT_SEQUENCES

pytestmark = pytest.mark.gpu_compiler

_LENGTH = 8192
_LAYERS = 3
_EMBED = 256
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 4, 64
_SIZES = (
    "precision.compute=bfloat16",
    "data.tokenizer=bytes",
    f"data.sequence_length={_LENGTH}",
    f"model.max_positions={_LENGTH}",
    "data.global_batch_size=1",
    "train.num_microbatches=1",
    "train.remat=none",
    f"model.num_layers={_LAYERS}",
    f"model.embed_dim={_EMBED}",
    f"model.num_heads={_HEADS}",
    f"model.num_kv_heads={_KV_HEADS}",
    f"model.head_dim={_HEAD_DIM}",
    "model.mlp_dim=512",
    "memory.zero_stage=3",
)
_BFLOAT16_BYTES = 2
#: Bytes of the keys of one device, or of its values.
_OF_KEYS = _LENGTH // 4 * _KV_HEADS * _HEAD_DIM * _BFLOAT16_BYTES
_OF_QUERIES = _LENGTH // 4 * _HEADS * _HEAD_DIM * _BFLOAT16_BYTES


def sent(*overrides: str) -> dict[str, int]:
    """Return kind of collective -> bytes in a step, for the collectives of activations."""
    run = steps.make_run("llama", (*_SIZES, "mesh.context=4", *overrides))
    total = collections.Counter()
    for each in collectives(run.compile_train_step(), run.mesh):
        assert each.axes in (("context",), ())
        assert each.trip_count is not None
        # All else gathers parameters or reduces gradients; no array of activations is as small.
        if each.kind in ("collective-permute", "all-to-all"):
            total[each.kind] += each.trip_count * each.bytes
        else:
            whole = _LENGTH * _EMBED * _BFLOAT16_BYTES
            assert each.bytes < whole / 2, each
    return dict(total)


def test_a_ring_sends_keys_and_values_forward_and_their_gradients_too_backward():
    """A hop sends 2·K·H·T/c numbers, and twice that backward; c devices need c - 1 hops."""
    forward = 3 * 2 * _OF_KEYS
    assert sent("mesh.ulysses=1") == {"collective-permute": _LAYERS * 3 * forward}


def test_an_exchange_of_heads_sends_queries_keys_values_and_outputs():
    forward = 2 * _OF_QUERIES + 2 * _OF_KEYS
    assert sent("mesh.ulysses=4") == {"all-to-all": _LAYERS * 2 * forward}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("context", "length", "ring_size"), [(8, 8192, 8), (16, 65536, 8)])
def test_more_devices_exchange_heads_if_the_ring_spans_hosts(context, length, ring_size):
    """The fewest whose tokens × heads ÷ key-value heads are 2 · 989 TFLOP/s · 0.5 ÷ bandwidth.

    That is 2,198 for the 450 GB/s of NVLink, and 19,780 for the 50 GB/s of a GPU's network adapter.
    8,192 / 8 · 4 tokens are enough within a host; 65,536 / 16 · 4 are not between hosts.
    """
    sizes = (f"data.sequence_length={length}", f"model.max_positions={length}")
    mesh = (f"mesh.context={context}", "data.global_batch_size=8", "train.num_microbatches=1")
    run = steps.make_run("llama:3-8b", (*sizes, *mesh))
    assert run.sequence.ring_size == ring_size


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tokens", [131072, 262144])
def test_llama_3_8b_with_long_sequences(tokens):
    """It fits on 8 H100s, and what is sent hides behind attention."""
    overrides = (
        *SPLIT_SEQUENCES["context=8"],
        f"data.sequence_length={tokens}",
        f"model.max_positions={tokens}",
        "train.remat=attention",
    )
    run = steps.make_run("llama:3-8b", overrides)
    assert run.target is not None
    compiled_bytes = steps.compiled_bytes(run)
    assert compiled_bytes < 80e9 * 0.9
    low, high = gpu_estimates.BOUNDS
    assert low <= run.estimate_memory().device_bytes / compiled_bytes <= high
    prediction = predict(steps.text_of(run), run.mesh.shape, machine_of(run.target))
    assert prediction.exposed_communication_s <= 0.1 * prediction.step_s
    steps.forget()
