"""Builds the runs of plans, in a useful order, and keeps those whose estimated memory fits."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from train.config.schema import RunConfig
from train.planning.memory.budget import COMPILED, excess, needs_of
from train.planning.parallel_plan import ParallelPlan
from train.planning.plan_cost import Costed, PlanCost
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
MAX_TRIES = 20
#: Differences of composed times between ZeRO stages are not more exact than this.
_NEAR = 1.05


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
        self,
        pairs: Iterable[Costed],
        count: int,
        *,
        of_each_shape: int = 1,
        trusts_composed: bool = True,
    ) -> Iterator[tuple[ParallelPlan, PlanCost, Run]]:
        """Yield the first plans that may fit by their estimated memory, with their runs.

        Args:
            pairs: plans with their composed costs.
            count: how many plans to yield at most.
            of_each_shape: how many plans to yield at most that have the same shape.
            trusts_composed: whether to skip a plan if its composed memory, corrected with the
                estimate of a similar plan, is too large.
        """
        budget = self._devices.budget
        num_found = num_tries = 0
        shapes = collections.Counter[Any]()
        for plan, cost in pairs:
            if num_found == count or num_tries == MAX_TRIES:
                return
            if shapes[plan.shape] == of_each_shape or plan in self.excluded:
                continue
            kind = plan.schedule, plan.remat, plan.zero_stage
            known = self._corrections.get(kind, 0.0) * cost.memory_bytes
            if trusts_composed and known > _SURE_EXCESS * budget.device_bytes:
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
            least_bytes = self._least_share() * needs.device_bytes
            if excess(needs, budget, device_bytes=least_bytes) <= 1:
                self._estimates[plan] = needs.device_bytes
                num_found += 1
                shapes[plan.shape] += 1
                yield plan, cost, run
            else:
                self.excluded.add(plan)
                least = None if self._leanest is None else self._leanest.needs.device_bytes
                if least is None or needs.device_bytes < least:
                    self._leanest = DoesNotFit((plan, cost), needs)

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


def distinct(ranked: list[Costed], sure_bytes: float) -> list[Costed]:
    """Return a plan of each shape, the fastest first.

    It is the fastest, or the same in the lowest ZeRO stage that takes hardly longer: lower stages
    have fewer collectives.

    Args:
        ranked: plans, the fastest first.
        sure_bytes: composed memory with which a plan surely fits.
    """
    fastest: dict[Any, Costed] = {}
    pairs_by_shape: dict[Any, Costed] = {}
    for plan, cost in ranked:
        key = plan.shape
        first, least = fastest.setdefault(key, (plan, cost))
        is_near = cost.step_s <= _NEAR * least.step_s and cost.memory_bytes <= sure_bytes
        is_lower = plan.zero_stage < pairs_by_shape.get(key, (first, least))[0].zero_stage
        same = dataclasses.replace(plan, zero_stage=first.zero_stage) == first
        if key not in pairs_by_shape or (is_near and is_lower and same):
            pairs_by_shape[key] = (plan, cost)
    return [*pairs_by_shape.values()]


def promising(ranked: list[Costed], sure_bytes: float) -> list[Costed]:
    """Return the fastest plan of each shape, and the fastest that surely fits, in order.

    Args:
        ranked: plans, the fastest first.
        sure_bytes: composed memory with which a plan surely fits.
    """
    sure = [pair for pair in ranked if pair[1].memory_bytes <= sure_bytes]
    chosen = dict([*distinct(ranked, sure_bytes), *distinct(sure, sure_bytes)])
    return [pair for pair in ranked if pair[0] in chosen]


def with_leaner(ranked: list[Costed], sure_bytes: float) -> list[Costed]:
    """Return the plans of `distinct`, followed by others of each shape if the first does not fit.

    Args:
        ranked: plans, the fastest first.
        sure_bytes: composed memory with which a plan surely fits.
    """
    firsts = {pair[0].shape: pair for pair in distinct(ranked, sure_bytes)}
    costs = {}
    for plan, cost in ranked:
        first, its_cost = firsts[plan.shape]
        costs.setdefault(first, its_cost)
        if cost.memory_bytes < its_cost.memory_bytes:
            costs.setdefault(plan, cost)
    return [*costs.items()]
