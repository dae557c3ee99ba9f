"""Bytes that a step moves to and from device memory, counted in steps compiled for H100s."""

import re

import pytest

from pipeline.runtime.tick_table import TICKS
from predict.program import asynchrony
from predict.program.instruction import Instruction, arrays_of, loop_label
from predict.program.module import Module
from predict.program.parse import parse_modules
from predict.time.memory_traffic import moved_bytes
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

TOKENS = 16 * 1024
WIDTH = 512
_TEXT = (
    "data.tokenizer=bytes",
    "data.global_batch_size=16",
    "data.sequence_length=1024",
    f"model.embed_dim={WIDTH}",
    *steps.BFLOAT16,
)
_ONE_GPU = (*_TEXT, "mesh.pipeline=1", "mesh.data=1", "mesh.model=1", "train.num_microbatches=1")


def is_elementwise(instruction: Instruction) -> bool:
    """Return whether an instruction is a kernel of XLA's own: no product and no attention."""
    others = ("while", "conditional", "call", "custom-call", "fusion-done")
    return instruction.opcode not in (*asynchrony.NO_WORK, *others)


def computes_product(module: Module, instruction: Instruction) -> bool:
    """Return whether a fusion only makes a product read or write a slice of a larger array."""
    inner = (i for name in instruction.called for i in module.computations.get(name, []))
    return any(i.opcode == "custom-call" for i in inner)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("config", "most"), [("gpt2", 116), ("llama", 50)])
def test_layers_move_few_bytes(config, most):
    """Between products and attention, a layer moves few bytes in its forward and backward.

    The unit is one pass over its bfloat16 activations `[tokens, width]`. Saving a residual, or
    reading it, takes two passes of `width` with jax 0.10, and none with jax 0.12. GPT-2 takes four
    more to sum the gradient of a bias that a GELU reads: faster than in the GELU's own kernel.
    """
    run = steps.make_run(config, _ONE_GPU)
    (module,) = parse_modules(steps.text_of(run))
    moved = sum(
        moved_bytes(module, kernel)
        for kernel, loops in module.under_loops(is_elementwise)
        if loops and loop_label(loops[-1]) == "layers" and not computes_product(module, kernel)
    )
    assert moved / (2 * TOKENS * WIDTH) <= most


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1)]
)
def test_ticks_copy_no_buffers(schedule, chunks):
    """A tick updates residual buffers and gradient sums in place."""
    pipeline = (
        "mesh.pipeline=2",
        "model.num_layers=8",
        "train.num_microbatches=4",
        f"pipeline.schedule={schedule}",
        f"pipeline.chunks={chunks}",
        "train.remat=none",
    )
    run = steps.make_run("gpt2", (*_TEXT, *pipeline))
    (module,) = parse_modules(steps.text_of(run))
    activations = 2 * WIDTH * TOKENS // 4

    def copied(instruction: Instruction) -> int:
        is_copy = instruction.opcode in ("copy", "copy-start") or re.match(
            r"(wrapped_)?copy", instruction.name
        )
        return sum(array.bytes for array in arrays_of(instruction.type)) if is_copy else 0

    large = [
        (copy.name, copied(copy))
        for copy, loops in module.under_loops(lambda i: copied(i) > activations)
        if any(loop_label(loop) == TICKS for loop in loops)
    ]
    assert not large
