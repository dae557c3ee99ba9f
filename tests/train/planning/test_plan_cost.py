"""Composed costs of plans, from layers whose times and memory are given."""

import collections
import dataclasses
import math
import types

import jax
import pytest

from pipeline.schedule import make_schedule
from pipeline.schedules.table import (
    BACKWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    max_in_flight,
)
from predict.machines.datasheets import machine_of
from predict.machines.targets import parse_target
from predict.time.transfer import group_over, transfer_s
from sharding.tensor import TensorConfig
from tests.runs import ROOT, make_run
from tests.train.planning.test_parallel_plan import config_of
from train.config.remat import Remat
from train.planning.fitting import distinct, promising, with_leaner
from train.planning.layer_times import ReplicaMemory, ReplicaStep
from train.planning.parallel_plan import ParallelPlan
from train.planning.pipeline_cost import in_flight
from train.planning.plan_cost import Costed, PlanCosts
from train.planning.scaled_times import LayerTimes, ParamCount

MACHINE = machine_of(parse_target("h100:1x8"))
PARAMS = 1_000_000_000


class GivenLayers:
    """Layers that take 8 s forward and 16 s backward for 16 examples, and a head of 2 s."""

    params: tuple[ParamCount, ...] = (ParamCount(count=PARAMS, num_trained=PARAMS),)
    num_outer_params = 0
    work = types.SimpleNamespace(layers=(1,) * 8)
    layer_times: tuple[float, ...] = (1,) * 8

    def cut(self, num_chunks: int, *, is_balanced: bool, shares_vocab: bool) -> list[int]:
        counts = [8 // num_chunks] * num_chunks
        return [counts[0] + 1, *counts[1:-1], counts[-1] - 1] if is_balanced else counts

    def times(self, part: ReplicaStep) -> LayerTimes:
        work = part.batch / 16 / part.model
        return LayerTimes(forward_s=8 * work, backward_s=16 * work)

    def head_s(self, part: ReplicaStep) -> float:
        return 2 * part.batch / 16 / part.model

    def head_input_bytes(self, part: ReplicaStep) -> float:
        return 1e9 * part.batch / 16

    def update_s(self, num_params: float, replicas: int, zero_stage: int) -> float:
        return num_params / PARAMS / (replicas if zero_stage else 1)

    def memory(self, part: ReplicaStep) -> ReplicaMemory:
        kept = 1600e9 * part.batch / 16 / (4 if part.remat == "full" else 1)
        return ReplicaMemory(activations=kept, temporaries=1e9)

    def unknown(self, part: ReplicaStep) -> list[ReplicaStep]:
        return []


COSTS = PlanCosts(config_of(), MACHINE, GivenLayers())  # pyright: ignore[reportArgumentType]


def plan(num_microbatches: int = 4, *, zero_stage: int = 0, **values) -> ParallelPlan:
    axes = ("pipeline", "data", "expert", "model")
    mesh = {axis: values.pop(axis) for axis in axes if axis in values}
    given = config_of().mesh
    sizes = {axis: 1 for axis in given.sizes} | mesh
    whole = {"schedule": "1f1b", "chunks": 1, "remat": Remat.parse("none")}
    tensor = values.pop("tensor", TensorConfig())
    whole |= {"layers_per_stage": (), "share_vocab": False, "placement": "device"}
    whole |= {"unroll": False} | values
    return ParallelPlan(
        mesh=dataclasses.replace(given, **sizes),
        tensor=tensor,
        num_microbatches=num_microbatches,
        zero_stage=zero_stage,
        **whole,
    )


def test_microbatches_of_one_device_run_one_after_another():
    assert COSTS.cost(plan(1)).step_s == pytest.approx(26 + 1)
    sums_s = MACHINE.memory_s(4 * PARAMS)
    assert COSTS.cost(plan(4)).step_s == pytest.approx(26 + 4 * sums_s + 1)


def test_model_axis_divides_the_work():
    assert COSTS.cost(plan(1, model=8)).step_s == pytest.approx((26 + 1) / 8)


def test_ticks_of_1f1b_last_as_long_as_their_slowest_stage():
    # A microbatch takes 4 s forward and 8 s backward on all layers of both stages: 2 and 4 s a
    # stage, and 1 s for the head. An iteration runs the backwards of one tick and the forwards of
    # the next; the last stage runs its forward as a part of the backward.
    sums_s = MACHINE.memory_s(2 * 4 * PARAMS / 2)
    work_s = COSTS.cost(plan(2, pipeline=2)).step_s - 1 / 2
    least_s = 2 * (2 + 4 + 1)
    assert least_s < work_s - sums_s < 2 * least_s
    assert COSTS.least_s(plan(2, pipeline=2)) <= work_s


def test_stages_wait_for_sends_on_a_slow_network_and_sum_the_gradients_of_the_embedding():
    alone = COSTS.cost(plan(4, pipeline=8))
    slow = dataclasses.replace(MACHINE, gpus_per_host=1, network_bytes_per_s=1e6)
    costs = PlanCosts(config_of(), slow, GivenLayers())  # pyright: ignore[reportArgumentType]
    sends_s = 2 * 1e9 / 16 / 1e6
    assert costs.cost(plan(4, pipeline=8)).step_s > 4 * sends_s > alone.step_s

    layers = GivenLayers()
    layers.num_outer_params = PARAMS // 2
    costs = PlanCosts(config_of(), MACHINE, layers)  # pyright: ignore[reportArgumentType]
    sums = {
        share_vocab: costs.cost(plan(4, pipeline=2, share_vocab=share_vocab)).exposed_s
        for share_vocab in (False, True)
    }
    assert sums[True] == 0.0 < sums[False]
    assert costs.cost(plan(4)).exposed_s == 0.0


def test_stages_are_as_slow_as_the_times_of_their_layers_say():
    layers = GivenLayers()
    layers.layer_times = (1, 1, 1, 1, 3, 3, 3, 3)  # a decoder with few tokens: slow for its FLOPs
    costs = PlanCosts(config_of(), MACHINE, layers)  # pyright: ignore[reportArgumentType]
    even, uneven = (each.cost(plan(4, pipeline=2)).layers_s for each in (COSTS, costs))
    assert 1.3 < uneven / even <= 1.5  # the second stage has three quarters of the time, not half


def test_backwards_in_two_parts_take_longer():
    many = {"pipeline": 2, "num_microbatches": 64}  # hardly any bubble
    whole, split = (
        COSTS.cost(plan(schedule=name, **many)).layers_s for name in ("1f1b", "zero_bubble")
    )
    assert 1.1 < split / whole < 1.3


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_more_microbatches_have_a_smaller_bubble(schedule):
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    few, many = (
        COSTS.cost(plan(count, pipeline=2, schedule=schedule, chunks=chunks)).step_s
        for count in (2, 16)
    )
    assert many < few


def test_shared_vocab_divides_the_head_among_the_stages():
    alone, shared = (
        COSTS.cost(plan(16, pipeline=2, share_vocab=share_vocab)).step_s
        for share_vocab in (False, True)
    )
    # The head takes 2 s for 16 examples. Alone, the last stage makes the other wait for all of it.
    # Shared, embedding and head exchange activations of 1 GB four times.
    group = [group_over(plan(1, pipeline=2).mesh.sizes, ("pipeline",))]
    exchanges_s = 4 * transfer_s(MACHINE, "all-reduce", group, 1e9)
    assert alone - shared == pytest.approx(2 / 2 - exchanges_s, rel=0.05)


def test_stages_on_simulated_devices_leave_their_cores_to_each_other():
    machine = dataclasses.replace(MACHINE, shares_cores=True)
    costs = PlanCosts(config_of(), machine, GivenLayers())  # pyright: ignore[reportArgumentType]
    one = costs.cost(plan(4)).step_s
    ticks_s = 0.01
    sums_s = MACHINE.memory_s(4 * 4 * PARAMS / 2)  # each of two stages has half of the layers
    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        found = costs.cost(plan(4, pipeline=2, schedule=schedule)).step_s
        assert one / 2 - sums_s < found < one / 2 + sums_s + ticks_s


def test_simulated_devices_allocate_activations_and_gradients_in_every_step():
    machine = dataclasses.replace(MACHINE, allocation_s_per_byte=1e-12)
    costs = PlanCosts(config_of(), machine, GivenLayers())  # pyright: ignore[reportArgumentType]
    for count, activations in ((1, 1600e9), (16, 100e9)):
        added_s = costs.cost(plan(count)).step_s - COSTS.cost(plan(count)).step_s
        assert added_s == pytest.approx(1e-12 * (activations + 1e9 + 4 * PARAMS))


def test_recomputed_stages_take_another_forward_and_keep_less():
    kept = COSTS.cost(plan(16, pipeline=2))
    recomputed = COSTS.cost(plan(16, pipeline=2, remat=Remat.parse("stage")))
    assert recomputed.step_s > kept.step_s
    assert recomputed.memory_bytes < kept.memory_bytes


def test_gradients_are_reduced_after_the_last_microbatch_unless_layers_are_scattered():
    group = [group_over(plan(1, data=8).mesh.sizes, ("data", "fsdp"))]
    reduce_s = transfer_s(MACHINE, "all-reduce", group, 4 * PARAMS)
    one = COSTS.cost(plan(1, data=8))
    assert one.step_s == pytest.approx(26 / 8 + 1 + reduce_s)
    # The layers take longer than their collectives, which they hide but for a share.
    gather_s = transfer_s(MACHINE, "all-gather", group, COSTS._compute_bytes * PARAMS)
    scatter_s = transfer_s(MACHINE, "reduce-scatter", group, 4 * PARAMS / 8)
    hidden = COSTS.cost(plan(1, data=8, zero_stage=3))
    waits_s = 0.15 * (2 * gather_s + scatter_s)
    assert hidden.step_s == pytest.approx(26 / 8 + 1 / 8 + waits_s)


def test_split_backwards_keep_gradients_and_what_they_recompute():
    """The weight gradient reads values that the input gradient has computed."""

    def memory_bytes(schedule: str, remat: str = "none") -> float:
        split = plan(16, pipeline=2, schedule=schedule, remat=Remat.parse(remat))
        return COSTS.cost(split).memory_bytes

    # A stage keeps 3 microbatches for their backwards, of half of the layers, and 2 for weights.
    whole = memory_bytes("1f1b")
    less = memory_bytes("1f1b", "full")
    activations = (whole - less) / (3 / 4) / (3 / 2)
    kept = 1.1 * activations
    recomputed = 0.9 * 3 / 4 * activations
    assert memory_bytes("zero_bubble") - whole == pytest.approx(kept)
    assert memory_bytes("zero_bubble", "full") - less == pytest.approx(kept + recomputed)
    lean = memory_bytes("1f1b", "stage")
    assert memory_bytes("zero_bubble", "stage") - lean == pytest.approx(kept)


def test_higher_zero_stages_take_less_memory():
    found = [COSTS.cost(plan(1, data=8, zero_stage=stage)).memory_bytes for stage in range(4)]
    assert found == sorted(found, reverse=True)
    assert len({*found}) == 4


def test_a_stage_with_fewer_layers_makes_room_for_the_head():
    """The stages have (4, 4) or (5, 3) of the 8 layers; the last one also has the head."""
    even = COSTS.cost(plan(16, pipeline=2, schedule="zero_bubble"))
    cut = COSTS.cost(plan(16, pipeline=2, schedule="zero_bubble", layers_per_stage=("auto",)))
    assert cut.memory_bytes > even.memory_bytes  # the first stage holds more
    assert cut.step_s != even.step_s


def test_state_in_host_memory_is_copied_and_takes_less_device_memory():
    on_device, on_host = (
        COSTS.cost(plan(1, data=8, zero_stage=1, placement=p)) for p in ("device", "host")
    )
    # 4 bytes of weights for the forward, 12 to the device for the update, and 12 back.
    copies_s = MACHINE.host_copy_s(28 * PARAMS / 8)
    assert on_host.update_s - on_device.update_s == pytest.approx(copies_s)
    # Weights and an eighth of the moments; or a copy of the weights, and an eighth of the state of
    # one of 8 layers at a time.
    saved = PARAMS * ((4 + 8 / 8) - (4 + 12 / 8 / 8))
    assert on_device.memory_bytes - on_host.memory_bytes == pytest.approx(saved)


def test_stage_in_host_memory_has_one_of_its_own_layers_on_the_device():
    on_device, on_host = (
        COSTS.cost(plan(8, pipeline=8, placement=p)).memory_bytes for p in ("device", "host")
    )
    # Each of the 8 stages has one layer: all of its weights and moments are on the device during
    # the update, in addition to the layer's 4-byte copy for computation in host placement.
    assert on_host - on_device == pytest.approx(4 * PARAMS / 8)


@pytest.mark.parametrize(("zero_stage", "per_param"), [(0, 16), (1, 9), (2, 5.5), (3, 2)])
def test_zero_divides_weights_moments_and_gradients(zero_stage, per_param):
    # In float32: 4 bytes of weights, 8 of moments, and 4 of gradients.
    found = COSTS.cost(plan(1, data=8, zero_stage=zero_stage)).memory_bytes
    rest = COSTS.cost(plan(1, data=8, zero_stage=0)).memory_bytes - 16 * PARAMS
    assert (found - rest) / PARAMS == pytest.approx(per_param)


@pytest.mark.parametrize(("zero_stage", "per_param"), [(0, 4), (1, 4), (3, 0.5)])
def test_frozen_parameters_have_neither_gradients_nor_moments(zero_stage, per_param):
    layers = GivenLayers()
    costs = PlanCosts(config_of(), MACHINE, layers)  # pyright: ignore[reportArgumentType]
    found = plan(1, data=8, zero_stage=zero_stage)
    whole = costs.cost(found)
    layers.params = (ParamCount(count=PARAMS, num_trained=PARAMS // 4),)
    costs = PlanCosts(config_of(), MACHINE, layers)  # pyright: ignore[reportArgumentType]
    frozen = costs.cost(found)
    of_trained = {0: 16, 1: 9, 3: 2}[zero_stage]
    saved = whole.memory_bytes - frozen.memory_bytes
    assert saved / PARAMS == pytest.approx(0.75 * (of_trained - per_param))
    assert frozen.exposed_s < whole.exposed_s


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 4), ("zero_bubble", 1), ("zbv", 2)]
)
def test_activations_in_flight_are_those_of_the_whole_schedule(name, chunks):
    for num_stages in (2, 3, 6):
        for count in (num_stages, 4 * num_stages, 7 * num_stages):
            whole = make_schedule(name, num_stages, count, chunks)
            saved = max_in_flight(whole, until=(BACKWARD, INPUT_GRADIENT))
            waiting = max_in_flight(whole, since=INPUT_GRADIENT, until=(WEIGHT_GRADIENT,))
            assert in_flight(num_stages, count, name, chunks) == (max(saved), max(waiting))


def test_the_lowest_zero_stage_that_takes_hardly_longer_stands_for_a_mesh():
    def costed(step_s: float, zero_stage: int, num_microbatches: int = 4, num_bytes: int = 1):
        cost = dataclasses.replace(
            COSTS.cost(plan()), layers_s=step_s, exposed_s=0.0, update_s=0.0, memory_bytes=num_bytes
        )
        return Costed(plan(num_microbatches, data=2, zero_stage=zero_stage), cost)

    ranked = [
        costed(1.00, 2),
        costed(1.01, 3),
        costed(1.03, 1, num_bytes=9),  # may not fit
        costed(1.04, 1, 8),
        costed(1.049, 0),
        costed(1.20, 0, 8),  # takes longer
    ]
    found = distinct(ranked, sure_bytes=8)
    assert [(each.zero_stage, each.num_microbatches) for each, _ in found] == [(0, 4), (1, 8)]


def test_leaner_plans_of_a_mesh_follow_if_the_fastest_does_not_fit():
    def costed(step_s: float, num_microbatches: int, remat: str, num_bytes: int):
        cost = dataclasses.replace(
            COSTS.cost(plan()), layers_s=step_s, exposed_s=0.0, update_s=0.0, memory_bytes=num_bytes
        )
        stored = dataclasses.replace(plan(num_microbatches, data=2), remat=Remat.parse(remat))
        return Costed(stored, cost)

    ranked = [
        costed(1.0, 1, "none", 12),
        costed(1.1, 1, "mlp", 11),
        costed(1.2, 1, "dots", 13),  # slower, and takes more
        costed(1.3, 2, "none", 9),
        costed(1.4, 1, "full", 3),
        costed(1.5, 2, "mlp", 4),
    ]

    def names(found):
        return [(each.num_microbatches, str(each.remat)) for each, _ in found]

    in_turn = with_leaner(ranked, sure_bytes=10)
    assert names(in_turn) == [(1, "none"), (1, "mlp"), (2, "none"), (1, "full"), (2, "mlp")]
    # The fastest of each shape, and the fastest that surely fits.
    assert names(promising(ranked, 10)) == [(1, "none"), (2, "none"), (1, "full")]


def test_state_of_experts_is_divided_as_the_step_divides_it(corpus_overrides):
    """As many moments are on a device as in the layout, which ZeRO divides for experts too."""
    sizes = {"data": 2, "expert": 2, "model": 2}
    meshes = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    text = ("data.name=text", "data.tokenizer=bytes", "data.global_batch_size=8", *corpus_overrides)
    overrides = ("model.mlp_dim=64", "memory.zero_stage=1", *text, *meshes)
    run, _ = make_run(overrides, f"{ROOT}/configs/mixtral.py")
    layout = run.state_layout
    counts = collections.Counter[frozenset[str]]()
    leaves = jax.tree.leaves(layout.abstract.params)
    for leaf, axes in zip(leaves, jax.tree.leaves(layout.kept_axes), strict=True):
        counts[axes] += leaf.size
    layers = GivenLayers()
    layers.params = tuple(
        ParamCount(count=count, num_trained=count, kept_axes=axes) for axes, count in counts.items()
    )
    costs = PlanCosts(run.config, MACHINE, layers)  # pyright: ignore[reportArgumentType]
    params = costs._params(plan(1, zero_stage=1, **sizes))
    assert [each.num_replicas for each in params] == [4, 2]
    moments = jax.tree.leaves(layout.abstract.opt_state)
    on_device = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in moments)
    # Norms and the router are not divided over `model`.
    composed = sum(2 * each.num_trained / each.shards(1) for each in params)
    assert composed == pytest.approx(on_device, rel=0.02)
