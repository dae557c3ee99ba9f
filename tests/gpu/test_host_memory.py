"""Tests of state and activations in host memory, in steps compiled for an H100.

The copies inside loops must be asynchronous, so that they can overlap with computation.
"""

import math

import jax
import pytest

from predict.program.memory import memory
from tests.gpu import steps
from tests.host_copies import host_copies
from train.state.train_state import is_for_host

pytestmark = pytest.mark.gpu_compiler

HOST = ("memory.placement=host", *steps.BFLOAT16)


def host_bytes(run) -> int:
    found = memory(run.compile_train_step()).host_bytes
    assert found is not None
    return found


def state_bytes_on_host(run) -> int:
    """Return the bytes of host memory that one device's shards of the state need."""
    state = run.state_layout.abstract
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
        if is_for_host(leaf)
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("mesh.data=2", "memory.zero_stage=2"),
        ("mesh.model=2",),
        ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2", "train.num_microbatches=4"),
        ("memory.offload_parameters_fraction=1.0",),
    ],
)
def test_state_is_in_host_memory(overrides):
    run = steps.make_run("gpt2", (*HOST, *overrides))
    assert host_bytes(run) >= state_bytes_on_host(run) > 0
    copies = host_copies(run.compile_train_step())
    moved = {copy.direction for copy in copies}
    assert moved == {"to host", "to device"}
    in_loops = [copy for copy in copies if copy.loop and copy.bytes > 1024]
    assert in_loops and all(copy.is_async for copy in in_loops)
    steps.forget()


def test_activations_are_in_host_memory():
    overrides = ("train.remat=stage,full", *steps.BFLOAT16)
    plain = steps.make_run("gpt2", overrides)
    moved = steps.make_run("gpt2", (*overrides, "memory.offload_activations=qkv,mlp"))
    assert host_bytes(plain) == 0
    layers = 4
    tokens = 16 * 128
    width = 128
    # In bfloat16, each token and layer keeps 3 × width numbers of qkv and 4 × width of mlp.
    assert host_bytes(moved) >= layers * tokens * 7 * width * 2
    copies = [copy for copy in host_copies(moved.compile_train_step()) if copy.loop]
    assert copies and all(copy.is_async for copy in copies)
