"""The division of sequences over the devices of `context`."""

import numpy as np
import pytest

from sharding.ops.sequence import SequenceSplit

SPLITS = [
    SequenceSplit(num_devices=4, ring_size=4),
    SequenceSplit(num_devices=4, ring_size=2),
    SequenceSplit(num_devices=4, ring_size=1),
    SequenceSplit(num_devices=6, ring_size=3),
    SequenceSplit(num_devices=4, ring_size=4, is_zigzag=False),
]


def test_example_of_the_docstring():
    split = SequenceSplit(num_devices=4, ring_size=2)
    assert split.order(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert split.groups == [[0, 1], [2, 3]]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_token_is_on_one_device(split):
    length = 2 * split.num_parts
    assert sorted(split.order(length)) == [*range(length)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_first_token_is_the_first_of_device_0(split):
    assert split.order(split.num_parts)[0] == 0


@pytest.mark.parametrize("ring_size", [2, 4, 8])
def test_zigzag_gives_every_group_the_same_causal_work(ring_size):
    """A token at position p sees p + 1 keys."""
    split = SequenceSplit(num_devices=ring_size, ring_size=ring_size)
    length = 64 // ring_size
    work = [int(np.sum(split.positions(i, length) + 1)) for i in range(ring_size)]
    assert len({*work}) == 1
