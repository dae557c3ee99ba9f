"""Experts on GPUs: memory, collectives, and the products of a compiled step."""

import pytest

from benchmarks.harness import gpu_estimates
from predict.program.communication import collectives
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

_LAYERS = 3
_EMBED = 512
_EXPERT_DIM = 256
_PER_TOKEN = 4
_TOKENS = 4096
_SIZES = (
    "precision.compute=bfloat16",
    "data.tokenizer=bytes",
    f"data.sequence_length={_TOKENS}",
    f"model.max_positions={_TOKENS}",
    "train.num_microbatches=1",
    f"model.num_layers={_LAYERS}",
    f"model.embed_dim={_EMBED}",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.mlp_dim=1024",
    f"model.experts_per_token={_PER_TOKEN}",
    f"model.expert_dim={_EXPERT_DIM}",
    "model.router_loss=0.01",
    "memory.zero_stage=3",
)


def compiled_run(num_experts: int, *overrides: str):
    """Return a run whose step is compiled, with one row per replica."""
    mesh = dict(text.split("=") for text in overrides if text.startswith("mesh."))
    rows = int(mesh.get("mesh.expert", 1)) * int(mesh.get("mesh.data", 1))
    more = (f"model.num_experts={num_experts}", f"data.global_batch_size={rows}", *overrides)
    return steps.make_run("llama", (*_SIZES, *more))


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.expert=4",),
        ("mesh.expert=2", "mesh.data=2", "mesh.model=2"),
        ("mesh.expert=2", "mesh.pipeline=2"),
    ],
    ids=" × ".join,
)
def test_memory_is_estimated_and_no_loop_over_experts_communicates(mesh):
    run = compiled_run(16, *mesh)
    low, high = gpu_estimates.BOUNDS
    assert low <= run.estimate_memory().device_bytes / steps.compiled_bytes(run) <= high
    loops = {c.loop for c in collectives(run.compile_train_step(), run.mesh)}
    assert not {loop for loop in loops if "blocks" in loop}


def test_products_take_the_memory_of_the_tokens_that_are_routed():
    """Four times as many experts of the same size take no more memory beyond their weights."""

    def temporary_bytes(num_experts: int) -> int:
        analysis = compiled_run(num_experts).compile_train_step().memory_analysis()
        return analysis.temp_size_in_bytes

    # The step keeps bfloat16 copies of all weights and their gradients, in float32.
    per_expert = 3 * _EMBED * _EXPERT_DIM * _LAYERS * (2 + 4)
    few, many = (temporary_bytes(num) - per_expert * num for num in (16, 64))
    routed = _TOKENS * _PER_TOKEN * (2 * _EMBED + 3 * _EXPERT_DIM) * 2
    assert many - few <= 0.3 * routed
