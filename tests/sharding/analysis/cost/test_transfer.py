"""Times of collectives from the bandwidths of links and networks."""

import pytest

from sharding.analysis.cost.machine import NETWORK_LATENCY_S
from sharding.analysis.cost.transfer import group_over, transfer_s
from tests.sharding.analysis.cost.programs import MACHINE

SHAPE = {"pipeline": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((), (0,)),
        (("model",), (0, 1)),
        (("data",), (0, 2)),
        (("pipeline",), (0, 4)),
        (("data", "model"), (0, 1, 2, 3)),
        (("pipeline", "model"), (0, 1, 4, 5)),
    ],
)
def test_group_over_axes_differs_from_device_0_along_these_axes(axes, expected):
    assert group_over(SHAPE, axes) == expected


@pytest.mark.parametrize(
    ("kind", "group", "expected"),
    [
        ("all-gather", (0, 1, 2, 3), 0.75 * 3e9 / 300e9),
        ("all-reduce", (0, 1, 2, 3), 1.5 * 3e9 / 300e9),
        ("reduce-scatter", (0, 1, 2, 3), 3 * 3e9 / 300e9),
        # Two GPUs on each of two hosts: a ring leaves each host through two adapters.
        ("all-gather", (0, 1, 4, 5), 0.75 * 3e9 / (2 * 85e9)),
        ("all-gather", (0, 4), 0.5 * 3e9 / 85e9),
        ("all-gather", (0,), 0.0),
    ],
)
def test_slowest_connection_of_a_ring_determines_the_time(kind, group, expected):
    assert transfer_s(MACHINE, kind, [group], 3e9) == pytest.approx(expected)


def test_small_transfers_take_the_latency():
    assert transfer_s(MACHINE, "all-reduce", [(0, 4)], 8) == NETWORK_LATENCY_S
