"""Initialization of the state: equal bits for any placement, and no device ever has all of it."""

import math

import jax
import numpy as np
import pytest

from predict.memory.jaxpr import open_jaxpr
from predict.memory.memory_estimate import estimate
from predict.program.memory import memory
from sharding.memory import num_bytes
from tests.compiled_arrays import has_array
from tests.runs import TINY, digest, make_run, reference_digest
from train.state.train_state import shardings_of

pytestmark = pytest.mark.drawn(2, among="thorough")

HOSTED = ("memory.placement=host", "memory.offload_parameters_fraction=1.0")
PLACEMENTS = {
    "all": HOSTED,
    "half the optimizer": ("memory.placement=host", "memory.offload_optimizer_fraction=0.5"),
}
MESHES = {
    "one device": (),
    "data=8, ZeRO 3": ("mesh.data=8", "memory.zero_stage=3"),
    "2x2x2, fsdp": ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.model=2"),
    "chunks": (
        "mesh.pipeline=2",
        "mesh.fsdp=4",
        "pipeline.chunks=2",
        "pipeline.schedule=interleaved_1f1b",
    ),
    "uneven": ("mesh.pipeline=2", "mesh.model=2", "pipeline.layers_per_stage=3,1"),
}


@pytest.mark.slow(
    only=[
        "data=8, ZeRO 3-all",
        "2x2x2, fsdp-all",
        "chunks-half the optimizer",
        "uneven-all",
        "one device-half the optimizer",
    ]
)
@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_initial_parameters_in_host_memory_equal_one_device(mesh, placement, corpus_overrides):
    base = (*TINY, *corpus_overrides)
    run, _ = make_run((*base, *MESHES[mesh], *PLACEMENTS[placement]))
    state = run.state_layout.initial()
    assert jax.tree.map(lambda x: x.sharding, state) == shardings_of(run.state_layout.abstract)
    assert digest(run.state_layout.to_portable(state).params) == reference_digest(base)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["one device", "2x2x2, fsdp", "uneven"])
def test_given_parameters_are_moved_to_host_memory_unchanged(mesh, corpus_overrides):
    base = (*TINY, *corpus_overrides, *MESHES[mesh])
    plain, _ = make_run((*base, "train.seed=1"))
    hosted, _ = make_run((*base, *HOSTED))
    given = plain.state_layout.to_portable(plain.state_layout.initial()).params
    expected = digest(given)
    given = jax.device_put(
        given, jax.tree.map(lambda x: x.sharding, hosted.state_layout.portable.params)
    )
    state = hosted.state_layout.initial(given)
    assert digest(hosted.state_layout.to_portable(state).params) == expected
    assert jax.tree.map(lambda x: x.sharding, state) == shardings_of(hosted.state_layout.abstract)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["data=8, ZeRO 3", "2x2x2, fsdp", "chunks"])
def test_initialization_uses_only_the_shards_of_each_device(mesh, corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides, *MESHES[mesh], "model.embed_dim=128"))
    compiled = run.state_layout.state_init.initialize_at_once.lower().compile()
    leaves = jax.tree.leaves(run.state_layout.abstract)
    shards = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
    made = memory(compiled).in_all
    # A shard and its random bits exist at the same time; the whole is eight times as large.
    assert made is not None and made < 2 * sum(shards) < sum(map(num_bytes, leaves)) / 2
    for leaf in leaves:
        if not leaf.sharding.is_fully_replicated and leaf.size > 128 * 128:
            assert not has_array(compiled, leaf.shape, leaf.dtype)


def test_initialization_keeps_offloaded_stacks_out_of_device_memory(corpus_overrides):
    """Layers are created one at a time; see only_layers in models/stack.py."""
    run, _ = make_run((*TINY, *corpus_overrides, *HOSTED))
    with jax.set_mesh(run.mesh):
        program = open_jaxpr(run.state_layout.state_init.initialize_at_once.trace().jaxpr, ())
    found = estimate(program, (), run.mesh.shape, platform="cpu")
    ends = {name: x for name, x in run.state_layout.abstract.params.items() if name != "decoder"}
    assert found.device_bytes <= 2 * sum(map(num_bytes, jax.tree.leaves(ends)))
