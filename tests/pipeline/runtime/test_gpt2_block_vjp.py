"""The `BlockVJP` of a GPT-2 block: its residuals and FLOPs, identical in every process."""

import functools
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.functions import functions_of
from models.text.gpt2 import GPT2, GPT2Config
from tests.pipeline.runtime.blocks import (
    B,
    D,
    Example,
    N,
    T,
    check,
    costs,
    draw,
    shapes,
)
from tests.runs import ROOT


@functools.cache
def gpt2_block(remat: str, *, uses_dropout: bool, length: int = T) -> Example:
    config = GPT2Config(
        vocab_size=40, max_positions=length, num_layers=2, num_heads=N, embed_dim=D, dropout=0.2
    )
    model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
    functions = functions_of(model, remat=remat)
    layers = functions.split(nnx.to_pure_dict(nnx.split(model)[1]))["stacks"]["decoder"]
    # Not the initial values: zero biases and small kernels would hide wrong gradients.
    params = jax.tree.map(lambda p: 0.3 * draw(*p.shape[1:]), layers)
    batch = {"weights": draw(B, length)}
    if uses_dropout:
        batch["dropout_keys"] = jax.random.split(jax.random.key(0), B)
    block = functions.blocks["decoder"]
    return Example(block, params, draw(B, length, D), batch, jnp.int32(1))


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("uses_dropout", [False, True])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gpt2_block_equals_jax_vjp_and_saves_only_activations(remat, uses_dropout):
    with jax.enable_x64(True):
        example = gpt2_block(remat, uses_dropout=uses_dropout)
        saved, handed = check(example)
        # Every array has a batch and a sequence dim; weights and causal masks do not.
        for array in (*saved, *handed):
            # Keys and values have a row per head, queries a row per head and group.
            rows = B * T
            head_rows = ((B, N, T), (B, N, 1, T))
            assert (
                array.shape[:2] == (B, T)
                or array.shape[:3] in head_rows
                or array.shape[:4] in head_rows
                or (array.shape[0] == rows)
            ), array.shape
        # Random bits are saved only as masks; recomputed functions draw them again.
        masks = 2 if uses_dropout and remat == "none" else 0
        assert [a.dtype.name for a in saved].count("bool") == masks
        assert {a.dtype.name for a in (*saved, *handed)} <= {"bool", "float64"}
        if remat == "full":
            assert len(saved) == 1
            np.testing.assert_array_equal(saved[0], example.x)


def test_gpt2_block_saves_no_norm_no_activation_and_nothing_twice():
    with jax.enable_x64(True):
        saved = gpt2_block("none", uses_dropout=False).taken_apart().saved
        # x, q, k, v, the attention's output, x after attention; the input of gelu; and per head and
        # row the largest logit and the sum of exponentials.
        sizes = 6 * [B * T * D] + [B * T * 4 * D] + 2 * [B * N * T]
        assert sorted(math.prod(array.shape) for array in saved) == sorted(sizes)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gpt2_block_runs_no_matrix_product_twice(remat):
    with jax.enable_x64(True):
        example = gpt2_block(remat, uses_dropout=True)
        whole, first, second = costs(example)
        assert first + second == whole
        kernels = D * 3 * D + D * D + 2 * D * 4 * D  # qkv, out, up and down
        # The second half consists of all matrix products for the kernels' gradients.
        assert second == 2 * B * T * kernels


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gpt2_block_keeps_nothing_quadratic_in_the_sequence(remat):
    with jax.enable_x64(True):
        long = 256  # two blocks of queries; longer than any other dim
        taken = gpt2_block(remat, uses_dropout=True, length=long).taken_apart()
        for shape in shapes([*taken.saved, *taken.handed]):
            assert math.prod(shape) <= B * long * 4 * D, shape
        # Control: the block does have intermediate products of quadratic size.
        quadratic = B * N * long * long
        assert quadratic > B * long * 4 * D


_SCRIPT = """
import hashlib
import jax
from tests.pipeline.runtime.test_gpt2_block_vjp import gpt2_block
with jax.enable_x64(True):
    example = gpt2_block("none", uses_dropout=True)
    taken = example.taken_apart()
    kept = [taken.saved[i] for i in taken.saved_for_weights]
    free = example.params, example.microbatch, example.number
    args = *free, taken.saved, example.x
    late = *free, kept, taken.handed
    print([(s.shape, s.dtype.name) for s in (*taken.saved, *taken.handed)])
    print(taken.saved_for_weights)
    for function, inputs in ((taken.input_gradient, args), (taken.weight_gradient, late)):
        program = jax.jit(function).lower(*inputs).as_text()
        print(hashlib.sha256(program.encode()).hexdigest())
"""


@pytest.mark.thorough
def test_every_process_traces_the_same_program():
    def run(seed: str) -> subprocess.Popen:
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _SCRIPT]
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    processes = [run("1"), run("2")]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 4
