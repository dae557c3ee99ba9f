"""Messages about requests that have no plan, and the meshes that one would try first.

A request without a plan ends in an error that names the nearest request that has one. Memory of
requests with more devices is estimated, or only composed if the devices are not described; see
plan_cost.py.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from predict.machines.machine import Machine
from predict.machines.targets import MAX_DEVICES
from sharding.mesh import AXES, BATCH_AXES, MeshConfig
from train.config.schema import RunConfig, checked_value
from train.planning.memory.budget import COMPILED, Budget, Needs, at_least, fits, size
from train.planning.parallel_plan import (
    SETTINGS,
    TRIED_SCHEDULES,
    ParallelPlan,
    PlanSpace,
)
from train.planning.plan_cost import Costed, PlanCost

#: How far from a request all numbers of devices, or of examples of a batch, are tried. Few numbers
#: of devices are tried, because a model is built for every new size of the axis `model`.
_NEAR_DEVICES = 8
_NEAR_EXAMPLES = 64
#: How many of the leanest plans for a larger number of devices are estimated, and only those whose
#: composed memory exceeds the budget by at most this factor.
_NUM_ESTIMATED = 2
_NEAR_BUDGET = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to plan a config, and functions that say what becomes of other requests.

    Attributes:
        fixed: keys of the config that stay as they are.
        num_devices: number of devices.
        budget: memory that a step may use.
        space_of: returns the plans of a config for a number of devices.
        cost: returns the composed cost of a plan.
        needs_with: returns the estimated memory of a plan for a number of devices, with further
            values of its config; None if it cannot be estimated. Raises ValueError if the plan is
            not legal.
    """

    config: RunConfig
    fixed: Collection[str]
    num_devices: int
    budget: Budget
    space_of: Callable[[RunConfig, int], PlanSpace]
    cost: Callable[[ParallelPlan], PlanCost]
    needs_with: Callable[[ParallelPlan, int, Mapping[str, Any]], Needs | None]

    def fits_with(
        self, plan: ParallelPlan, num_devices: int, values: Mapping[str, Any]
    ) -> bool | None:
        """Return whether a plan fits; None if its memory cannot be estimated.

        A plan that a check of the whole run refuses does not fit.
        """
        try:
            needs = self.needs_with(plan, num_devices, values)
        except ValueError:
            return False
        return None if needs is None else fits(needs, self.budget, ratio=COMPILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotCompiled:
    """A plan that has not been compiled whole, but is explained.

    Attributes:
        plan: one of its fastest plans, of those that fit if any does; None if no plan is legal.
        cost: composed cost of the plan.
    """

    mesh: MeshConfig
    plan: ParallelPlan | None
    cost: PlanCost | None


def first_tried(
    plans: Sequence[ParallelPlan],
    cost: Callable[[ParallelPlan], PlanCost],
    *,
    num_devices: int,
    per_host: int,
    budget_bytes: float,
) -> list[NotCompiled]:
    """Return the meshes that one would try first: data only, and `expert` or `model` within a host.

    Args:
        plans: all plans.
        cost: returns the composed cost of a plan.
        num_devices: number of devices.
        per_host: number of devices per host.
        budget_bytes: memory that a step may use on a device.
    """
    size = min(8, per_host)
    meshes = [MeshConfig(data=num_devices)]
    if 1 < size and num_devices % size == 0:
        if any(plan.mesh.expert > 1 for plan in plans):
            meshes.append(MeshConfig(data=num_devices // size, expert=size))
        meshes.append(MeshConfig(data=num_devices // size, model=size))
    not_compiled = []
    for mesh in meshes:
        costed = [Costed(plan, cost(plan)) for plan in plans if plan.mesh == mesh]
        fitting = [pair for pair in costed if pair.cost.memory_bytes <= budget_bytes]
        if fitting:
            plan, least = min(fitting, key=lambda pair: pair.cost.step_s)
        elif costed:
            plan, least = min(costed, key=lambda pair: pair.cost.memory_bytes)
        else:
            plan = least = None
        not_compiled.append(NotCompiled(mesh=mesh, plan=plan, cost=least))
    return not_compiled


def no_division(request: Request) -> str:
    """Return the error if no mesh divides the batch, with the nearest request that has one."""
    config = request.config
    num_devices = request.num_devices
    space_of = request.space_of
    batch = config.data.global_batch_size
    fixed = sorted(key for key in request.fixed if key in SETTINGS)
    num_layers = space_of(config, num_devices).num_layers
    chunks = config.pipeline.chunks if "pipeline.chunks" in fixed else 1
    if "pipeline.chunks" not in fixed and "pipeline.schedule" in fixed:
        name = config.pipeline.schedule
        chunks = min((count for each, count in TRIED_SCHEDULES if each == name), default=1)
    num_chunks = config.mesh.pipeline * chunks
    if "mesh.pipeline" in fixed and num_chunks > num_layers:
        return (
            f"mesh.pipeline={config.mesh.pipeline} × pipeline.chunks={chunks} are {num_chunks} "
            f"parts, more than the model's {num_layers} layers; set mesh.pipeline to at most "
            f"{num_layers // chunks}"
        )
    near = []
    round_numbers = _round_numbers(num_devices)
    for other in _by_distance(num_devices, _NEAR_DEVICES, round_numbers):
        if _has_plan(space_of(config, other)):
            near.append(f"{other} devices")
            break
    multiples = [number * (batch // number + step) for number in round_numbers for step in (0, 1)]
    for other in _by_distance(batch, _NEAR_EXAMPLES, multiples):
        try:
            changed = config.with_values({"data.global_batch_size": other})
        except ValueError:  # the fixed number of microbatches does not divide it
            continue
        if _has_plan(space_of(changed, num_devices)):
            near.append(f"data.global_batch_size={other}")
            break
    nearest = f"the nearest that works: {', or '.join(near)}"
    if not near:
        space = space_of(config, num_devices)
        fewer = {key: dataclasses.replace(space, fixed={*space.fixed} - {key}) for key in fixed}
        freed = [key for key, other in fewer.items() if _has_plan(other)]
        nearest = f"leave out {' or '.join(freed)}" if freed else "set fewer values"
    return (
        f"no plan divides the model and data.global_batch_size={batch} over {num_devices} devices "
        f"({_list_keys(fixed)} fixed); {nearest}"
    )


def _list_keys(keys: Sequence[str]) -> str:
    """Return the beginning of a statement about keys: "nothing is", "a is", or "a and b are"."""
    if len(keys) < 2:
        return f"{keys[0] if keys else 'nothing'} is"
    return f"{', '.join(keys[:-1])} and {keys[-1]} are"


def check_replicas(given: Any, fixed: Collection[str], num_devices: int) -> None:
    """Reject fixed numbers of replicas that do not divide the devices.

    Args:
        given: ConfigDict of the run.
        fixed: keys of the config that stay as they are.
        num_devices: number of devices.

    Raises:
        ValueError: mesh.data, mesh.fsdp or mesh.expert does not divide them, or is not valid.
    """
    batch = checked_value(given, "data.global_batch_size")
    num_experts = given.model.get("num_experts") or 1
    for axis in (axis for axis in AXES if axis in BATCH_AXES):
        count = checked_value(given, f"mesh.{axis}")
        if f"mesh.{axis}" in fixed and count > 0 and num_devices % count:
            whole = math.gcd(num_devices, batch, num_experts if axis == "expert" else 0)
            others = [n for n in range(1, whole + 1) if whole % n == 0]
            nearest = min(others, key=lambda n: abs(n - count))
            raise ValueError(
                f"mesh.{axis}={count} must divide the {num_devices} devices; the nearest that "
                f"works is mesh.{axis}={nearest}"
            )


def check_max_microbatches(most: int | None, config: RunConfig, fixed: Collection[str]) -> None:
    """Reject a limit of the number of microbatches that no plan can keep.

    Args:
        most: limit; None: there is none.
        fixed: keys of the config that stay as they are.

    Raises:
        ValueError: the limit is not positive, or less than a fixed number.
    """
    num_microbatches = config.train.num_microbatches
    if most is not None and most < 1:
        raise ValueError(f"--max_microbatches={most} must be at least 1")
    if most is not None and "train.num_microbatches" in fixed and num_microbatches > most:
        raise ValueError(
            f"--max_microbatches={most} contradicts train.num_microbatches={num_microbatches}; "
            "leave out one of the two"
        )


class DoesNotFit(Exception):
    """No plan fits into memory.

    Args:
        leanest: plan that exceeds the budget the least.
        needs: its estimated memory.
        is_compiled: whether `needs` is the memory of the compiled step instead.
    """

    def __init__(self, leanest: Costed, needs: Needs, *, is_compiled: bool = False):
        super().__init__(str(leanest.plan))
        self.leanest = leanest
        self.needs = needs
        self.is_compiled = is_compiled


def may_use_host_memory(config: RunConfig, fixed: Collection[str], machine: Machine) -> bool:
    """Return whether plans may place the optimizer state in host memory.

    Args:
        fixed: keys of the config that stay as they are.
        machine: rates of the devices.
    """
    is_open = config.memory.placement == "device" and "memory.placement" not in fixed
    return is_open and config.optimizer.can_be_sliced and not machine.shares_cores


def no_memory(request: Request, found: DoesNotFit) -> str:
    """Return the error for a model that fits on no mesh, with the nearest request that would."""
    config = request.config
    budget = request.budget
    leanest = found.leanest
    needs = found.needs
    leanest_bytes = needs.device_bytes
    budget_bytes = budget.device_bytes
    if leanest_bytes <= budget_bytes:
        return (
            f"no plan fits into {size(budget.host_bytes)} a host; the leanest, {leanest.plan}, "
            f"takes {size(needs.host_bytes)}; what would fit: hosts with "
            f"{at_least(needs.host_bytes)} for a step, more hosts, or a smaller model; "
            "memory.host_budget sets the budget"
        )
    # Composed memory is corrected by the one plan whose memory has been estimated.
    more = _more_devices(request, correction=leanest_bytes / leanest.cost.memory_bytes)
    enough_bytes = leanest_bytes if found.is_compiled else COMPILED * leanest_bytes
    remedies = [f"{more}devices with {at_least(enough_bytes)} for a step"]
    # With one example at a time, a smaller batch keeps no fewer activations.
    is_one = leanest.plan.microbatch_size(config.data.global_batch_size) == 1
    remedies.append("a smaller model" if is_one else "a smaller data.global_batch_size or model")
    fraction = config.memory.offload_parameters_fraction
    if config.optimizer.can_be_sliced and fraction < 1:
        on_host: dict[str, Any] = {"memory.placement": "host"}
        for values in (on_host, on_host | {"memory.offload_parameters_fraction": 1.0}):
            if request.fits_with(leanest.plan, request.num_devices, values):
                remedies.append(" with ".join(f"{key}={value}" for key, value in values.items()))
                break
    return (
        f"no plan fits into {size(budget_bytes)} a device; the leanest, {leanest.plan}, takes "
        f"{size(leanest_bytes)}; what would fit: {', or '.join(remedies)}; memory.device_budget "
        "sets the budget"
    )


def _more_devices(request: Request, correction: float) -> str:
    """Return "16 devices like these, or " for a larger number of devices that would fit, or "".

    Args:
        correction: estimated memory / composed memory.
    """
    budget_bytes = request.budget.device_bytes
    count = 2 * request.num_devices
    while count <= MAX_DEVICES:
        plans = request.space_of(request.config, count)
        composed = ((correction * request.cost(plan).memory_bytes, plan) for plan in plans)
        near = [pair for pair in composed if pair[0] <= _NEAR_BUDGET * budget_bytes]
        for num_bytes, plan in heapq.nsmallest(_NUM_ESTIMATED, near, key=lambda pair: pair[0]):
            is_fitting = request.fits_with(plan, count, {})
            if is_fitting or (is_fitting is None and num_bytes <= budget_bytes):
                about = "about " * (is_fitting is None)
                return f"{about}{count} devices like these, or "
        count *= 2
    return ""


def _by_distance(number: int, within: int, further: Iterable[int]) -> list[int]:
    """Return numbers to try instead of a number: those within a distance, then further ones.

    Both are sorted by their distance; of two numbers at the same distance, the smaller one is
    first.
    """
    near = {number + step for step in range(-within, within + 1)}
    ordered = sorted(near, key=lambda n: (abs(n - number), n))
    ordered += sorted({*further} - near, key=lambda n: (abs(n - number), n))
    return [n for n in ordered if n > 0 and n != number]


def _round_numbers(number: int) -> set[int]:
    """Return the divisors of a number, and the powers of two up to it."""
    divisors = {n for n in range(1, number + 1) if number % n == 0}
    return divisors | {1 << n for n in range(number.bit_length())}


def _has_plan(space: PlanSpace) -> bool:
    return next(iter(space), None) is not None
