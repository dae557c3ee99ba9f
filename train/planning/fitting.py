"""Ranks plans, builds their runs in this order, and keeps those whose estimated memory fits."""

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from train.config.schema import RunConfig
from train.planning.memory.budget import COMPILED, fits, needs_of
from train.planning.parallel_plan import ParallelPlan
from train.planning.plan_cost import Costed, PlanCost, PlanCosts
from train.planning.plan_devices import PlanDevices
from train.planning.plan_limits import DoesNotFit
from train.run.run import Run

#: A plan is not built if its composed memory, corrected with the estimate of a similar plan,
#: exceeds the budget by this factor.
_SURE_EXCESS = 1.05
#: Compiled steps take at least this share of their estimated memory, unless those that have been
#: compiled take more. A plan is compiled if it may fit.
_LEAST_SHARE = 1 / COMPILED
#: How many plans are built at most, to find some that fit.
_MAX_TRIES = 20
#: How many plans are ranked, of those that may fit.
_NUM_RANKED = 256
#: Differences of composed times between ZeRO stages are not more exact than this.
_NEAR = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which of some plans to take, of those that may fit by their estimated memory.

    Attributes:
        count: how many plans at most.
        of_each_shape: how many plans at most that have the same shape.
        trusts_composed: whether to skip a plan if its composed memory, corrected with the estimate
            of a similar plan, is too large.
    """

    count: int
    of_each_shape: int = 1
    trusts_composed: bool = True


class FittingRuns:
    """The runs of plans that fit into the memory of some devices.

    Attributes:
        excluded: plans that do not fit, by their estimates or as compiled, or are not legal.
    """

    def __init__(self, config: RunConfig, devices: PlanDevices):
        self.excluded: set[ParallelPlan] = set()
        self._config = config
        self._devices = devices
        # Lower bound of estimated memory / composed memory of plans, by the settings that their
        # activations depend on.
        self._corrections: dict[Any, float] = {}
        self._estimates: dict[ParallelPlan, float] = {}
        self._shares: list[float] = []  # compiled memory / estimated memory
        self._leanest: DoesNotFit | None = None
        self._refusal = ""

    def first(
        self, pairs: Iterable[Costed], selection: Selection
    ) -> Iterator[tuple[ParallelPlan, PlanCost, Run]]:
        """Yield the first plans of a selection, with their runs."""
        budget = self._devices.budget
        num_found = num_tries = 0
        shapes = collections.Counter[Any]()
        for plan, cost in pairs:
            if num_found == selection.count or num_tries == _MAX_TRIES:
                return
            if shapes[plan.shape] == selection.of_each_shape or plan in self.excluded:
                continue
            kind = plan.schedule, plan.remat, plan.zero_stage
            known = self._corrections.get(kind, 0.0) * cost.memory_bytes
            if selection.trusts_composed and known > _SURE_EXCESS * budget.device_bytes:
                continue
            num_tries += 1
            try:
                run = self._devices.assemble(plan.applied(self._config))
            except ValueError as error:  # a check that only the whole run makes
                self._refusal = str(error)
                self.excluded.add(plan)
                continue
            needs = needs_of(run, budget)
            correction = needs.device_bytes / cost.memory_bytes
            self._corrections[kind] = min(correction, self._corrections.get(kind, math.inf))
            if fits(needs, budget, ratio=self._least_share()):
                self._estimates[plan] = needs.device_bytes
                num_found += 1
                shapes[plan.shape] += 1
                yield plan, cost, run
            else:
                self.excluded.add(plan)
                least = None if self._leanest is None else self._leanest.needs.device_bytes
                if least is None or needs.device_bytes < least:
                    self._leanest = DoesNotFit(Costed(plan, cost), needs)

    def learn(self, plan: ParallelPlan, compiled_bytes: float) -> None:
        """Note the memory of a plan of `first` that has been compiled.

        Args:
            compiled_bytes: memory of its step on a device.
        """
        self._shares.append(compiled_bytes / self._estimates[plan])
        if compiled_bytes > self._devices.budget.device_bytes:
            self.excluded.add(plan)

    def _least_share(self) -> float:
        return min(1.0, max(_LEAST_SHARE, min(self._shares, default=0.0)))

    def error(self) -> Exception:
        """Return why no plan was found: DoesNotFit, or ValueError if no run could be built."""
        return ValueError(self._refusal) if self._leanest is None else self._leanest


def rank(costs: PlanCosts, plans: Sequence[ParallelPlan]) -> list[Costed]:
    """Return the fastest plans, in order."""
    bounds = sorted((costs.least_s(plan), i) for i, plan in enumerate(plans))
    pairs: list[Costed] = []
    slowest_s = math.inf  # time of the slowest plan that is kept
    for least_s, i in bounds:
        if least_s > slowest_s:
            break  # so are all that follow
        pairs.append(Costed(plans[i], costs.cost(plans[i])))
        if len(pairs) % _NUM_RANKED == 0:
            pairs = sorted(pairs, key=step_s)[:_NUM_RANKED]
            slowest_s = pairs[-1].cost.step_s
    return sorted(pairs, key=step_s)


def leanest(costs: PlanCosts, plans: Sequence[ParallelPlan]) -> list[Costed]:
    """Return the plans that take the least memory, in order, as many as are built at most."""
    leanest_plans = heapq.nsmallest(_MAX_TRIES, plans, key=costs.memory_bytes)
    return [Costed(plan, costs.cost(plan)) for plan in leanest_plans]


def may_fit(costs: PlanCosts, plan: ParallelPlan, most_bytes: float) -> bool:
    """Return whether the composed memory of a plan is at most this."""
    # Activations in flight take long to count, and the state alone is often too large.
    return costs.state_bytes(plan) <= most_bytes and costs.memory_bytes(plan) <= most_bytes


def step_s(pair: Costed) -> float:
    """Return the composed time of a plan, to sort by."""
    return pair.cost.step_s


def distinct(ranked: list[Costed], sure_bytes: float) -> list[Costed]:
    """Return a plan of each shape, the fastest first.

    It is the fastest, or the same in the lowest ZeRO stage that takes hardly longer: lower stages
    have fewer collectives.

    Args:
        ranked: plans, the fastest first.
        sure_bytes: composed memory with which a plan surely fits.
    """
    fastest: dict[Any, Costed] = {}
    chosen: dict[Any, Costed] = {}
    for pair in ranked:
        plan, cost = pair
        first = fastest.setdefault(plan.shape, pair)
        is_near = cost.step_s <= _NEAR * first.cost.step_s and cost.memory_bytes <= sure_bytes
        is_lower = plan.zero_stage < chosen.setdefault(plan.shape, first).plan.zero_stage
        is_same = dataclasses.replace(plan, zero_stage=first.plan.zero_stage) == first.plan
        if is_near and is_lower and is_same:
            chosen[plan.shape] = pair
    return [*chosen.values()]


def promising(ranked: list[Costed], sure_bytes: float) -> list[Costed]:
    """Return the fastest plan of each shape, and the fastest that surely fits, in order.

    Arguments as for `distinct`.
    """
    sure = [pair for pair in ranked if pair.cost.memory_bytes <= sure_bytes]
    chosen = dict([*distinct(ranked, sure_bytes), *distinct(sure, sure_bytes)])
    return [pair for pair in ranked if pair.plan in chosen]


def with_leaner(ranked: list[Costed], sure_bytes: float) -> list[Costed]:
    """Return the plans of `distinct`, followed by others of each shape if the first does not fit.

    Arguments as for `distinct`.
    """
    firsts = {pair.plan.shape: pair for pair in distinct(ranked, sure_bytes)}
    costs: dict[ParallelPlan, PlanCost] = {}
    for plan, cost in ranked:
        first, its_cost = firsts[plan.shape]
        costs.setdefault(first, its_cost)
        if cost.memory_bytes < its_cost.memory_bytes:
            costs.setdefault(plan, cost)
    return [Costed(plan, cost) for plan, cost in costs.items()]
