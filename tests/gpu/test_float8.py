"""Steps in float8 for H100s: which products run in float8, communication and memory."""

import re

import pytest

from benchmarks.harness.gpu_estimates import SMALL_BOUNDS
from predict.program.communication import collectives
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

_SIZES = (
    "data.tokenizer=bytes",
    "data.sequence_length=256",
    "data.global_batch_size=16",
    "model.mlp_dim=512",
    "train.remat=stage",
    "precision.compute=float8",
)


def products(run) -> dict[str, int]:
    """Return the number of cuBLAS calls in the program, in float8 and in other dtypes."""
    calls = re.findall(r'custom_call_target="__cublas\$lt\$matmul(\$f8)?"', steps.text_of(run))
    return {"float8": calls.count("$f8"), "other": calls.count("")}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("config, num_linears", [("gpt2", 4), ("llama", 7)])
def test_all_products_of_the_stacks_are_in_float8(config, num_linears, scaling):
    run = steps.make_run(config, (*_SIZES, f"precision.float8_scaling={scaling}"))
    # Forward, gradient of the input, gradient of the kernel. The head's three are in bfloat16.
    assert products(run) == {"float8": 3 * num_linears, "other": 3}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_all_products_of_experts_are_in_float8(scaling):
    experts = ("model.num_experts=4", "model.num_kv_heads=4", "train.remat=full")
    run = steps.make_run("llama", (*_SIZES, *experts, f"precision.float8_scaling={scaling}"))
    # The forward pass runs twice: with four products of attention, and one of the router, which
    # stays in bfloat16. A round and a block of rows of experts each have three products
    # forward; backward, they have gate and up again, and two for each of the three.
    attention = 4 * (2 + 2)
    experts = 2 * (3 + 2 + 6)
    head, router = 3, 2 + 2
    assert products(run) == {"float8": attention + experts, "other": head + router}


def test_weights_are_gathered_in_float8():
    def gathered(*overrides: str) -> int:
        sharded = (*_SIZES, "model.embed_dim=1024", "mesh.data=2", "memory.zero_stage=3")
        run = steps.make_run("llama", (*sharded, *overrides))
        found = collectives(run.compile_train_step(), run.mesh)
        return sum(
            each.bytes for each in found if each.kind == "all-gather" and each.loop == "layers"
        )

    # All but the norms.
    assert gathered() == pytest.approx(gathered("precision.compute=bfloat16") / 2, rel=0.01)


def test_tokens_are_sent_to_experts_in_float8():
    def sent(*overrides: str) -> int:
        experts = ("model.num_experts=4", "model.num_kv_heads=4", "mesh.expert=2")
        run = steps.make_run("llama", (*_SIZES, *experts, *overrides))
        found = collectives(run.compile_train_step(), run.mesh)
        # Choices and factors, int32 and float32, are sent too, in both programs.
        return sum(each.bytes for each in found if each.kind == "all-gather" and each.loop)

    in_bfloat16 = sent("precision.compute=bfloat16")
    assert sent() == pytest.approx(in_bfloat16 / 2, rel=0.05)
    # With current scaling, the scale depends on the tokens that a device receives.
    assert sent("precision.float8_scaling=current") == in_bfloat16


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["one device", "2×2×2"])
def test_estimate_of_memory(mesh):
    sizes = (*_SIZES, "model.embed_dim=512", "model.mlp_dim=2048")
    run = steps.make_run("gpt2", (*sizes, *steps.MESHES[mesh]))
    low, high = SMALL_BOUNDS
    assert low < run.estimate_memory().device_bytes / steps.compiled_bytes(run) < high


def test_gpus_without_float8_are_refused():
    with pytest.raises(ValueError, match="needs a GPU of compute capability 8.9 or higher, but"):
        steps.make_run("gpt2", _SIZES, target="a100")
