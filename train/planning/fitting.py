"""Builds the runs of plans, and keeps those whose estimated memory fits."""

from collections.abc import Iterable, Iterator
from typing import Any

from train.config.schema import RunConfig
from train.planning.memory.budget import excess, needs_of
from train.planning.parallel_plan import ParallelPlan
from train.planning.plan_cost import PlanCost
from train.planning.plan_devices import PlanDevices
from train.planning.plan_limits import DoesNotFit
from train.run.run import Run

#: A plan is not built if its composed memory, corrected by that of a similar plan, exceeds the
#: budget by this factor.
_SURE_EXCESS = 1.05


class FittingRuns:
    """The runs of plans that fit into the memory of some devices.

    Args:
        config: the run's config.
        devices: the devices.
    """

    def __init__(self, config: RunConfig, devices: PlanDevices):
        self._config = config
        self._devices = devices
        # How much more memory plans take than composed, by what their activations depend on.
        self._corrections: dict[Any, float] = {}
        self._leanest: DoesNotFit | None = None
        self._refusal = ""

    def first(
        self, pairs: Iterable[tuple[ParallelPlan, PlanCost]], count: int
    ) -> Iterator[tuple[ParallelPlan, PlanCost, Run]]:
        """Yield the first plans whose estimated memory fits, with their runs.

        Args:
            pairs: plans with their composed costs.
            count: how many plans to yield at most.
        """
        budget = self._devices.budget
        num_found = 0
        for plan, cost in pairs:
            kind = plan.schedule, plan.pipeline_remat, plan.remat, plan.zero_stage
            known = self._corrections.get(kind, 0.0) * cost.memory_bytes
            if known > _SURE_EXCESS * budget.device_bytes:
                continue
            try:
                run = self._devices.assemble(plan.applied(self._config))
            except ValueError as error:  # a check that only the whole run makes
                self._refusal = str(error)
                continue
            needs = needs_of(run, budget)
            self._corrections[kind] = needs.device_bytes / cost.memory_bytes
            if excess(needs, budget) <= 1:
                num_found += 1
                yield plan, cost, run
            elif self._leanest is None or needs.device_bytes < self._leanest.needs.device_bytes:
                self._leanest = DoesNotFit((plan, cost), needs)
            if num_found == count:
                return

    def error(self) -> Exception:
        """Return why no plan was found: DoesNotFit, or ValueError if no run could be built."""
        return ValueError(self._refusal) if self._leanest is None else self._leanest
