"""Which plans are compiled whole: corrected by those that were, until no other may be faster."""

import dataclasses
import types
from typing import Any

import pytest

from tests.train.planning.test_plan_cost import COSTS, plan
from train.config.remat import Remat
from train.planning import finalists
from train.planning.finalists import Finalists
from train.planning.fitting import Selection
from train.planning.parallel_plan import ParallelPlan
from train.planning.plan_cost import Costed, PlanCost
from train.planning.plan_devices import Compilations
from train.planning.plan_limits import DoesNotFit


def cost(step_s: float, **values) -> PlanCost:
    given = COSTS.cost(plan())
    return dataclasses.replace(given, layers_s=step_s, exposed_s=0.0, update_s=0.0, **values)


said: list[str] = []


def compiler(
    predicted: dict[ParallelPlan, float],
    too_large: tuple[ParallelPlan, ...] = (),
    illegal: tuple[ParallelPlan, ...] = (),
):
    """Return finalists whose steps take the given times.

    Plans in `too_large` do not fit as compiled. Those in `illegal` are not compiled; of each round,
    nine plans are tried.
    """

    class Runs:
        def __init__(self):
            self.excluded = set()
            self.num_rounds = 0

        def first(self, pairs, selection):
            self.num_rounds += 1
            shapes = set()
            for each, its_cost in [pair for pair in pairs if pair[0] not in self.excluded][:9]:
                if each in illegal:
                    self.excluded.add(each)
                elif each.shape not in shapes and len(shapes) < selection.count:
                    shapes.add(each.shape)
                    yield each, its_cost, each

        def learn(self, plan, compiled_bytes):
            if compiled_bytes > 1:
                self.excluded.add(plan)

        def error(self):
            return ValueError("nothing is legal")

    def compile_whole(run: ParallelPlan) -> Any:
        return types.SimpleNamespace(
            prediction=types.SimpleNamespace(step_s=predicted[run]),
            memory=types.SimpleNamespace(in_all=2.0 if run in too_large else 1.0),
        )

    budget = types.SimpleNamespace(device_bytes=1.0)
    devices: Any = types.SimpleNamespace(compile_whole=compile_whole, budget=budget)
    runs: Any = Runs()
    return Finalists(runs, devices, Compilations(1), said.append)


# Split backwards take twice as long as composed, other plans as long.
SPLIT = [plan(count, pipeline=2, schedule="zero_bubble") for count in range(1, 10)]
WHOLE = [plan(count, pipeline=2) for count in (16, 32)]
TIMES = {each: 2.0 + 0.02 * i for i, each in enumerate(SPLIT)} | {WHOLE[0]: 1.2, WHOLE[1]: 1.9}
PAIRS = [Costed(each, cost(1.0 + 0.01 * i)) for i, each in enumerate(SPLIT)]
PAIRS += [Costed(WHOLE[0], cost(1.2)), Costed(WHOLE[1], cost(1.9))]


def test_an_error_that_plans_share_is_learned():
    found = compiler(TIMES)
    chosen = found.compile_promising(PAIRS)
    assert chosen[0].plan == WHOLE[0]
    assert [choice.step.prediction.step_s for choice in chosen] == sorted(
        choice.step.prediction.step_s for choice in chosen
    )
    # A few of nine plans with split backwards were enough to learn it, and the slower one of the
    # others was not tried.
    compiled = {choice.plan for choice in chosen}
    assert len(compiled & {*SPLIT}) <= 3 and WHOLE[1] not in compiled
    same, other = (found.factor(each) for each in (SPLIT[5], plan(4, data=4)))
    assert 1 < other < 1.3 < 1.6 < same < 2


def test_no_plan_is_tried_that_is_surely_slower():
    pairs = [Costed(each, cost(1.0 + i)) for i, each in enumerate(SPLIT)]
    found = compiler({each: 1.0 + i for i, each in enumerate(SPLIT)})
    assert [choice.plan for choice in found.compile_promising(pairs)] == SPLIT[:2]


def test_each_compiled_plan_is_reported():
    said.clear()
    compiler({SPLIT[0]: 1.2345678}).compile_promising([Costed(SPLIT[0], cost(1.0))])
    assert said == [f"1,235 ms with {SPLIT[0]}"]


def test_the_number_of_plans_is_limited():
    pairs = [Costed(each, cost(1.0)) for each in SPLIT]
    found = compiler(dict.fromkeys(SPLIT, 1.0))
    assert len(found.compile_promising(pairs)) == finalists._MOST_PLANS < len(SPLIT)


def test_plans_that_take_too_much_memory_are_reported_and_not_tried_again():
    said.clear()
    many = [plan(count, pipeline=2) for count in range(1, 30)]
    found = compiler(dict.fromkeys(many, 1.0), too_large=tuple(many))
    assert found.compile_promising([Costed(each, cost(1.0)) for each in many]) == []
    assert len(said) == finalists._MOST_COMPILED == len(found._runs.excluded)
    assert said[0] == f"1,000 ms with {many[0]}, which takes too much memory"
    assert isinstance(found.error(), DoesNotFit)


def test_plans_whose_times_are_only_assumed_come_last():
    unknown = (COSTS.part(plan()),)
    pairs = [Costed(SPLIT[0], cost(0.5, unknown=unknown))]
    pairs += [Costed(each, cost(1.0)) for each in SPLIT[1:3]]
    found = compiler(dict.fromkeys(SPLIT, 1.0))
    found.compile(found._promising(pairs), Selection(count=2))
    assert {choice.plan for choice in found.sorted()} == {*SPLIT[1:3]}


def test_a_plan_that_does_not_fit_as_compiled_makes_way_for_a_leaner_one_of_its_shape():
    fast, lean = (
        dataclasses.replace(SPLIT[0], remat=Remat.parse(remat)) for remat in ("none", "full")
    )
    found = compiler({fast: 1.0, lean: 1.5}, too_large=(fast,))
    chosen = found.compile_promising([Costed(fast, cost(1.0)), Costed(lean, cost(1.5))])
    assert [choice.plan for choice in chosen] == [lean]
    found = compiler({fast: 1.0, lean: 1.5}, too_large=(fast, lean))
    assert found.compile_promising([Costed(fast, cost(1.0)), Costed(lean, cost(1.5))]) == []
    error = found.error()
    assert isinstance(error, DoesNotFit) and error.needs.device_bytes == 2.0
    assert str(compiler({}).error()) == "nothing is legal"


@pytest.mark.parametrize(("num_illegal", "num_found"), [(9, 1), (26, 1), (28, 0)])
def test_plans_that_cannot_be_built_do_not_end_the_search(num_illegal, num_found):
    illegal = tuple(plan(count, pipeline=2) for count in range(100, 100 + num_illegal))
    found = compiler({SPLIT[0]: 1.0}, illegal=illegal)
    pairs = [*(Costed(each, cost(0.5)) for each in illegal), Costed(SPLIT[0], cost(1.0))]
    assert len(found.compile_promising(pairs)) == num_found


@pytest.mark.parametrize("count", [1, 2])
def test_costs_are_scaled_in_all_parts(count):
    whole = COSTS.cost(plan(4, data=2, zero_stage=2))
    half = whole.scaled(0.5 * count)
    assert half.step_s == pytest.approx(0.5 * count * whole.step_s)
    assert half.exposed_s / half.step_s == pytest.approx(whole.exposed_s / whole.step_s)
    assert half.memory_bytes == whole.memory_bytes
