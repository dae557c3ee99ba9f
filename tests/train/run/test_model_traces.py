"""FLOPs compared with formulas, and the balance of stages compared with all other cuts."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.functions import functions_of
from models.layers.flops import traced_flops
from models.text.gpt2 import GPT2, GPT2Config
from train.run.model_traces import count_work

B = 2
T = 8
D = 16
N = 2
LAYERS = 6


def struct(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# FLOPs of a GPT-2 from formulas: matrix products of a layer and of the head.


def gpt2(vocab_size: int):
    """Return a GPT-2's functions, abstract parameters and abstract microbatch."""
    config = GPT2Config(
        vocab_size=vocab_size,
        max_positions=T,
        num_layers=LAYERS,
        num_heads=N,
        embed_dim=D,
        dropout=0.0,
        vocab_multiple=8,
    )
    model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
    ids = struct(B, T, dtype=jnp.int32)
    batch = {"tokens": ids, "targets": ids, "weights": struct(B, T)}
    return functions_of(model, remat="none"), nnx.to_pure_dict(nnx.split(model)[1]), batch


def layer_flops(*, recomputes: bool) -> int:
    """Return the FLOPs of a layer, forward and backward, with Taibai's attention for CPUs.

    The kernels of qkv, out, up and down need one product forward and two backward. Attention needs
    two forward (q·kᵀ and weights·v) and five backward, which recomputes q·kᵀ.
    """
    kernels = 2 * B * T * (3 * D * D + D * D + 2 * 4 * D * D)
    scores = 2 * B * T * T * D
    forward = kernels + 2 * scores
    return forward * (1 + recomputes) + 2 * kernels + 5 * scores


def head_flops(vocab: int) -> int:
    return 3 * (2 * B * T * D * vocab)


def busiest(counts, vocab: int, *, recomputes: bool, shares_vocab: bool) -> int:
    """Return the FLOPs of the busiest stage."""
    stages = [count * layer_flops(recomputes=recomputes) for count in counts]
    if not shares_vocab:
        # The last stage's forward pass is part of its backward pass: nothing is recomputed.
        stages[-1] = counts[-1] * layer_flops(recomputes=False) + head_flops(vocab)
    return max(stages)


def balanced(
    vocab: int, num_virtual_stages: int, *, recomputes: bool, shares_vocab: bool
) -> list[int]:
    work = count_work(*gpt2(vocab), recomputes=recomputes)
    return work.balanced(num_virtual_stages, shares_vocab=shares_vocab)


@pytest.mark.thorough(but=["8-4-True", "256-1-False", "256-1-True"])
@pytest.mark.drawn(4)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("num_virtual_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab", [8, 256, 512, 4096])
def test_balanced_minimizes_the_load_of_the_busiest_stage(vocab, num_virtual_stages, recomputes):
    for shares_vocab in (False, True):
        flags = {"recomputes": recomputes, "shares_vocab": shares_vocab}
        counts = balanced(vocab, num_virtual_stages, **flags)
        assert len(counts) == num_virtual_stages and sum(counts) == LAYERS
        every = itertools.product(range(LAYERS + 1), repeat=num_virtual_stages)
        best = min(busiest(c, vocab, **flags) for c in every if sum(c) == LAYERS)
        assert busiest(counts, vocab, **flags) == best


def test_balanced_gives_fewer_layers_to_the_stage_of_a_large_head():
    flags = {"recomputes": True, "shares_vocab": False}
    # The head costs as much as 1 to 2 layers.
    assert 1 < head_flops(512) / layer_flops(recomputes=True) < 2
    assert balanced(512, 2, **flags) == [4, 2]
    assert balanced(8, 2, **flags) == [3, 3]
    assert balanced(2**14, 2, **flags) == [6, 0]


@pytest.mark.parametrize("num_virtual_stages", [2, 3, 6])
def test_balanced_is_even_with_a_shared_vocab(num_virtual_stages):
    counts = balanced(2**14, num_virtual_stages, recomputes=True, shares_vocab=True)
    assert counts == [LAYERS // num_virtual_stages] * num_virtual_stages


def test_layer_flops_of_the_formula_equal_the_traced_ones():
    """The other tests rely on the formula above."""
    functions, params, batch = gpt2(8)
    layer = jax.tree.map(
        lambda p: struct(*p.shape[1:]), functions.split(params)["stacks"]["decoder"]
    )
    x = struct(B, T, D)
    number = struct(dtype=jnp.int32)
    block = functions.blocks["decoder"]

    def backward(layer, x, batch, number, dy):
        return jax.vjp(lambda layer, x: block(layer, x, batch, number), layer, x)[1](dy)

    forward = traced_flops(block, layer, x, batch, number)
    assert forward == layer_flops(recomputes=True) - layer_flops(recomputes=False)
    found = traced_flops(backward, layer, x, batch, number, x)
    assert found == layer_flops(recomputes=False)


def test_work_per_virtual_stage_counts_recomputation_on_its_stage():
    work = count_work(*gpt2(8), recomputes=True)
    alone, shared = (work.per_virtual_stage([3, 3], shares_vocab=s) for s in (False, True))
    once, twice = (layer_flops(recomputes=r) for r in (False, True))
    assert alone == [3 * twice, 3 * once + head_flops(8)]
    assert shared == [3 * twice + head_flops(8) / 2] * 2


def test_work_per_virtual_stage_counts_embedding_and_head_on_their_stages():
    work = count_work(*gpt2(512), recomputes=False)
    alone, shared = (work.per_virtual_stage([4, 2], shares_vocab=s) for s in (False, True))
    layer = layer_flops(recomputes=False)
    assert alone == [4 * layer, 2 * layer + head_flops(512)]
    assert shared == [4 * layer + head_flops(512) / 2, 2 * layer + head_flops(512) / 2]
