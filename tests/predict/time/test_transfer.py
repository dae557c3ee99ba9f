"""Times of collectives from the bandwidths of links and networks."""

import dataclasses

import pytest

from predict.machines.machine import NETWORK_LATENCY_S
from predict.time.transfer import group_over, transfer_s
from tests.predict.time.programs import MACHINE

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


#: Four GPUs in a square of 1, 2, 1 and 2 links. A GPU's links carry 400 GB/s together.
SQUARE = dataclasses.replace(
    MACHINE, links=((0, 1, 2, 0), (1, 0, 0, 2), (2, 0, 0, 1), (0, 2, 1, 0))
)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ((0, 1, 2, 3), 400e9),
        ((0, 1), 400e9 / 3),
        ((4, 6), 2 * 400e9 / 3),
        ((0, 1, 2), 400e9 / 3),  # GPU 1 shares only its link to GPU 0
        ((0, 3), SQUARE.host_bytes_per_s),  # no link
        ((1, 5), 400e9),  # one GPU per host: links carry nothing
        ((0, 2, 4, 5), 400e9 / 3),  # the second host decides
    ],
)
def test_group_without_a_switch_has_the_links_between_its_members(group, expected):
    assert SQUARE.group_bytes_per_s(group) == pytest.approx(expected)
    assert MACHINE.group_bytes_per_s(group) == 400e9


def test_slowest_group_without_a_switch_determines_the_time():
    groups = [(0, 2), (1, 2)]  # two links, none
    slow_s = transfer_s(SQUARE, "all-gather", groups, 3e9)
    assert slow_s == pytest.approx(0.5 * 3e9 / (0.75 * SQUARE.host_bytes_per_s))
    fast_s = transfer_s(SQUARE, "all-gather", groups[:1], 3e9)
    assert fast_s == pytest.approx(0.5 * 3e9 / (0.75 * 2 * 400e9 / 3))


def test_devices_that_share_cores_wait_for_their_turns():
    """A group of 8 waits four times as long as a group of 2; a permutation waits for all 8."""
    machine = dataclasses.replace(MACHINE, shares_cores=True, gpus_per_host=8)
    latency_s = machine.collective_latency_s
    all_s, pair_s, send_s = (
        transfer_s(machine, kind, [group], 0)
        for kind, group in (
            ("all-reduce", tuple(range(8))),
            ("all-reduce", (0, 1)),
            ("collective-permute", (0, 1)),
        )
    )
    assert (all_s, send_s) == (latency_s, latency_s)
    assert pair_s == pytest.approx(latency_s / 4)
    large_s = transfer_s(MACHINE, "all-reduce", [(0, 1)], 3e9)
    assert transfer_s(machine, "all-reduce", [(0, 1)], 3e9) == pytest.approx(large_s + pair_s)
