"""Beam search returns the same tokens as `transformers.generate`, on every mesh."""

import copy
from typing import Any

import jax
import pytest

from convert.from_hf import load
from generate.beam_search import Beams
from generate.generator import Generator
from tests.generate.references import NEW, START, mesh_of, prompts, theirs


def expected_beams(model: Any, beams: Beams, stop: int) -> list[list[int]]:
    return theirs(
        model,
        stop,
        num_beams=beams.num_beams,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
    )


def a_stop_token(tokens: list[list[int]]) -> int:
    """Return a token that some of the greedy continuations contain, not at once."""
    found = [token for row in tokens for token in row[4:]]
    return max(sorted(set(found)), key=found.count)


@pytest.mark.thorough
@pytest.mark.drawn(2)
def test_beams_of_every_family_equal_those_of_transformers(model):
    """In float32; or, if two beams are equal up to rounding there, in float64."""
    reference, directory = model
    stop = a_stop_token(theirs(reference))
    beams = Beams(num_beams=4)

    def are_equal(reference: Any, dtype: str) -> bool:
        generator = Generator(load(directory, dtype=dtype), stop=[stop], start=START)
        tokens = generator.beam_search(prompts(), max_new_tokens=NEW, beams=beams)
        return tokens == expected_beams(reference, beams, stop)

    if not are_equal(reference, "float32"):
        with jax.enable_x64(True):
            assert are_equal(copy.deepcopy(reference).double(), "float64")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "beams",
    [
        Beams(num_beams=3, early_stopping=True),
        pytest.param(Beams(num_beams=2, length_penalty=2.5), marks=pytest.mark.thorough),
        pytest.param(Beams(num_beams=3, length_penalty=0.0), marks=pytest.mark.thorough),
        pytest.param(
            Beams(num_beams=3, length_penalty=-1.0, early_stopping="never"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            Beams(num_beams=5, length_penalty=0.7, early_stopping="never"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
@pytest.mark.drawn(1)
def test_beams_end_as_those_of_transformers(beams, llama, greedy):
    reference, directory = llama
    stop = a_stop_token(greedy)
    expected = expected_beams(reference, beams, stop)
    assert beams.length_penalty > 1 or len({len(tokens) for tokens in expected}) > 1
    # The last batch is filled up with rows that are no prompts.
    generator = Generator(load(directory), stop=[stop], batch_size=3)
    assert generator.beam_search(prompts(), max_new_tokens=NEW, beams=beams) == expected


@pytest.mark.thorough
def test_beams_are_the_same_on_a_mesh(llama):
    beams = Beams(num_beams=4)
    alone = Generator(load(llama[1])).beam_search(prompts(), max_new_tokens=NEW, beams=beams)
    with jax.set_mesh(mesh_of({"pipeline": 2, "data": 2, "model": 2})):
        generator = Generator(load(llama[1]))
        assert generator.beam_search(prompts(), max_new_tokens=NEW, beams=beams) == alone


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": 0}, "num_beams=0 must be at least 1"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty=nan must be from -10"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping='soon' must be True, False"),
    ],
)
def test_unusable_beams_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Beams(**values)
