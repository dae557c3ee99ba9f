"""Layers and slots: conversion in both directions, for any cut and any placement."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedules.table import loop_placement, v_placement
from pipeline.stack_layout import StackLayout, balanced_cut, cut, even_cut
from tests.pipeline.schedules.tables import properties

LOOP_4 = loop_placement(4, 1)


@st.composite
def cuts(draw):
    """Draw (layers of every stack, placement, layers per chunk); chunks may be empty."""
    S = draw(st.integers(1, 4))
    V = draw(st.integers(1, 3))
    placement = v_placement(S) if draw(st.booleans()) else loop_placement(S, V)
    counts = draw(st.lists(st.integers(0, 4), min_size=len(placement), max_size=len(placement)))
    counts[draw(st.integers(0, len(counts) - 1))] += 1  # a model has at least one layer
    stops = sorted(draw(st.lists(st.integers(1, sum(counts)), max_size=2, unique=True)))
    stops = [*(stop for stop in stops if stop < sum(counts)), sum(counts)]
    sizes = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    return {f"stack_{i}": size for i, size in enumerate(sizes)}, placement, counts


def stage_of_every_layer(placement, counts) -> list[tuple[int, int]]:
    """Return the (stage, chunk of the stage) of all layers of all stacks, in order."""
    return [
        (stage, placement[:v].count(stage))
        for v, (stage, count) in enumerate(zip(placement, counts, strict=True))
        for _ in range(count)
    ]


@given(cuts())
@properties
def test_layout_puts_every_layer_on_the_stage_of_its_cut(example):
    num_layers, placement, counts = example
    layouts = cut(num_layers, placement, counts)
    places = stage_of_every_layer(placement, counts)
    assert list(layouts) == list(num_layers)
    num_stages = max(placement) + 1
    num_chunks = placement.count(0)
    for name, size in num_layers.items():
        layout = layouts[name]
        stack_places = places[:size]
        places = places[size:]
        assert layout.num_layers == size
        longest = max(stack_places.count(place) for place in stack_places)
        slots = layout.layer_of_slot.reshape(num_stages, num_chunks, longest)
        for stage, chunk in itertools.product(range(num_stages), range(num_chunks)):
            here = [layer for layer, place in enumerate(stack_places) if place == (stage, chunk)]
            # Layers are in order, with the padding at the end.
            assert slots[stage, chunk].tolist() == here + [-1] * (longest - len(here))
        assert layout.layer_of_slot[layout.slot_of_layer].tolist() == list(range(size))


@pytest.mark.thorough
@given(cuts(), st.sampled_from([(), (3,)]), st.sampled_from(["float32", "int32", "bool"]))
@settings(properties, max_examples=25)  # each example compiles
def test_to_layers_undoes_to_slots_and_padding_is_zero(example, shape, dtype):
    num_layers, placement, counts = example
    for name, layout in cut(num_layers, placement, counts).items():
        layers = np.ones((num_layers[name], *shape))
        if dtype != "bool":
            layers = 1 + np.arange(layers.size).reshape(layers.shape)  # no layer is zero
        layers = jnp.asarray(layers.astype(dtype))
        slots = layout.to_slots(layers)
        assert slots.dtype == layers.dtype
        assert slots.shape == (len(layout.layer_of_slot), *shape)
        np.testing.assert_array_equal(layout.to_layers(slots), layers)
        found = np.asarray(slots)
        wanted = np.asarray(layers)
        for slot, layer in enumerate(layout.layer_of_slot):
            np.testing.assert_array_equal(found[slot], wanted[layer] if layer >= 0 else 0)


@given(cuts())
@properties
def test_layout_is_plain_exactly_when_slots_are_layers(example):
    num_layers, placement, counts = example
    for name, layout in cut(num_layers, placement, counts).items():
        size = num_layers[name]
        assert layout.is_plain == (layout.layer_of_slot.tolist() == list(range(size)))
        if layout.is_plain:
            layers = np.arange(size)
            assert layout.to_slots(layers) is layers  # no copy
            assert layout.to_layers(layers) is layers


def test_layouts_of_one_even_chunk_per_stage_are_plain_and_others_not():
    layers = {"decoder": 8}
    assert cut(layers, LOOP_4)["decoder"].is_plain
    assert not cut(layers, LOOP_4, (3, 2, 2, 1))["decoder"].is_plain
    assert not cut(layers, loop_placement(4, 2))["decoder"].is_plain
    assert not cut(layers, v_placement(4))["decoder"].is_plain
    assert not cut({"decoder": 7}, LOOP_4)["decoder"].is_plain


def test_to_slots_passes_gradients_only_to_layers():
    layout = cut({"decoder": 3}, LOOP_4[:2])["decoder"]
    gradient = jax.grad(lambda x: jnp.sum(layout.to_slots(x) * jnp.arange(1.0, 5.0)))(jnp.ones(3))
    np.testing.assert_array_equal(gradient, [1, 2, 3])


def test_cut_of_several_stacks_leaves_empty_chunks():
    layouts = cut({"encoder": 3, "decoder": 5}, LOOP_4)
    assert layouts["encoder"] == StackLayout(
        num_layers=3, chunks=(((0, 2),), ((2, 1),), ((3, 0),), ((3, 0),))
    )
    assert layouts["decoder"].layer_of_slot.tolist() == [-1, -1, 0, -1, 1, 2, 3, 4]


def test_cut_with_an_empty_chunk_holds_all_layers_on_the_others():
    layout = cut({"decoder": 4}, LOOP_4, (0, 2, 0, 2))["decoder"]
    assert layout.layer_of_slot.tolist() == [-1, -1, 0, 1, -1, -1, 2, 3]


def test_cut_of_fewer_layers_than_chunks_says_so_unless_chunks_are_said_to_be_empty():
    with pytest.raises(
        ValueError, match=r"mesh.pipeline=4 × pipeline.chunks=2 exceeds the model's 7 layers"
    ):
        cut({"encoder": 3, "decoder": 4}, loop_placement(4, 2))
    cut({"encoder": 3, "decoder": 4}, loop_placement(4, 2), (1, 1, 1, 0, 1, 1, 1, 1))


def test_cut_with_another_number_of_counts_names_both():
    with pytest.raises(
        ValueError,
        match=r"layers_per_stage=\(4, 4\) has 2 numbers that add up to 8; mesh.pipeline=4 × "
        r"pipeline.chunks=1 needs 4 numbers that add up to 8, such as \(2, 2, 2, 2\)",
    ):
        cut({"decoder": 8}, LOOP_4, (4, 4))


def test_cut_with_another_sum_names_both():
    with pytest.raises(
        ValueError,
        match=r"layers_per_stage=\(3, 3, 2, 2\) has 4 numbers that add up to 10; .* needs 4 "
        r"numbers that add up to 9, such as \(3, 2, 2, 2\)",
    ):
        cut({"decoder": 9}, LOOP_4, (3, 3, 2, 2))


@given(st.integers(0, 50), st.integers(1, 12))
@properties
def test_even_cut_differs_by_one_at_most_with_the_larger_first(total, num_parts):
    counts = even_cut(total, num_parts)
    assert len(counts) == num_parts and sum(counts) == total
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def largest_cost(costs, ends, counts) -> int:
    stops = list(itertools.accumulate(counts, initial=0))
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(stops)]
    sums[0] += ends[0]
    sums[-1] += ends[1]
    return max(sums)


def cost_of(costs, num_chunks, ends):
    """Return the function (chunk, first layer, layer after the last) -> cost of the chunk."""

    def cost(chunk, first, stop):
        at_ends = ends[0] * (chunk == 0) + ends[1] * (chunk == num_chunks - 1)
        return sum(costs[first:stop]) + at_ends

    return cost


# Integers, so that sums are exact in any order.
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7),
    st.integers(1, 4),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
@properties
def test_balanced_cut_is_the_best_of_all_cuts(costs, num_chunks, ends):
    counts = balanced_cut(len(costs), num_chunks, cost_of(costs, num_chunks, ends))
    every = [
        c
        for c in itertools.product(range(len(costs) + 1), repeat=num_chunks)
        if sum(c) == len(costs)
    ]
    assert tuple(counts) in every
    best = min(largest_cost(costs, ends, c) for c in every)
    assert largest_cost(costs, ends, counts) == best


def test_balanced_cut_of_equal_layers_without_ends_is_as_good_as_even():
    assert max(balanced_cut(10, 4, cost_of([1] * 10, 4, (0, 0)))) == 3
    assert balanced_cut(8, 4, cost_of([1] * 8, 4, (0, 0))) == [2, 2, 2, 2]


def test_balanced_cut_gives_a_costly_head_fewer_layers():
    assert balanced_cut(8, 2, cost_of([1] * 8, 2, (0, 2))) == [5, 3]
    assert balanced_cut(4, 2, cost_of([1] * 4, 2, (0, 9))) == [4, 0]
