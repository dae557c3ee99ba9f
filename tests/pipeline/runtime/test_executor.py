"""The executor, compared with plain differentiation of the same functions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pipeline.runtime.executor import make_evaluate, make_loss_and_grad, make_teach
from pipeline.schedule import forward_only, make_schedule
from pipeline.schedules.table import Op, Schedule, verify
from pipeline.stack_layout import cut
from predict.program.communication import collectives
from predict.program.memory import memory
from sharding.memory import MemoryConfig
from sharding.mesh import MeshConfig, make_mesh
from tests.pipeline.runtime.nets import (
    NO_ZERO,
    EncoderDecoder,
    Net,
    Pyramid,
    Teacher,
    inputs,
    param_sharding_of,
    place,
    plain_sums,
    to_layers,
)

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1, "zbv": 2}
MESHES = {
    "one device": {},
    "pipeline=4": {"pipeline": 4},
    "pipeline=2 data=2 model=2": {"pipeline": 2, "data": 2, "model": 2},
    "pipeline=2 fsdp=2 model=2": {"pipeline": 2, "fsdp": 2, "model": 2},
}


@pytest.fixture(autouse=True)
def empty_is_not_zero(monkeypatch):
    """On GPUs, `jax.lax.empty` has arbitrary values. On CPUs it has zeros, which hide errors."""

    def make(shape, dtype):
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return jnp.full(shape, jnp.nan if is_float else True, dtype)

    monkeypatch.setattr(jax.lax, "empty", make)


def check(
    net: Net,
    table: Schedule,
    mesh,
    counts=(),
    zero: MemoryConfig = NO_ZERO,
    remat: str = "stage",
):
    """Compare sums, gradients and the sums of evaluation with plain differentiation."""
    params, data = inputs(net, table.num_microbatches)
    layouts = cut(net.num_layers, table.placement, counts)
    differentiate = jax.value_and_grad(lambda p: plain_sums(net, p, data), has_aux=True)
    (_, expected_sums), expected = differentiate(params)
    param_sharding = param_sharding_of(net, params, mesh, zero)
    recomputes = remat == "stage"
    run = make_loss_and_grad(net, table, layouts, param_sharding, recomputes=recomputes)
    shape = table.num_stages, table.num_microbatches, table.num_chunks
    forwards = forward_only(*shape, placement=table.placement)
    evaluate = make_evaluate(net, forwards, layouts, param_sharding)
    with jax.set_mesh(mesh):
        placed = place(net, layouts, mesh, params, data, zero)
        sums, grads = jax.jit(run)(*placed)
        evaluated = jax.jit(evaluate)(*placed)

    def close(actual, wanted):
        # Only the order of sums differs. The tolerance allows for rounding (1e-16) of the largest
        # terms.
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-13 * np.abs(wanted).max())

    jax.tree.map(close, to_layers(layouts, grads), expected)
    jax.tree.map(close, sums, expected_sums)
    jax.tree.map(close, evaluated, expected_sums)


@pytest.mark.thorough(but=["fewer-stage-zero_bubble-pipeline=4"])
@pytest.mark.drawn(1, by="schedule")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", ["stage", "none"])
@pytest.mark.parametrize("amount", ["fewer", "equal", "more"])
def test_gradients_equal_plain_differentiation(mesh, schedule, remat, amount):
    """Fewer microbatches than stages, as many, and more."""
    with jax.enable_x64(True):
        devices = make_mesh(MeshConfig(**MESHES[mesh]), jax.devices())
        num_stages = devices.shape["pipeline"]
        num_chunks = SCHEDULES[schedule]
        num_microbatches = {"fewer": max(num_stages - 1, 1), "equal": num_stages, "more": 7}[amount]
        table = make_schedule(schedule, num_stages, num_microbatches, num_chunks)
        # With more microbatches than stages, also use uneven layers and ZeRO stage 3.
        is_uneven = amount == "more"
        num_parts = num_stages * num_chunks
        counts = (0, 9 - num_parts, *[1] * (num_parts - 2)) if is_uneven and num_parts > 1 else ()
        counts = counts and (*counts[:-1], counts[-1] + 8 - sum(counts))
        stage = {"fewer": 2, "equal": 0 if remat == "stage" else 1, "more": 3}[amount]
        check(Net(), table, devices, counts, MemoryConfig(zero_stage=stage), remat)


@pytest.mark.thorough(but=["zbv-one device-True"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("share_vocab", [False, True])
@pytest.mark.parametrize("schedule, mesh", [("1f1b", "pipeline=4"), *[("zbv", m) for m in MESHES]])
def test_teacher_outputs_belong_to_their_examples(schedule, mesh, share_vocab):
    """The outputs of `teach` are sharded like the batch, and equal plain evaluation."""
    with jax.enable_x64(True):
        devices = make_mesh(MeshConfig(**MESHES[mesh]), jax.devices())
        net = Teacher()
        stages = devices.shape["pipeline"]
        chunks = SCHEDULES[schedule]
        table = make_schedule(schedule, stages, 5, chunks)
        forwards = forward_only(stages, 5, chunks, placement=table.placement)
        params, data = inputs(net, 5)
        layouts = cut(net.num_layers, table.placement)
        param_sharding = param_sharding_of(net, params, devices)
        with jax.set_mesh(devices):
            teach = make_teach(net, forwards, layouts, param_sharding, shares_vocab=share_vocab)
            teach = jax.jit(teach)
            teacher_outputs = teach(*place(net, layouts, devices, params, data))
        assert teacher_outputs["total"].sharding.is_equivalent_to(
            jax.NamedSharding(devices, PartitionSpec(None, ("data", "fsdp"))), ndim=2
        )
        for index in range(5):
            microbatch = jax.tree.map(lambda a, i=index: a[i : i + 1], data)
            expected = plain_sums(net, params, microbatch)[1]["totals"]
            np.testing.assert_allclose(teacher_outputs["total"][index], expected, rtol=1e-13)


@pytest.mark.thorough
@pytest.mark.drawn(3)
@pytest.mark.parametrize("remat", ["stage", "none"])
@pytest.mark.parametrize(
    "schedule, chunks, sizes",
    [
        ("1f1b", 1, {}),
        ("1f1b", 1, {"pipeline": 4}),
        ("interleaved_1f1b", 2, {"pipeline": 2, "fsdp": 2, "model": 2}),
        ("zero_bubble", 1, {"pipeline": 2, "data": 2}),
        ("zbv", 2, {"pipeline": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("net", [EncoderDecoder(), Pyramid()], ids=lambda n: type(n).__name__)
def test_several_stacks_run_in_one_pipeline(net, schedule, chunks, sizes, remat):
    with jax.enable_x64(True):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices())
        table = make_schedule(schedule, mesh.shape["pipeline"], 5, chunks)
        zero = MemoryConfig(zero_stage=3, shard_parameters_fraction=0.6)
        check(net, table, mesh, zero=zero, remat=remat)


@pytest.mark.thorough
def test_stack_may_span_two_stages_or_fit_on_one():
    with jax.enable_x64(True):
        mesh = make_mesh(MeshConfig(pipeline=4), jax.devices())
        table = make_schedule("1f1b", 4, 5, 1)
        for counts in ((8, 0, 0, 0), (1, 6, 0, 1), (0, 3, 3, 2), (2, 4, 2, 0)):
            check(Pyramid(), table, mesh, counts)


@pytest.mark.thorough
def test_buffers_of_a_custom_table_do_not_collide():
    """Backwards in reverse order of forwards need slots that a ring buffer would not provide."""
    base = make_schedule("gpipe", 2, 3, 1)
    ticks = tuple(
        tuple(
            tuple(Op(op.kind, 2 - op.microbatch) if op.kind == "B" else op for op in c) for c in row
        )
        for row in base.ticks
    )
    table = dataclasses.replace(base, ticks=ticks)
    verify(table)
    with jax.enable_x64(True):
        for remat in ("stage", "none"):
            check(Net(), table, make_mesh(MeshConfig(pipeline=2), jax.devices()), remat=remat)


def compiled(
    schedule: str, num_microbatches: int, sizes: dict[str, Any], remat="stage", **shape: int
):
    net = Net()
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    params, data = inputs(net, num_microbatches, dtype=np.float32, **shape)
    chunks = SCHEDULES[schedule]
    table = make_schedule(schedule, mesh.shape["pipeline"], num_microbatches, chunks)
    layouts = cut(net.num_layers, table.placement)
    param_sharding = param_sharding_of(net, params, mesh)
    recomputes = remat == "stage"
    run = make_loss_and_grad(net, table, layouts, param_sharding, recomputes=recomputes)
    with jax.set_mesh(mesh):
        placed = place(net, layouts, mesh, params, data)
        return jax.jit(run).lower(*placed).compile(), mesh


@pytest.mark.thorough(but=["zbv-4-none"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("remat", ["stage", "none"])
@pytest.mark.parametrize(
    "schedule, num_permutes", [("gpipe", 2), ("1f1b", 2), ("interleaved_1f1b", 2), ("zbv", 4)]
)
def test_only_the_tables_permutes_cross_stages_in_the_loop(schedule, num_permutes, remat):
    """Activations go one way and cotangents the other; on a V each goes both ways."""
    sizes = (
        {"pipeline": 4, "data": 2} if schedule == "zbv" else {"pipeline": 2, "data": 2, "model": 2}
    )
    step, mesh = compiled(schedule, 4, sizes, remat)
    found = collectives(step, mesh)
    in_loop = [c for c in found if c.loop_depth > 0]
    permutes = [c for c in in_loop if c.axes == ("pipeline",)]
    assert [c.kind for c in permutes] == ["collective-permute"] * num_permutes
    assert {c.loop_depth for c in permutes} == {1}
    assert {axis for c in in_loop for axis in c.axes} <= {"pipeline", "model"}
    reduced = [c for c in found if c.loop_depth == 0 and "data" in c.axes]
    assert reduced and all(c.kind == "all-reduce" for c in reduced)


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("remat", ["stage", "none"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_does_not_grow_with_microbatches_but_for_gpipe(schedule, remat):
    def temporaries(num_microbatches):
        step, _ = compiled(schedule, num_microbatches, {"pipeline": 4}, remat, batch=64, width=64)
        temp_bytes = memory(step).temp_bytes
        assert temp_bytes is not None
        return temp_bytes

    if schedule == "gpipe":
        assert temporaries(32) > 1.5 * temporaries(8)
    else:
        assert temporaries(32) <= 1.1 * temporaries(8)
