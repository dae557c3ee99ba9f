"""GPT-2 on every pipeline schedule: the losses of one device, and properties of the step."""

import itertools
import re

import jax
import numpy as np
import pytest

from models.layers.flops import attention_flops, dense_flops
from predict.program.flops import matmul_flops
from predict.program.memory import memory
from tests.runs import (
    FLOAT64,
    TINY,
    digest,
    losses,
    make_run,
    reference_digest,
    reference_losses,
)

#: Schedule -> overrides. The model's 10 layers are never evenly divided over the stages.
SCHEDULES = {
    "gpipe": (),
    "1f1b": (),
    "interleaved_1f1b": ("pipeline.chunks=2",),
    "zero_bubble": (),
    "zbv": ("pipeline.chunks=2",),
}
REMAT = ("stage", "none")
MESHES = {
    "pipeline=4": ("mesh.pipeline=4",),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "fsdp 2x2x2": ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.model=2"),
}
#: Fewer, as many, and more microbatches than stages.
MICROBATCHES = {"pipeline=4": (2, 4, 8), "2x2x2": (1, 2, 8), "fsdp 2x2x2": (1, 2, 8)}
ALL = list(itertools.product(SCHEDULES, REMAT, MESHES, range(3)))
#: Each schedule with each remat; meshes and numbers of microbatches take turns.
SOME = [
    (schedule, remat, list(MESHES)[(i + 2 * j) % 3], (i + j) % 3)
    for (i, schedule), (j, remat) in itertools.product(enumerate(SCHEDULES), enumerate(REMAT))
]


def overrides_of(schedule: str, remat: str, mesh: str, which: int) -> tuple[str, ...]:
    chosen = (
        f"pipeline.schedule={schedule}",
        f"train.remat={remat}",
        f"train.num_microbatches={MICROBATCHES[mesh][which]}",
        # One of the three uses ZeRO stage 3, and shares embedding and head among all stages.
        *(("memory.zero_stage=3", "pipeline.share_vocab=true") if which == 1 else ()),
        *SCHEDULES[schedule],
        *MESHES[mesh],
    )
    even = mesh != "pipeline=4" and not SCHEDULES[schedule]
    return (*chosen, "pipeline.layers_per_stage=6,4") if even else chosen


def check(case, corpus_overrides, *, x64: bool) -> None:
    base = (*TINY, *corpus_overrides, "model.num_layers=10", *(FLOAT64 if x64 else ()))
    num_steps, tolerance = (4, 1e-9) if x64 else (10, 1e-4)
    with jax.enable_x64(x64):
        run, corpus = make_run((*base, *overrides_of(*case)))
        initial = run.state_layout.to_portable(run.state_layout.initial())
        assert digest(initial.params) == reference_digest(base)
        found = losses(run, corpus, num_steps)
        np.testing.assert_allclose(found, reference_losses(base, num_steps), rtol=tolerance, atol=0)


@pytest.mark.slow(
    only=[
        "('gpipe', 'stage', 'pipeline=4', 0)",
        "('1f1b', 'stage', '2x2x2', 1)",
        "('interleaved_1f1b', 'none', '2x2x2', 0)",
        "('zbv', 'none', 'pipeline=4', 2)",
    ]
)
@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_losses_equal_one_device(case, corpus_overrides):
    check(case, corpus_overrides, x64=True)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_losses_equal_one_device_in_every_combination(case, x64, corpus_overrides):
    check(case, corpus_overrides, x64=x64)


def microbatches(count: int) -> tuple[str, ...]:
    """Return the overrides for `count` microbatches of 2 sequences."""
    return (f"train.num_microbatches={count}", f"data.global_batch_size={2 * count}")


@pytest.mark.thorough
@pytest.mark.parametrize("schedule, remat", [("1f1b", "none"), ("zero_bubble", "stage")])
def test_memory_does_not_grow_with_microbatches(schedule, remat, corpus_overrides):
    def temporaries(count):
        overrides = (
            *TINY,
            *corpus_overrides,
            *microbatches(count),
            "mesh.pipeline=4",
            f"pipeline.schedule={schedule}",
            f"train.remat={remat}",
            "model.embed_dim=64",
        )
        temp_bytes = memory(make_run(overrides)[0].compile_train_step()).temp_bytes
        assert temp_bytes is not None
        return temp_bytes

    assert temporaries(32) <= 1.1 * temporaries(8)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule, extra_iterations", [("1f1b", 1), ("zero_bubble", 0)])
def test_remat_adds_one_forward_pass_of_the_stage_per_tick(
    schedule, extra_iterations, corpus_overrides
):
    def compiled(remat):
        overrides = (*TINY, *corpus_overrides, *microbatches(8), "mesh.pipeline=4")
        pipeline = (f"pipeline.schedule={schedule}", f"train.remat={remat}")
        return make_run((*overrides, *pipeline, "model.num_layers=8"))[0]

    stage = compiled("stage")
    none = compiled("none")
    products = {
        "stage": matmul_flops(stage.compile_train_step()),
        "none": matmul_flops(none.compile_train_step()),
    }
    assert products["stage"] is not None and products["none"] is not None
    # A stage has two layers, a microbatch has 2 sequences, and all branches count as taken.
    batch = 2
    length = 16
    embed = 32
    num_heads = 4
    kernels = dense_flops(embed, 3 * embed) + dense_flops(embed, embed)
    kernels += 2 * dense_flops(embed, 4 * embed)
    scores = attention_flops(length, num_heads, embed // num_heads, is_causal=False)
    forward = 2 * batch * length * (kernels + scores)
    # The loop of 1F1B is skewed: it runs the backwards of a tick in the next iteration.
    iterations = len(stage.schedule.ticks) + extra_iterations
    assert products["stage"] - products["none"] == iterations * forward


@pytest.mark.thorough
def test_program_size_does_not_grow_with_the_layers(corpus_overrides):
    """Compiling 48 layers takes as long as compiling 12."""

    def instructions(num_layers):
        overrides = (*TINY, *corpus_overrides, "mesh.pipeline=4", f"model.num_layers={num_layers}")
        run, _ = make_run((*overrides, "train.num_microbatches=4", "train.remat=none"))
        return len(
            re.findall(r"^\s+\S+ = ", str(run.compile_train_step().as_text()), flags=re.MULTILINE)
        )

    assert instructions(48) == instructions(12)
