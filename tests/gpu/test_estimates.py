"""Tests that memory estimates are close to the memory of steps compiled for an H100, without one.

benchmarks/harness/gpu_estimates.py lists the cases. CI compiles a selection of them.
"""

import re

import pytest

from benchmarks.harness import gpu_estimates
from benchmarks.harness.gpu_estimates import Case

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
    "LLaMA-3-8B, 131,072 tokens, data=8, context=8",
}


def _param(case: Case):
    name = re.sub(r"[^\w.-]+", "-", case.name.replace("×", "x"))
    return pytest.param(case, id=name, marks=[pytest.mark.slow] * (case.name not in CHOSEN))


@pytest.mark.parametrize("case", [_param(case) for case in gpu_estimates.cases()])
def test_estimate_is_close_to_the_compiled_memory(case):
    figures = gpu_estimates.measure(case, "h100")
    if "refused" in figures:
        pytest.skip(figures["refused"])
    # The estimate does not predict which operations XLA's scheduler moves. In small steps, a single
    # buffer can be several percent of the memory.
    low, high = gpu_estimates.bounds(figures["model"])
    assert low <= figures["ratio"] <= high, figures


def test_chosen_cases_exist():
    assert {case.name for case in gpu_estimates.cases()} >= CHOSEN
