"""The minimum cut, compared with all subsets of small graphs."""

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.runtime.min_cut import cheapest_cut
from tests.pipeline.schedules.tables import properties

SMALL = st.integers(1, 9)
LARGE = st.integers(1, 2**36)


@st.composite
def graphs(draw, sizes=SMALL):
    """Draw (sizes, uses, given, wanted); a value is computed from values with smaller numbers."""
    count = draw(st.integers(1, 7))
    values = range(count)
    pairs = list(itertools.combinations(values, 2))
    uses = [pair for pair in pairs if draw(st.booleans())]

    def subset():
        return [v for v in values if draw(st.booleans())]

    return {v: draw(sizes) for v in values}, uses, subset(), subset()


def suffices(kept: set[int], uses, fixed, wanted) -> bool:
    """Return whether every wanted value is kept or can be computed from kept values."""

    def at_hand(value: int) -> bool:
        if value in kept:
            return True
        return value not in fixed and all(at_hand(a) for a, b in uses if b == value)

    return all(map(at_hand, wanted))


def least(sizes, uses, fixed, wanted) -> int:
    """Return the total size of the smallest sufficient set."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(sizes, count) for count in range(len(sizes) + 1)
    )
    enough = (set(kept) for kept in subsets if suffices(set(kept), uses, fixed, wanted))
    return min(sum(sizes[v] for v in kept) for kept in enough)


@given(graphs())
@properties
def test_cheapest_cut_suffices_and_is_the_smallest(graph):
    sizes = graph[0]
    kept = cheapest_cut(*graph)
    assert suffices(kept, *graph[1:])
    assert sum(sizes[v] for v in kept) == least(*graph)


@given(graphs(sizes=LARGE))
@properties
def test_cheapest_cut_of_sizes_beyond_int32_is_the_smallest_to_a_part_in_2_to_29(graph):
    """Sizes are counted in units of 2**-29 of their sum, rounded up."""
    sizes = graph[0]
    kept = cheapest_cut(*graph)
    assert suffices(kept, *graph[1:])
    unit = max(1, sum(sizes.values()) // 2**29)
    assert sum(sizes[v] for v in kept) <= least(*graph) + unit * len(sizes)


@given(graphs(), st.randoms(use_true_random=False))
@properties
def test_cheapest_cut_does_not_depend_on_the_order_of_its_inputs(graph, rng):
    sizes, *others = graph
    assume(len(sizes) > 1)
    names = list(sizes)
    rng.shuffle(names)
    shuffled = [rng.sample(part, len(part)) for part in others]
    assert cheapest_cut({v: sizes[v] for v in names}, *shuffled) == cheapest_cut(*graph)


def test_cheapest_cut_keeps_one_narrow_value_on_the_way_from_two_wide_ones():
    sizes = {"wide": 8, "other": 8, "narrow": 3, "wanted": 8, "far": 8}
    uses = [("wide", "narrow"), ("other", "narrow"), ("narrow", "wanted"), ("wanted", "far")]
    assert cheapest_cut(sizes, uses, ["wide", "other"], ["wanted", "far"]) == {"narrow"}
    # `wanted` can no longer be recomputed from `narrow`, so it must be kept itself.
    assert cheapest_cut(sizes, uses, ["wide", "other", "wanted"], ["far"]) == {"wanted"}
    assert cheapest_cut(sizes, uses, ["wide", "other"], []) == set()
    assert cheapest_cut(sizes, uses, [], ["wanted"]) == set()
