"""ZeRO: the losses of one device, a sharded state, and no unexpected collectives."""

import math
from collections import defaultdict

import jax
import numpy as np
import pytest

from predict.program.communication import collectives
from tests.runs import FLOAT64, TINY, digest, losses, make_run, reference_digest, reference_losses

MESHES = {
    "one device": (),
    "data=4": ("mesh.data=4",),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "data=2 fsdp=2": ("mesh.data=2", "mesh.fsdp=2"),
}
#: Cases that CI omits: it trains each stage on data=4 and on one of these two meshes.
CAMPAIGN = {("2x2x2", 2), ("data=2 fsdp=2", 1)}
#: Smaller all-reduces are of losses, counts and norms.
FEW_BYTES = 512


def combinations():
    for mesh in MESHES:
        for stage in (1, 2, 3) if mesh != "one device" else (3,):
            is_slow = (mesh, stage) in CAMPAIGN
            yield pytest.param(mesh, stage, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("mesh", "stage"), list(combinations()))
def test_losses_equal_one_device(mesh, stage, corpus_overrides):
    with jax.enable_x64(True):
        base = (*TINY, *corpus_overrides, *FLOAT64)
        run, corpus = make_run((*base, *MESHES[mesh], f"memory.zero_stage={stage}"))
        assert digest(
            run.state_layout.to_portable(run.state_layout.initial()).params
        ) == reference_digest(base)
        # Rounding errors in float64 are about 1e-16 per sum; bugs cause far larger differences.
        found = losses(run, corpus, 5)
        np.testing.assert_allclose(found, reference_losses(base, 5), rtol=1e-9, atol=0)


def a_run(corpus_overrides, *overrides: str):
    """Return a run in which eight replicas can shard every parameter."""
    run, _ = make_run((*TINY, *corpus_overrides, *overrides))
    return run


def num_bytes(tree) -> int:
    """Return the bytes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_and_optimizer_state_are_split_into_eighths(stage, corpus_overrides):
    run = a_run(corpus_overrides, "mesh.data=8", f"memory.zero_stage={stage}")
    whole = 4 * run.num_params
    state = run.state_layout.abstract
    parts = 8 if stage else 1
    assert num_bytes(state.params) == whole // parts
    (moments,) = [
        part for part in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(part)
    ]
    assert num_bytes(moments.mu) == num_bytes(moments.nu) == whole // parts
    # The state is created with these shardings, and a step keeps them.
    for leaf, real in zip(
        jax.tree.leaves(state), jax.tree.leaves(run.state_layout.initial()), strict=True
    ):
        assert real.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def _is_adam(part) -> bool:
    return hasattr(part, "mu")


def bytes_by_kind(run) -> dict[tuple, int]:
    """Return (kind, axes, whether in the loop over layers) -> bytes per device and execution."""
    found = defaultdict(int)
    for each in collectives(run.compile_train_step(), run.mesh):
        if each.kind != "all-reduce" or each.bytes > FEW_BYTES:
            found[each.kind, each.axes, each.loop_depth > 1] += each.bytes
    return dict(found)


@pytest.mark.thorough
def test_collectives_over_data_match_the_zero_stage(corpus_overrides):
    data = ("data",)

    def found(stage, *overrides):
        stage = f"memory.zero_stage={stage}"
        return bytes_by_kind(a_run(corpus_overrides, "mesh.data=8", stage, *overrides))

    run = a_run(corpus_overrides, "mesh.data=8")
    params = run.state_layout.abstract.params
    whole = num_bytes(params)
    layer = num_bytes(params["decoder"]) // 4
    ends = whole - 4 * layer
    # The head's loss and counts are reduced together with the gradients.
    assert found(0) == {("all-reduce", data, False): pytest.approx(whole, abs=FEW_BYTES)}
    assert found(1) == {
        ("all-gather", data, False): whole,
        ("all-reduce", data, False): pytest.approx(whole, abs=FEW_BYTES),
    }
    assert found(2) == {
        ("all-gather", data, False): whole,
        ("reduce-scatter", data, False): whole // 8,
    }
    # In the loop over layers, a layer is gathered in the forward and again in the backward pass,
    # except for the few biases that the backward pass does not read; no loop gathers all layers.
    deep = found(3)
    assert deep.pop(("all-gather", data, True)) == pytest.approx(2 * layer, rel=0.05)
    assert deep == {
        ("all-gather", data, False): ends,
        ("reduce-scatter", data, True): layer // 8,
        ("reduce-scatter", data, False): ends // 8,
    }
    part = found(3, "memory.shard_parameters_fraction=0.5")
    in_loop = part["reduce-scatter", data, True] * 8
    assert 0.5 * layer <= in_loop < layer
    assert part["all-gather", data, False] == ends + 4 * (layer - in_loop)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("zero", ["memory.zero_stage=0", "memory.zero_stage=3"])
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_parameters_are_gathered_over_replicas_only(axis, zero, corpus_overrides):
    """A gather over replicas keeps the split over `model`, so that no device gets a whole layer."""
    sizes = ("mesh.pipeline=2", f"mesh.{axis}=2", "mesh.model=2", "rules.act_tokens=none")
    run = a_run(corpus_overrides, *sizes, zero)
    kinds = {(each.kind, each.axes) for each in collectives(run.compile_train_step(), run.mesh)}
    gathers = {axes for kind, axes in kinds if kind == "all-gather"}
    assert gathers == (set() if axis == "data" and zero.endswith("0") else {(axis,)})
    assert {axes for kind, axes in kinds if kind == "reduce-scatter"} <= {(axis,)}


@pytest.mark.thorough
def test_no_device_stores_all_gradients_in_stage_3(corpus_overrides):
    def temporaries(stage):
        layers = ("model.num_layers=16", "model.embed_dim=64")
        run = a_run(corpus_overrides, "mesh.data=8", f"memory.zero_stage={stage}", *layers)
        memory = run.compile_train_step().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes, num_bytes(run.state_layout.abstract.params) * 8

    (of_2, whole) = temporaries(2)
    (of_3, _) = temporaries(3)
    # In a step, stage 2 has all parameters and their gradients, stage 3 an eighth of them.
    assert of_2 - of_3 > 1.5 * whole
