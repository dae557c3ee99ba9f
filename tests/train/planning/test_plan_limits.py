"""Requests without a plan name the nearest one that has a plan."""

import dataclasses
import math
import types
from typing import Any

import pytest

from tests.runs import ROOT
from tests.train.planning.test_parallel_plan import config_of, space
from train.config.config_files import load
from train.planning.explanation import first_tried_as_json, not_compiled_as_text
from train.planning.memory.budget import Budget, Needs
from train.planning.parallel_plan import ParallelPlan, PlanSpace, open_config
from train.planning.plan_cost import Costed, PlanCost
from train.planning.plan_limits import (
    DoesNotFit,
    NotCompiled,
    Request,
    check_max_microbatches,
    check_replicas,
    first_tried,
    no_division,
    no_memory,
)


def space_of(config, num_devices) -> PlanSpace:
    return dataclasses.replace(space(), config=config, num_devices=num_devices)


def cost(plan) -> PlanCost:
    """A step takes 8 s, and 1 s more for each doubling of `model`; memory is divided by devices."""
    split = plan.mesh.model * plan.mesh.pipeline
    replicas = plan.mesh.data if plan.zero_stage == 3 else 1
    return PlanCost(
        layers_s=7 + plan.mesh.model.bit_length(),
        exposed_s=0.5,
        update_s=0.5,
        memory_bytes=2**30 * 64 / split / replicas,
        unknown=(),
    )


def costed(plan) -> Costed:
    return Costed(plan, cost(plan))


def unknown(plan, num_devices, values) -> Needs | None:
    """Return memory that does not fit on 8 devices; None for another number of devices."""
    del plan, values
    return NEEDS if num_devices == 8 else None


NEEDS = Needs(device={"optimizer": 10 * 2**30}, host={"optimizer": 80 * 2**30})
BUDGET = Budget(
    device_bytes=4 * 2**30, host_bytes=math.inf, devices_per_host=8, device_kind="NVIDIA H100"
)


def request(**values) -> Request:
    """Return a request for 8 devices that each have 4 GiB, with other values."""
    given = {"config": config_of(), "fixed": (), "num_devices": 8, "budget": BUDGET}
    given |= {"space_of": space_of, "cost": cost, "needs_with": unknown}
    return Request(**given | values)


def test_request_that_nothing_divides_names_the_nearest_that_works():
    message = no_division(request(num_devices=7, fixed=["mesh.model"]))
    start = "no plan divides the model and data.global_batch_size=16 over 7 devices"
    assert message.startswith(f"{start} (mesh.model is fixed)")
    fixed = ["train.remat", "mesh.model", "mesh.pipeline"]
    several = no_division(request(num_devices=7, fixed=fixed))
    assert several.startswith(f"{start} (mesh.model, mesh.pipeline and train.remat are fixed)")
    nearest = message.partition("the nearest that works: ")[2]
    devices = int(nearest.split()[0])
    assert [*space_of(config_of(), devices)] and not [*space_of(config_of(), 7)]
    assert abs(devices - 7) == 1
    batch = int(nearest.rpartition("=")[2])
    changed = config_of(f"data.global_batch_size={batch}")
    assert [*space_of(changed, 7)]


def test_request_for_more_stages_than_layers_says_so():
    message = no_division(
        request(config=config_of("mesh.pipeline=8"), fixed=["mesh.pipeline", "data.seed"])
    )
    assert message == (
        "mesh.pipeline=8 × pipeline.chunks=1 are 8 parts, more than the model's 4 layers; set "
        "mesh.pipeline to at most 4"
    )
    # The V of this schedule has two parts on each stage.
    config = config_of("mesh.pipeline=4", "pipeline.schedule=zbv")
    message = no_division(request(config=config, fixed=["mesh.pipeline", "pipeline.schedule"]))
    assert message.startswith("mesh.pipeline=4 × pipeline.chunks=2 are 8 parts")
    assert message.endswith("set mesh.pipeline to at most 2")


def test_request_that_contradicts_itself_names_what_to_leave_out():
    """The microbatches of this schedule must be divisible by the number of stages."""
    fixed = {"mesh.pipeline", "pipeline.schedule", "train.num_microbatches"}
    given = ["mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "train.num_microbatches=1"]
    one = dataclasses.replace(space(), fixed=fixed)

    def spaces(config, num_devices) -> PlanSpace:
        return dataclasses.replace(one, config=config, num_devices=num_devices)

    message = no_division(request(config=config_of(*given), fixed=fixed, space_of=spaces))
    assert message.endswith(
        "; leave out mesh.pipeline or pipeline.schedule or train.num_microbatches"
    )


@pytest.mark.thorough
def test_request_for_far_too_many_devices_names_one_that_works():
    message = no_division(request(num_devices=4096))
    devices, _, rest = message.partition("the nearest that works: ")[2].partition(" devices, or ")
    assert [*space_of(config_of(), int(devices))] and 16 < int(devices) < 4096
    batch = int(rest.partition("data.global_batch_size=")[2])
    assert batch > 16 and [*space_of(config_of(f"data.global_batch_size={batch}"), 4096)]


@pytest.mark.thorough
def test_large_batch_that_nothing_divides_names_the_nearest_multiple():
    def spaces(config, num_devices) -> PlanSpace:
        one = space(most_model=1)
        return dataclasses.replace(one, config=config, num_devices=num_devices)

    # At most 4 stages, so at least 1,024 replicas.
    message = no_division(
        request(
            config=config_of("data.global_batch_size=1000000"), num_devices=4096, space_of=spaces
        )
    )
    assert message.endswith("data.global_batch_size=1000448")


def test_limit_of_microbatches_that_no_plan_can_keep_is_refused():
    fixed = {"train.num_microbatches"}
    check_max_microbatches(None, config_of(), fixed)
    check_max_microbatches(4, config_of("train.num_microbatches=4"), fixed)
    with pytest.raises(ValueError, match="--max_microbatches=0 must be at least 1"):
        check_max_microbatches(0, config_of(), set())
    with pytest.raises(ValueError, match="=2 contradicts train.num_microbatches=4; leave out"):
        check_max_microbatches(2, config_of("train.num_microbatches=4"), fixed)


def test_devices_that_do_not_divide_the_experts_are_refused():
    def load_experts(*overrides: str):
        return load(f"{ROOT}/configs/mixtral.py", ("data.global_batch_size=24", *overrides))

    message = r"mesh\.expert=3 must divide model\.num_experts=8; choose 1, 2, 4 or 8"
    with pytest.raises(ValueError, match=message):
        open_config(load_experts("mesh.expert=3"), {"mesh.expert"})
    given = load_experts("mesh.expert=8")
    check_replicas(given, {"mesh.expert"}, 16)
    # 6 divides the devices and the batch, but not the experts.
    message = r"mesh\.expert=8 must divide the 12 devices; the nearest .* is mesh\.expert=4"
    with pytest.raises(ValueError, match=message):
        check_replicas(given, {"mesh.expert"}, 12)


def test_model_that_fits_nowhere_names_the_number_of_devices_that_would_do():
    plans = [*space()]
    leanest = min((costed(plan) for plan in plans), key=lambda pair: pair.cost.memory_bytes)
    # 8 GiB on 8 devices by composed memory, 10 GiB by the estimate: 4 GiB need 20, so 32 devices.
    message = no_memory(request(), DoesNotFit(leanest, NEEDS))
    assert message.startswith("no plan fits into 4.00 GiB a device; the leanest, ")
    assert "takes 10.00 GiB; what would fit: about 32 devices like these" in message
    assert "memory.placement=host" not in message  # it would not fit either


def test_memory_on_more_devices_is_estimated_if_they_are_described():
    leanest = min((costed(plan) for plan in space()), key=lambda pair: pair.cost.memory_bytes)
    tried = []

    def needs_with(plan: ParallelPlan, num_devices: int, values) -> Needs:
        if values:  # state in host memory helps only with parameters there, too
            assert num_devices == 8 and values["memory.placement"] == "host"
            return Needs(device={"optimizer": 2 ** (35 - 2 * len(values))}, host={})
        tried.append(num_devices)
        if len(tried) == 1:
            raise ValueError("a check of the whole run")
        return Needs(device={"optimizer": 2**30 * 80 // num_devices}, host={})

    found = DoesNotFit(leanest, Needs(device={"optimizer": 10 * 2**30}, host={}))
    message = no_memory(request(needs_with=needs_with), found)
    assert "what would fit: 32 devices like these, or devices with 11.00 GiB" in message
    assert tried == [16, 16, 32]
    assert "memory.placement=host with memory.offload_parameters_fraction=1.0" in message
    whole = config_of("memory.placement=host", "memory.offload_parameters_fraction=1.0")
    for config in (whole, config_of("optimizer.name=lamb")):
        message = no_memory(request(config=config, needs_with=needs_with), found)
        assert "host" not in message.split("fit:")[1]


def test_model_that_fits_only_on_its_devices_says_what_a_host_needs():
    plan = next(iter(space()))
    budget = dataclasses.replace(BUDGET, device_bytes=2**40, host_bytes=2**34)
    found = DoesNotFit(costed(plan), NEEDS)
    message = no_memory(request(budget=budget), found)
    assert message.startswith(f"no plan fits into 16.00 GiB a host; the leanest, {plan}, takes 80")


def test_devices_with_the_memory_of_a_compiled_step_are_enough():
    plan = next(iter(space()))
    needs = Needs(device={"compiled": 10 * 2**30 + 1}, host={})
    found = DoesNotFit(costed(plan), needs, is_compiled=True)
    message = no_memory(request(), found)
    assert "takes 10.00 GiB;" in message
    assert "or devices with 10.01 GiB for a step" in message


@pytest.mark.parametrize("budget", [2**40, 2**33])
def test_meshes_to_try_first_are_data_only_and_model_within_a_host(budget):
    plans = [*space()]
    found = first_tried(plans, cost, num_devices=8, per_host=4, budget_bytes=budget)
    assert [str(each.mesh) for each in found] == ["data=8", "data=2 × model=4"]
    for each in found:
        assert each.plan is not None and each.cost is not None
        assert each.plan.mesh == each.mesh
        assert each.cost.memory_bytes <= budget
        assert budget == 2**40 or each.plan.zero_stage == 3


def test_mesh_that_cannot_be_used_says_why():
    plans = [*space(most_model=2)]
    found = first_tried(plans, cost, num_devices=8, per_host=4, budget_bytes=2**20)
    assert found[1].plan is None
    best = next(plan for plan in plans if plan.mesh.pipeline == 4)
    choice: Any = types.SimpleNamespace(plan=best, cost=cost(best))
    text = not_compiled_as_text([], found, [choice], 2**20)
    assert "data=8, " in text and "its leanest plan takes 8.00 GiB a device, of 1.0 MiB" in text
    assert "data=2 × model=4: it does not divide the model or the batch" in text


def test_a_mesh_that_one_would_try_first_may_be_the_best():
    plans = [*space()]
    best, other = (next(plan for plan in plans if plan.mesh.model == n) for n in (1, 4))
    step: Any = types.SimpleNamespace(
        prediction=types.SimpleNamespace(step_s=cost(best).step_s),
        run=types.SimpleNamespace(mesh=types.SimpleNamespace(shape={})),
    )
    choice: Any = types.SimpleNamespace(plan=best, cost=cost(best), step=step)
    tried = [NotCompiled(mesh=each.mesh, plan=each, cost=cost(each)) for each in (best, other)]
    first, second = first_tried_as_json(tried, [choice], 2**40, gpus_per_host=4)
    assert first["reason"] == "it is the mesh of the best plan"
    assert first["settings"] == best.settings()
    assert second["reason"].startswith("+22.2%; layers")


def test_plans_that_were_not_compiled_say_what_they_lose():
    plans = [*space()]
    best, other = (next(plan for plan in plans if plan.mesh.model == n) for n in (1, 4))
    # Its step takes half as long as composed; the costs of others are corrected already.
    step = types.SimpleNamespace(prediction=types.SimpleNamespace(step_s=4.5))
    choice: Any = types.SimpleNamespace(plan=best, cost=cost(best), step=step)
    runner_up = NotCompiled(mesh=other.mesh, plan=other, cost=cost(other).scaled(0.5))
    # Composed memory is not exact, so it is no reason here.
    text = not_compiled_as_text([runner_up], [runner_up], [choice], budget_bytes=1)
    heading, line = text.splitlines()
    assert heading == "Slower, by their composed times (not compiled):"
    assert line == f"{other}: +22.2%; layers 1,000 ms more, of 1,000 ms"
    assert not_compiled_as_text([], [], [choice], budget_bytes=1) == ""
