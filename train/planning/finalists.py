"""Compiles the most promising plans whole, and learns from each how long others will take.

    plans, fastest first ──> the next two that fit ──> compile ──> predicted ÷ composed time
            ^                                                              │
            └────── composed times, corrected by similar plans <───────────┘

Composed times have errors that plans of a mesh have in common, and plans of a schedule. So a plan's
composed time is multiplied by the mean error of the plans that were compiled, in which its own mesh
and schedule count more. No plan is compiled if its corrected time is much longer than the best
predicted one.
"""

import collections
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from predict.time.prediction import format_ms
from train.planning.compiled_step import CompiledStep
from train.planning.fitting import FittingRuns, Selection
from train.planning.memory.budget import Needs
from train.planning.parallel_plan import ParallelPlan
from train.planning.plan_cost import Costed, PlanCost
from train.planning.plan_devices import Compilations, PlanDevices
from train.planning.plan_limits import DoesNotFit

#: How many plans are compiled at a time, and at most: of those that fit, and in all.
_NUM_AT_A_TIME = 2
_MOST_PLANS = 8
_MOST_COMPILED = 12
#: The search ends after so many rounds in which none of the plans that were tried fits.
_MOST_EMPTY_ROUNDS = 3
#: A plan is compiled if its corrected time is less than this times the best predicted one. With
#: these values, the best of 16 to 61 plans that were compiled is missed by at most 2.2 %, for 16
#: configs and targets, of which 3 have networks of 25 Gb/s.
_MARGIN = 1.15
#: Weights: of no error at all; of the mean error of plans with the same mesh and schedule, for any
#: plan; and more for a plan of this mesh, of this schedule, and of both.
_WEIGHT_OF_NONE = 1.0
_WEIGHT = 0.2
_WEIGHT_OF_MESH = 1.0
_WEIGHT_OF_SCHEDULE = 1.0
_WEIGHT_OF_BOTH = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan whose whole step has been compiled.

    Attributes:
        cost: its composed cost.
        step: its compiled step.
    """

    plan: ParallelPlan
    cost: PlanCost
    step: CompiledStep


class Finalists:
    """The plans that are compiled whole.

    Args:
        runs: builds the runs of plans that fit.
        compiles: compiles in threads.
        say: reports progress, as one line of text.
    """

    def __init__(
        self,
        runs: FittingRuns,
        devices: PlanDevices,
        compiles: Compilations,
        say: Callable[[str], None],
    ):
        self._runs = runs
        self._devices = devices
        self._compiles = compiles
        self._say = say
        self._found: list[Choice] = []

    def start(
        self, pairs: Iterable[Costed], selection: Selection
    ) -> list[tuple[ParallelPlan, PlanCost, concurrent.futures.Future[CompiledStep]]]:
        """Start to compile the first plans that fit."""
        return [
            (plan, cost, self._compiles.start(plan, partial(self._devices.compile_whole, run)))
            for plan, cost, run in self._runs.first(pairs, selection)
        ]

    def compile(self, pairs: Iterable[Costed], selection: Selection) -> list[Choice]:
        """Compile the first plans that fit, and return all that have been compiled so far."""
        known = {choice.plan for choice in self._found}
        for plan, cost, step in self.start(pairs, selection):
            if plan not in known:
                choice = Choice(plan=plan, cost=cost, step=step.result())
                self._found.append(choice)
                self._runs.learn(plan, choice.step.memory.in_all or 0)
                problem = "" if self._fits(choice) else ", which takes too much memory"
                milliseconds = format_ms(choice.step.prediction.step_s)
                self._say(f"{milliseconds} ms with {plan}{problem}")
        return self.sorted()

    def compile_promising(self, pairs: Sequence[Costed]) -> list[Choice]:
        """Compile plans of different shapes until no other may be faster; return all.

        Args:
            pairs: plans with their composed costs. Plans of the same shape are tried in order.
        """
        num_empty = 0
        while num_empty < _MOST_EMPTY_ROUNDS:
            num_found = len(self._found)
            room = min(_MOST_PLANS - len(self.sorted()), _MOST_COMPILED - num_found)
            if room < 1:
                break
            num_excluded = len(self._runs.excluded)
            self.compile(self._promising(pairs), Selection(count=min(_NUM_AT_A_TIME, room)))
            if len(self._found) == num_found:
                if len(self._runs.excluded) == num_excluded:
                    break  # no plan is left to try
                num_empty += 1
                self._say("none of these plans fits into memory; tries others")
        return self.sorted()

    def _promising(self, pairs: Sequence[Costed]) -> list[Costed]:
        """Return the plans of other shapes that may be faster than the best so far, in order."""
        fitting = self.sorted()
        bound_s = _MARGIN * fitting[0].step.prediction.step_s if fitting else math.inf
        shapes = {choice.plan.shape for choice in fitting}
        compiled = {choice.plan for choice in self._found}
        latest: dict[object, float] = {}  # shape -> expected time of its last plan
        expected: list[tuple[bool, float, Costed]] = []
        for plan, cost in pairs:
            if plan.shape not in shapes and plan not in compiled:
                seconds = max(latest.get(plan.shape, 0.0), self.factor(plan) * cost.step_s)
                latest[plan.shape] = seconds
                expected.append((bool(cost.unknown), seconds, Costed(plan, cost)))
        expected.sort(key=lambda each: each[:2])  # those whose times are only assumed come last
        return [pair for _, seconds, pair in expected if seconds < bound_s]

    def sorted(self) -> list[Choice]:
        """Return the choices that fit as compiled, the fastest first."""
        fitting = [each for each in self._found if self._fits(each)]
        return sorted(fitting, key=lambda choice: choice.step.prediction.step_s)

    def _fits(self, choice: Choice) -> bool:
        return (choice.step.memory.in_all or 0) <= self._devices.budget.device_bytes

    def error(self) -> Exception:
        """Return why no plan was found; see `FittingRuns.error`."""
        error = self._runs.error()
        for choice in self._found:
            needs = Needs(device={"compiled": choice.step.memory.in_all or 0}, host={})
            least = error.needs.device_bytes if isinstance(error, DoesNotFit) else math.inf
            if needs.device_bytes < least:
                error = DoesNotFit(Costed(choice.plan, choice.cost), needs, is_compiled=True)
        return error

    def factor(self, plan: ParallelPlan) -> float:
        """Return by how much the composed time of a plan is to be corrected."""
        # Plans that have both in common are alike, however many there are.
        errors = collections.defaultdict[Any, list[float]](list)
        for choice in self.sorted():  # XLA recomputes layers of others to save memory
            error = choice.step.prediction.step_s / choice.cost.step_s
            errors[choice.plan.mesh, _schedule(choice.plan)].append(math.log(error))
        logs = 0.0
        weights = _WEIGHT_OF_NONE
        for (mesh, schedule), log_errors in errors.items():
            has_mesh = mesh == plan.mesh
            has_schedule = schedule == _schedule(plan)
            weight = _WEIGHT + _WEIGHT_OF_MESH * has_mesh + _WEIGHT_OF_SCHEDULE * has_schedule
            weight += _WEIGHT_OF_BOTH * (has_mesh and has_schedule)
            logs += weight * sum(log_errors) / len(log_errors)
            weights += weight
        return math.exp(logs / weights)


def _schedule(plan: ParallelPlan) -> tuple[object, ...]:
    """Return all settings by which stages run their microbatches."""
    if plan.mesh.pipeline == 1:
        return ()
    return plan.schedule, plan.chunks, plan.remat.recomputes_stages, plan.share_vocab
