"""The batch size of each step, which may grow at the start of a run."""

import itertools
from fractions import Fraction

import jax
import numpy as np
import pytest

from data.batch_sizes import BatchSizes, check_rampup, rows_of_size
from data.config import DataConfig
from data.image_config import ImageConfig, check_images
from sharding.batches import BatchLayout, process_rows
from sharding.mesh import MeshConfig, make_mesh
from sharding.ops.sequence import WHOLE


def of_steps(sizes: BatchSizes, num_steps: int) -> list[int]:
    return [sizes.of_step(step) for step in range(num_steps)]


def test_sizes_follow_the_rule_of_the_examples_used_so_far():
    """At n examples, the size has grown floor(n / (examples of an increment)) times."""
    cases = ((64, (16, 16, 10)), (1536, (32, 32, 100_000)), (8, (2, 2, 12)), (9, (2, 7, 1)))
    for global_batch_size, rampup in cases:
        sizes = BatchSizes.of(global_batch_size, rampup)
        start, increment, num_examples = rampup
        num_increments = (global_batch_size - start) // increment
        element = 0
        for step in range(sizes.full.first_step + 3):
            grown = min(num_increments, element // Fraction(num_examples, num_increments))
            size = start + grown * increment
            assert (sizes.of_step(step), sizes.of_element(element)) == (size, size)
            assert sizes.first_element(step) == element
            assert sizes.num_steps(Fraction(element) + Fraction(size, 2)) == step + Fraction(1, 2)
            element += size
        assert sizes.of_step(10**9) == global_batch_size


def test_sizes_of_the_module_docstring():
    sizes = BatchSizes.of(8, (2, 2, 12))
    assert of_steps(sizes, 6) == [2, 2, 4, 6, 8, 8]
    assert [sizes.first_element(step) for step in range(6)] == [0, 2, 4, 8, 14, 22]
    assert of_steps(BatchSizes.of(8), 2) == [8, 8]


def test_small_batches_have_as_few_microbatches_as_a_full_one_allows():
    sizes = BatchSizes.of(64, (8, 8, 1000))
    counts = [sizes.num_microbatches(size, 4) for size in range(8, 72, 8)]
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4]
    assert sizes.undivided_size(4, 1) == 40  # three microbatches
    assert BatchSizes.of(64, (16, 16, 1000)).undivided_size(4, 16) is None
    assert sizes.undivided_size(1, 8) is None
    assert sizes.undivided_size(1, 16) == 8
    assert {sizes.num_microbatches(size, 1) for size in range(8, 72, 8)} == {1}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "model": 2}, {"fsdp": 4}])
def test_rows_of_small_batches_are_those_of_the_same_devices(mesh, monkeypatch):
    mesh = make_mesh(MeshConfig(**mesh), jax.devices())
    sharding = BatchLayout(mesh=mesh, sequence=WHOLE).sharding("index")
    for held in ((0, 1), (2, 3), (0, 3)):  # devices of a process
        devices = {mesh.devices.flat[i] for i in held}

        def rows_of(size, devices=devices):
            class Addressable:
                def addressable_devices_indices_map(self, shape):
                    indices = sharding.devices_indices_map(shape)
                    return {device: indices[device] for device in devices}

            return tuple(process_rows(Addressable(), size))  # pyright: ignore[reportArgumentType]

        for size in (8, 16, 24, 40, 48):
            assert rows_of_size(rows_of(48), 48, size) == rows_of(size)


@pytest.mark.parametrize(
    ("rampup", "message"),
    [
        ((16, 4, 100), r"the first size must be less than data.global_batch_size=16"),
        ((4, 5, 100), r"the increment must divide .* = 12 .* the nearest that does is 6"),
        ((4, 4.0, 100), "must be three whole numbers"),
        ((4, 4), r"must be 3 numbers, each at least 1, or \(\); write for example"),
        ((0, 4, 100), "must be 3 numbers, each at least 1"),
    ],
)
def test_rampup_that_does_not_lead_to_the_batch_size_is_refused(rampup, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(global_batch_size=16, rampup_batch_size=rampup)


def test_rampup_with_too_many_sizes_is_refused_at_once():
    with pytest.raises(ValueError, match="at most 1000 parts"):
        check_rampup(10**15, (1, 1, 10))


def test_rampup_of_images_keeps_pairs_and_repeats():
    def check(rampup, **images):
        data = DataConfig(
            name="digits",
            objective="image_classification",
            global_batch_size=8,
            rampup_batch_size=rampup,
        )
        check_images(data, ImageConfig(**images))

    check((2, 2, 10), mixup=0.2)
    with pytest.raises(ValueError, match="odd sizes; choose an even START and INCREMENT"):
        check((3, 1, 10), mixup=0.2)
    with pytest.raises(ValueError, match="images.repeats=2 counts the images"):
        check((2, 2, 10), repeats=2)


def test_steps_of_grown_batches_continue_the_stream():
    """Each element is used once, in order, and as in batches of the same size."""
    sizes = BatchSizes.of(8, (2, 3, 7))
    ends = list(itertools.accumulate(of_steps(sizes, 9), initial=0))
    firsts = [sizes.first_element(step) for step in range(10)]
    np.testing.assert_array_equal(firsts, ends)
