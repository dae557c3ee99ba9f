"""Tests of attention in steps compiled for an H100.

It must use cuDNN's fused kernel, whose memory is linear in the sequence length, also for packed
documents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.layers.attention import attend, recorded_kernels
from predict.machines.targets import parse_target
from predict.program.memory import memory
from predict.program.parse import text_of as program_text
from sharding.compiler_options import options_for
from sharding.hardware import hardware_of, use
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


#: Latent attention, whose keys are larger than its values.
DEEPSEEK = (
    "model.num_kv_heads=4",
    "model.head_dim=128",
    "model.latent_dim=256",
    "model.latent_rotary_dim=64",
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


def test_chunks_are_given_to_the_kernel_as_documents():
    """LLaMA 4: a query sees the keys of its own chunk; the scores of all pairs never exist."""
    chunked = ("model.layer_types=('chunked', 'no_positions')", "model.attention_chunk=1024")
    run = steps.make_run("llama", (*LONG, *chunked))
    assert {kernel.kernel for kernel in run.attention_kernels} == {"cudnn"}
    assert not any(kernel.scores_bytes for kernel in run.attention_kernels)
    assert '"max_seg_per_batch":8' in steps.text_of(run).replace(" ", "").replace('"8"', "8")


def test_soft_capped_scores_have_linear_memory():
    """Gemma 2: cuDNN has no soft caps, so a loop computes the scores of a few queries at a time."""
    pattern = ("model.layer_types=('window', 'full')", "model.sliding_window=4096")
    capped = (*pattern, "model.attention_softcap=50.0", "model.logit_softcap=30.0")
    run = steps.make_run("llama", (*LONG, *capped))
    assert {str(kernel) for kernel in run.attention_kernels} == {"blocked (soft-capped scores)"}
    half = temporaries(*capped, "data.sequence_length=4096", "data.global_batch_size=2")
    assert temporaries(*capped) <= 2.2 * half


def test_sinks_use_the_fused_kernel():
    target = parse_target("h100:1x1")
    mesh = Mesh(np.array(target.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    queries, keys = (
        jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16, sharding=sharding)
        for heads in (8, 2)
    )
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)

    def loss(q, k, v, sinks_N):
        y = attend(q, k, v, is_causal=True, sinks_N=sinks_N)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    kind = hardware_of(mesh.devices.flat[0])
    with use(kind), recorded_kernels() as kernels:
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(queries, keys, keys, sinks)
    options = options_for(kind, is_described=True, saves_memory=True)
    compiled = target.compile(traced, mesh, options)
    assert [selected.kernel for selected in kernels] == ["cudnn"]
    assert "__cudnn$fmha" in program_text(compiled)
    found = memory(compiled).temp_bytes
    assert found is not None and found < 2**27  # the scores alone would take 2**31 bytes


@pytest.mark.drawn(2)
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
        ("llama", "bfloat16", DEEPSEEK),
        ("llama", "bfloat16", (*DEEPSEEK, "data.isolate_documents=True", "mesh.model=2")),
        ("llama", "bfloat16", (*DEEPSEEK, "mesh.context=2", "mesh.ulysses=1")),
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
