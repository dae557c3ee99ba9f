"""Times of layers that are scaled from a few compiled parts."""

import dataclasses
import types

import pytest

from predict.machines.targets import parse_target
from tests.train.planning.test_parallel_plan import config_of
from train.planning.layer_times import ReplicaMemory, ReplicaStep, ReplicaTimes, Split
from train.planning.memory.budget import target_budget
from train.planning.plan_devices import described_devices
from train.planning.scaled_times import ParamCount, ScaledTimes
from train.planning.state_bytes import UPDATE

_WORK = types.SimpleNamespace(layers=(9, 9), embed=0, head=2)
TARGET = parse_target("h100:1x8")
_SPLIT_TIME = {1: 1.0, 2: 0.6, 4: 0.35}


def forward_s(part: ReplicaStep) -> float:
    exchanges = 0.1 * (part.expert - 1)  # by each device of `model`
    return (1 + part.batch) * (_SPLIT_TIME[part.model] + exchanges)


def backward_s(part: ReplicaStep) -> float:
    again = 0.8 if part.remat == "full" else 0.0
    return (2 + again) * forward_s(part)


def not_built(config, target):
    pytest.fail("nothing is compiled here")


class GivenTimes(ScaledTimes):
    """Scaled times of layers that take (1 + batch) s forward and twice that backward."""

    num_layers = {"decoder": 4}
    forwards_s: tuple[float, ...] = ()

    def __init__(self, sequence_length: int = 8192):
        super().__init__(
            config_of(f"data.sequence_length={sequence_length}"),
            described_devices(TARGET, target_budget(config_of().memory, TARGET), not_built),
            split=Split(1, 1, 1),
            remat="none",
        )
        self.params = (ParamCount(count=10**9, num_trained=10**9),)

    def compiled(self, part: ReplicaStep):
        update_s = self.update_s(1e9 / part.model, 1, 0)
        head_s = part.batch / 3 / part.model
        step_s = forward_s(part) + backward_s(part) + head_s + update_s
        return types.SimpleNamespace(
            times=ReplicaTimes(step_s=step_s, forwards_s=self.forwards_s or (forward_s(part),)),
            memory=ReplicaMemory(activations=7.0, temporaries=3.0),
            run=types.SimpleNamespace(
                traces=types.SimpleNamespace(work=_WORK),
                functions=types.SimpleNamespace(num_layers=self.num_layers),
            ),
        )


@pytest.fixture
def times():
    scaled = GivenTimes()
    scaled.measure_base(scaled.parts_of_base(1, 1))
    return scaled


def part(**values) -> ReplicaStep:
    one = {"context": 1, "expert": 1, "model": 1, "batch": 1, "remat": "none"}
    return ReplicaStep(**(one | values))


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_times_of_the_base_are_exact_for_every_batch(times, batch):
    found = times.times(part(batch=batch))
    assert found.forward_s == pytest.approx(forward_s(part(batch=batch)))
    assert found.backward_s == pytest.approx(backward_s(part(batch=batch)))
    assert times.unknown(part(batch=batch)) == []
    assert times.head_s(part(batch=batch, model=4)) == pytest.approx(batch / 12)


@pytest.mark.parametrize(
    ("smallest", "largest", "batches"),
    [(1, 2, [1, 4]), (1, 64, [1, 4, 8]), (4, 4, [4, 8]), (8, 16, [4, 8])],
)
def test_base_is_compiled_for_no_more_batches_than_plans_need(smallest, largest, batches):
    times = GivenTimes(sequence_length=2048)
    parts = times.parts_of_base(smallest, largest)
    assert [found.batch for found in parts] == batches
    times.measure_base(parts)
    for batch in (smallest, largest):
        found = times.times(part(batch=batch))
        assert found.forward_s == pytest.approx(forward_s(part(batch=batch)))
        assert found.backward_s == pytest.approx(backward_s(part(batch=batch)))
        assert times.head_s(part(batch=batch)) == pytest.approx(batch / 3)


def test_each_factor_is_measured_by_itself(times):
    wanted = part(model=2, batch=4, remat="full")
    missing = times.unknown(wanted)
    assert missing == [part(model=2), part(remat="full")]
    times.measure(missing)
    assert times.unknown(wanted) == []
    found = times.times(wanted)
    assert found.forward_s == pytest.approx(forward_s(wanted))
    assert found.backward_s == pytest.approx(backward_s(wanted))


def test_split_between_two_measured_ones_is_interpolated(times):
    assert times.is_between(part(model=2), [part(model=4)])
    assert not times.is_between(part(model=4), [part(model=2)])
    assert not times.is_between(part(model=2), [part(model=16)])  # on two hosts
    assert not times.is_between(part(model=2, remat="full"), [part(model=4)])
    times.measure([part(model=4)])
    assert times.unknown(part(model=2)) == []
    assert times.unknown(part(model=8)) == [part(model=8)]
    found = times.times(part(model=2))
    factor = 1 - (1 - 0.35) * 2 / 3  # linear in 1 / model: 1/2 is two thirds of the way to 1/4
    assert found.forward_s == pytest.approx(forward_s(part()) * factor)
    assert found.backward_s == pytest.approx(backward_s(part()) * factor)
    times.measure([part(model=2)])  # a measured factor goes before an interpolated one
    assert times.times(part(model=2)).forward_s == pytest.approx(forward_s(part(model=2)))


def test_time_that_expert_adds_is_measured_once_for_all_splits_within_a_host(times):
    wanted = part(expert=2, model=4, batch=8)
    base = times.base
    missing = times.unknown(wanted)
    assert missing == [dataclasses.replace(base, model=4), dataclasses.replace(base, expert=2)]
    times.measure(missing)
    assert times.unknown(wanted) == times.unknown(part(expert=2, model=2)) == []
    found = times.times(wanted)
    assert found.forward_s == pytest.approx(forward_s(wanted))
    assert found.backward_s == pytest.approx(backward_s(wanted))
    # Two hosts: the exchange is slower.
    assert times.unknown(part(expert=8, model=2)) == [part(expert=8, model=2)]


def test_layers_of_a_stack_share_its_time():
    def found(num_layers, forwards_s):
        times = GivenTimes()
        times.num_layers, times.forwards_s = num_layers, forwards_s
        times.measure_base(times.parts_of_base(1, 1))
        return times.layer_times

    assert found({"encoder": 2, "decoder": 4}, (2.0, 12.0)) == [1.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    assert found({"encoder": 1, "decoder": 4}, (2.0, 12.0)) == _WORK.layers


def test_assumed_split_is_slower_than_a_perfect_one(times):
    whole = times.times(part(batch=8))
    split = times.times(part(batch=8, model=4))
    assert whole.forward_s / 4 < split.forward_s < whole.forward_s / 2


def test_memory_grows_with_the_batch_and_is_divided_by_the_split(times):
    assert times.memory(part(batch=8, model=2)) == ReplicaMemory(activations=28.0, temporaries=12.0)


def test_zero_divides_the_update(times):
    whole = times.update_s(1e9, 8, 0)
    assert whole == pytest.approx(times._devices.machine.memory_s(UPDATE * 1e9))
    assert times.update_s(1e9, 8, 3) == pytest.approx(whole / 8)
    assert whole / 8 < times.update_s(1e9, 8, 1) < whole
