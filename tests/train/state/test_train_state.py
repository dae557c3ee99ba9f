"""The state in slots and in layers: the same bits, and no unnecessary copies."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from data.batches import train_batches
from tests.runs import TINY, digest, make_run
from train.state.train_state import TrainState

pytestmark = pytest.mark.drawn(2, among="thorough")

#: name -> (overrides, whether slots and layers of the stack differ).
LAYOUTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "even": (("mesh.pipeline=2", "mesh.fsdp=2"), False),
    "chunks": (
        (
            "mesh.pipeline=2",
            "mesh.model=2",
            "pipeline.schedule=interleaved_1f1b",
            "pipeline.chunks=2",
        ),
        True,
    ),
    "uneven": (
        ("mesh.pipeline=4", "pipeline.layers_per_stage=2,0,1,1"),
        True,
    ),
    "zbv": (
        (
            "mesh.pipeline=2",
            "mesh.fsdp=2",
            "pipeline.schedule=zbv",
            "pipeline.chunks=2",
            "pipeline.share_vocab=true",
        ),
        True,
    ),
}
CHANGED = {name: overrides for name, (overrides, changes) in LAYOUTS.items() if changes}


@functools.cache
def run_of(corpus_overrides: tuple[str, ...], name: str, *more: str):
    return make_run((*TINY, *corpus_overrides, *LAYOUTS[name][0], *more))


def spec_of(leaf: Any) -> PartitionSpec:
    return leaf.sharding.spec


def leaves(tree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def stack_leaves(state: TrainState) -> dict[str, jax.Array]:
    """Return the arrays of the stack in the state: parameters and both moments."""
    found = {path: leaf for path, leaf in leaves(state).items() if "decoder" in path}
    assert len(found) == 3 * 12  # a block has 12 parameters
    return found


def some_state(run) -> TrainState:
    """Return a state on the mesh whose elements are all different, and whose padding is zero."""
    layout = run.layouts["decoder"]
    rng = np.random.default_rng(0)

    def make(path, leaf):
        values = rng.uniform(1, 2, leaf.shape)
        if "decoder" in jax.tree_util.keystr(path):
            values[layout.layer_of_slot < 0] = 0
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(make, run.state_layout.abstract)


def as_restored(run, portable: TrainState) -> TrainState:
    """Return the state as a checkpoint would restore it: the same values on the devices."""
    return jax.tree.map(
        lambda leaf, target: jax.device_put(np.asarray(leaf), target.sharding),
        portable,
        run.state_layout.portable,
    )


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["even", "uneven", "zbv"])
def test_portable_round_trip_is_exact(name, corpus_overrides):
    run = run_of(corpus_overrides, name)[0]
    state = some_state(run)
    slot_of_layer = run.layouts["decoder"].slot_of_layer
    before = {path: np.asarray(leaf) for path, leaf in leaves(state).items()}
    portable = run.state_layout.to_portable(state)
    in_stack = stack_leaves(portable)
    for path, leaf in leaves(portable).items():
        wanted = leaves(run.state_layout.portable)[path]
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype), path
        assert spec_of(leaf) == spec_of(wanted), path
        layers = before[path][slot_of_layer] if path in in_stack else before[path]
        np.testing.assert_array_equal(np.asarray(leaf), layers, err_msg=path)
    restored = as_restored(run, portable)
    after = run.state_layout.from_portable(restored)
    for path, leaf in leaves(after).items():
        np.testing.assert_array_equal(np.asarray(leaf), before[path], err_msg=path)
        assert leaf.sharding == leaves(run.state_layout.abstract)[path].sharding, path
    # Converted arrays are deleted, because there may be no room for two copies of the state.
    gone = {path for path, leaf in leaves(restored).items() if leaf.is_deleted()}
    assert gone == (set(in_stack) if name in CHANGED else set())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, after)))


@pytest.mark.thorough
def test_state_becomes_portable_without_recompilation(corpus_overrides, compilations):
    """Every save of a run converts the state."""
    # No other test has this width, so the first conversion has to be compiled.
    run = run_of(corpus_overrides, "uneven", "model.embed_dim=80")[0]
    state = some_state(run)
    run.state_layout.to_portable(state)
    count = len(compilations)
    assert count > 0  # the control: the first conversion is compiled
    run.state_layout.to_portable(state)
    assert len(compilations) == count


def test_from_portable_accepts_the_shardings_of_to_portable(corpus_overrides):
    run = run_of(corpus_overrides, "uneven")[0]
    state = some_state(run)
    wanted = digest(state)
    assert digest(run.state_layout.from_portable(run.state_layout.to_portable(state))) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHANGED)
def test_portable_initial_state_equals_one_device_to_the_bit(name, corpus_overrides):
    run = run_of(corpus_overrides, name)[0]
    initial = run.state_layout.initial()
    portable = run.state_layout.to_portable(initial)
    assert digest(portable) == digest_of_one_device(corpus_overrides)
    # The digest is not a digest of zeros.
    assert all(np.any(leaf) for path, leaf in leaves(portable.params).items() if "kernel" in path)
    # Converted arrays are on the host; the others are neither copied nor moved.
    in_stack = stack_leaves(portable)
    for path, leaf in leaves(portable).items():
        if path in in_stack:
            assert leaf.sharding.memory_kind == "pinned_host", path
        else:
            assert leaf is leaves(initial)[path], path
            assert leaf.sharding.memory_kind != "pinned_host", path


@pytest.mark.thorough
def test_counters_missing_in_a_checkpoint_start_at_zero(corpus_overrides):
    state_layout = run_of(corpus_overrides, "uneven")[0].state_layout
    portable = state_layout.to_portable(state_layout.initial())
    lacking = dataclasses.replace(portable, num_nonfinite_in_a_row=None)
    count = state_layout.from_portable(lacking).num_nonfinite_in_a_row
    wanted = state_layout.abstract.num_nonfinite_in_a_row
    assert (int(count), count.dtype, count.sharding) == (0, wanted.dtype, wanted.sharding)


@functools.cache
def digest_of_one_device(corpus_overrides: tuple[str, ...]) -> str:
    state_layout = make_run((*TINY, *corpus_overrides))[0].state_layout
    return digest(state_layout.initial())


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", CHANGED)
def test_portable_arrays_are_not_split_by_layers(name, corpus_overrides):
    run = run_of(corpus_overrides, name)[0]
    num_stages = run.mesh.shape["pipeline"]
    in_slots = stack_leaves(run.state_layout.abstract)
    for path, leaf in stack_leaves(run.state_layout.portable).items():
        shard = leaf.sharding.shard_shape(leaf.shape)
        assert shard[0] == leaf.shape[0] == run.layouts["decoder"].num_layers, path
        # A device has no more of an array than a stage does; a stage has at least one slot.
        slots = in_slots[path]
        other_dims = slots.sharding.shard_shape(slots.shape)[1:]
        assert np.prod(shard[1:]) * num_stages == np.prod(other_dims), path
        # Devices have different parts, except those that replicate each other anyway.
        parts = {str(i) for i in leaf.sharding.devices_indices_map(leaf.shape).values()}
        assert len(parts) == np.prod(leaf.shape) // np.prod(shard) >= num_stages, path


def test_portable_array_without_a_divisible_dim_is_replicated(corpus_overrides):
    overrides = ("mesh.pipeline=4", "pipeline.layers_per_stage=2,1,1,0", "model.embed_dim=6")
    run, _ = make_run((*TINY, *corpus_overrides, "model.num_heads=1", *overrides))
    norms = [
        leaf for path, leaf in stack_leaves(run.state_layout.portable).items() if "norm" in path
    ]
    assert norms
    for leaf in norms:  # [layers, 6], and 4 stages
        assert leaf.sharding.shard_shape(leaf.shape) == leaf.shape
    up = [leaf for path, leaf in stack_leaves(run.state_layout.portable).items() if "up" in path]
    for leaf in up:  # [layers, 6, 24] and [layers, 24]: the dim that 4 divides
        assert leaf.sharding.shard_shape(leaf.shape) == (*leaf.shape[:-1], 6)


@pytest.mark.thorough
def test_padding_slots_stay_zero_while_training_with_weight_decay(corpus_overrides):
    overrides = ("mesh.pipeline=2", "pipeline.layers_per_stage=3,1", "optimizer.weight_decay=0.5")
    run, corpus = make_run((*TINY, *corpus_overrides, *overrides))
    state = run.state_layout.initial()
    before = {path: np.asarray(leaf) for path, leaf in stack_leaves(state).items()}
    batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
    for _ in range(3):
        batch = run.place_batch(next(batches))
        state, _ = run.compile_train_step()(state, batch)
    layer_of_slot = run.layouts["decoder"].layer_of_slot
    padding = np.flatnonzero(layer_of_slot < 0)
    used = np.flatnonzero(layer_of_slot >= 0)
    assert padding.tolist() == [4, 5]
    for path, leaf in stack_leaves(state).items():
        after = np.asarray(leaf)
        assert not np.any(after[padding]), path
        # The control: all other layers have changed.
        moved = np.any((after != before[path])[used].reshape(len(used), -1), axis=1)
        assert np.all(moved), path
