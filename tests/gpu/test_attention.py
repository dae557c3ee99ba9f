"""Tests of attention in steps compiled for an H100.

It must use cuDNN's fused kernel, whose memory is linear in the sequence length, also for packed
documents.
"""

import pytest

from predict.program.memory import memory
from tests.compiled_arrays import widest_arrays
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

#: Two layers with LLaMA's shapes, on sequences of 8,192 tokens.
LONG = (
    "data.sequence_length=8192",
    "data.global_batch_size=2",
    "train.num_microbatches=1",
    "model.num_layers=2",
    "model.embed_dim=1024",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.head_dim=128",
    "model.mlp_dim=2816",
    *steps.BFLOAT16,
)


def temporaries(*overrides: str) -> int:
    run = steps.make_run("llama", (*LONG, *overrides))
    found = memory(run.compile_train_step()).temp_bytes
    assert found is not None
    return found


def test_packed_documents_add_little_memory():
    packed = temporaries("data.isolate_documents=True")
    assert packed <= 1.1 * temporaries()


def test_packed_documents_are_given_to_the_kernel():
    run = steps.make_run("llama", (*LONG, "data.isolate_documents=True"))
    text = steps.text_of(run)
    assert '"max_seg_per_batch":8' in text.replace(" ", "").replace('"8"', "8")
    # There is no mask [..., T, T] of scores, in any dtype.
    shapes = {array.shape for array, _ in widest_arrays(run.compile_train_step(), count=20)}
    assert not any(shape[-2:] == (8192, 8192) for shape in shapes)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("config", "dtype", "overrides"),
    [
        ("vit", "bfloat16", ("images.size=14", "model.patch_size=2")),  # 50 tokens
        ("vit", "float16", ("images.size=12", "model.patch_size=2")),  # 37 tokens
        ("llama", "bfloat16", ("model.sliding_window=16",)),
        ("llama", "bfloat16", ("mesh.model=4", "rules.kv_heads=()")),  # 2 key-value heads
        (
            "llama",
            "bfloat16",
            ("mesh.context=2", "mesh.model=2", "data.isolate_documents=True"),
        ),
        ("t5", "float16", ("data.target_length=33",)),
        ("swin", "bfloat16", ("model.version=2", "mesh.fsdp=2", "mesh.model=2")),
        (
            "gpt2",
            "float16",
            ("data.isolate_documents=True", "mesh.pipeline=2", "train.num_microbatches=4"),
        ),
    ],
)
def test_attention_is_fused(config, dtype, overrides):
    run = steps.make_run(config, (*overrides, f"precision.compute={dtype}"))
    assert {selected.kernel for selected in run.attention_kernels} == {"cudnn"}
    assert "__cudnn$fmha" in steps.text_of(run)
    steps.forget()


def test_plain_attention_that_makes_too_many_scores_is_refused():
    overrides = ("data.sequence_length=8192", "data.global_batch_size=16", "model.num_heads=4")
    with pytest.raises(
        ValueError, match=r"float32.*16.0 GiB for its scores.*model.attention=plain"
    ):
        steps.make_run("gpt2", overrides)
    run = steps.make_run("gpt2", (*overrides, "model.attention=plain"))
    assert run.attention_kernels[0].kernel == "plain"
