"""Experts on GPUs: memory, collectives, and the products of a compiled step."""

from typing import Any

import pytest

from benchmarks.harness import gpu_estimates
from predict.machines.targets import parse_target
from predict.program.communication import collectives
from tests.gpu import steps
from tests.runs import ROOT
from train.compile import compile_step

pytestmark = pytest.mark.gpu_compiler

#: Sizes of Qwen3-30B-A3B, with fewer layers and a smaller vocab.
_LAYERS = 8
_EMBED = 2048
_EXPERT_DIM = 768
_PER_TOKEN = 8
_TOKENS = 4096
_SIZES = (
    "precision.compute=bfloat16",
    "data.tokenizer=bytes",
    f"data.sequence_length={_TOKENS}",
    f"model.max_positions={_TOKENS}",
    "train.num_microbatches=1",
    f"model.num_layers={_LAYERS}",
    f"model.embed_dim={_EMBED}",
    "model.num_heads=32",
    "model.num_kv_heads=4",
    "model.head_dim=128",
    "model.mlp_dim=6144",
    f"model.experts_per_token={_PER_TOKEN}",
    f"model.expert_dim={_EXPERT_DIM}",
    "model.router_loss=0.01",
    "memory.zero_stage=3",
)


def compiled_run(num_experts: int, num_rows: int, *overrides: str):
    """Return a run whose step is compiled."""
    more = (f"model.num_experts={num_experts}", f"data.global_batch_size={num_rows}")
    return steps.make_run("llama", (*_SIZES, *more, *overrides))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.expert=4", "mesh.data=2"),
        ("mesh.expert=4", "mesh.model=2"),
        ("mesh.expert=4", "mesh.pipeline=2", "train.num_microbatches=2"),
        ("mesh.expert=8", "train.num_microbatches=2", "train.unroll=True"),
    ],
    ids=" × ".join,
)
def test_memory_is_estimated_and_no_loop_over_experts_communicates(mesh):
    run = compiled_run(128, 16, *mesh)
    low, high = gpu_estimates.BOUNDS
    assert low <= run.estimate_memory().device_bytes / steps.compiled_bytes(run) <= high
    loops = {c.loop for c in collectives(run.compile_train_step(), run.mesh)}
    assert not {loop for loop in loops if "blocks" in loop}


def test_products_take_the_memory_of_the_tokens_that_are_routed():
    """A further row takes as much memory with four times as many experts."""

    def bytes_of_a_row(num_experts: int) -> int:
        """Return the difference between two rows and one, in which weights cancel."""
        one, two = (
            compiled_run(num_experts, num_rows, "model.num_layers=2").compile_train_step()
            for num_rows in (1, 2)
        )
        memories: list[Any] = [step.memory_analysis() for step in (one, two)]
        return memories[1].temp_size_in_bytes - memories[0].temp_size_in_bytes

    routed = _TOKENS * _PER_TOKEN * (2 * _EMBED + 3 * _EXPERT_DIM) * 2
    assert abs(bytes_of_a_row(64) - bytes_of_a_row(16)) <= 0.3 * routed


def test_a_skewed_load_takes_longer_and_sends_no_more():
    overrides = ("mesh.expert=4", "data.global_batch_size=16", "train.num_microbatches=1")
    path = f"{ROOT}/configs/mixtral.py"
    target = parse_target("h100:1x4")
    step = compile_step(path, target, (*overrides, "model.num_layers=2"), expert_load=2.0)
    report = step.to_json()
    even = report["predicted"]
    skewed = report["skewed"]
    assert skewed["expert_load"] == 2.0
    assert skewed["matmul_s"] > even["matmul_s"]
    assert skewed["communication_s"] == even["communication_s"]
    assert "time, the same memory" in step.to_text().splitlines()[-1]
    for load, config, message in (
        (0.5, path, r"--expert_load=0\.5 must be from 1, an even load, to 4, the load if all"),
        (5.0, path, r"--expert_load=5 must be from 1"),
        (2.0, f"{ROOT}/configs/gpt2.py", "GPT2 has no experts; leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_step(config, target, ("mesh.data=4",), expert_load=load)
