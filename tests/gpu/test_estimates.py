"""Tests that memory estimates are close to the memory of steps compiled for an H100, without one.

benchmarks/harness/gpu_estimates.py lists the cases. CI compiles a selection of them.
"""

import re

import pytest

from benchmarks.harness import gpu_estimates
from benchmarks.harness.gpu_estimates import Case
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

#: Cases that run by default; they compile in a few minutes on one core. They cover different
#: mechanisms, and sizes that are used in practice. The others are marked as slow.
CHOSEN = {
    "gpt2, one GPU",
    "gpt2, model=2",
    "gpt2, pipeline=2",
    "gpt2, zero bubble",
    "gpt2, ZeRO 3",
    "llama, fsdp=2",
    "bert, one GPU",
    "vit, zbv",
    "LLaMA-3.2-3B, ZeRO 3, data=8",
    "LLaMA-3-8B, pipeline=4, data=2",
    "LLaMA-3-70B, pipeline=4, data=2, model=8",
}


def _param(case: Case):
    name = re.sub(r"[^\w.-]+", "-", case.name.replace("×", "x"))
    return pytest.param(case, id=name, marks=[pytest.mark.slow] * (case.name not in CHOSEN))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", [_param(case) for case in gpu_estimates.cases()])
def test_estimate_is_close_to_the_compiled_memory(case):
    figures = gpu_estimates.measure(case, "h100")
    if "refused" in figures:
        pytest.skip(figures["refused"])
    # The estimate does not predict which operations XLA's scheduler moves. In small steps, a single
    # buffer can be several percent of the memory.
    low, high = gpu_estimates.bounds(figures["model"])
    assert low <= figures["ratio"] <= high, figures


_LLAMA = ("precision.compute=bfloat16", "data.global_batch_size=8", "memory.zero_stage=3")
_LONG = (
    *_LLAMA,
    "data.sequence_length=131072",
    "model.max_positions=131072",
    "train.remat=stage,full",
)
_KEPT = ("data.sequence_length=32768", "model.max_positions=32768", "model.num_layers=8")
#: Sequences of 131,072 or 32,768 tokens, which are split over `context`.
SPLIT_SEQUENCES = {
    "data=8, context=8": (*_LONG, "mesh.data=8", "mesh.context=8", "train.num_microbatches=1"),
    "context=8": (*_LONG, "mesh.context=8", "train.num_microbatches=8"),
    "context=8, all kept": (
        *_LLAMA,
        *_KEPT,
        "train.remat=stage",
        "mesh.context=8",
        "train.num_microbatches=8",
    ),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", SPLIT_SEQUENCES)
def test_estimate_of_a_split_sequence_is_close_to_the_compiled_memory(case):
    run = steps.make_run("llama:3-8b", SPLIT_SEQUENCES[case])
    low, high = gpu_estimates.BOUNDS
    assert low <= run.estimate_memory().device_bytes / steps.compiled_bytes(run) <= high


def test_chosen_cases_exist():
    assert {case.name for case in gpu_estimates.cases()} >= CHOSEN
