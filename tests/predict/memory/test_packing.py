"""Tests of the addresses that XLA assigns to buffers."""

from predict.memory.packing import Lifetime, most_bytes_at_once, packed_bytes


def test_buffers_of_different_lives_share_their_addresses():
    assert packed_bytes([Lifetime(8, 0, 2), Lifetime(8, 2, 4)]) == 8
    assert packed_bytes([Lifetime(8, 0, 3), Lifetime(8, 2, 4)]) == 16
    assert packed_bytes([]) == most_bytes_at_once([]) == 0


def test_hole_that_nothing_fits_into_counts():
    """At most 18 bytes are alive at once; 2 bytes of a former buffer of 8 stay unused."""
    first = Lifetime(8, 0, 2)
    second = Lifetime(8, 1, 3)
    in_first = Lifetime(6, 2, 6)
    late = Lifetime(4, 2, 3)
    buffers = [late, in_first, second, first]
    assert most_bytes_at_once(buffers) == 18
    assert packed_bytes(buffers) == 18 + 2


def test_smallest_hole_that_fits_is_taken():
    """The early buffers leave holes of 18 and 14 bytes, for buffers of 10 + 8 and 11 bytes."""
    kept = [Lifetime(20, 0, 9), Lifetime(16, 0, 9), Lifetime(12, 0, 9)]
    early = [Lifetime(18, 0, 1), Lifetime(14, 0, 1)]
    late = [Lifetime(11, 2, 9), Lifetime(10, 2, 9), Lifetime(8, 2, 9)]
    assert packed_bytes([*kept, *early]) == packed_bytes([*kept, *early, *late]) == 80
