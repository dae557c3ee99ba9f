"""Rows in slots get the tokens that the generator gives them, on every mesh."""

import jax
import numpy as np
import pytest

from convert.from_hf import load
from generate.generator import Generator
from generate.sampling import Sampling
from generate.serve.slots import Row, Slots
from sharding.mesh import MeshConfig, make_mesh, use_mesh

_PROMPTS = ([5, 6, 7], [*range(40)], [9], [11] * 33)
_SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=0.7, top_k=9, seed=3),
    Sampling(top_p=0.8, seed=2**32 - 1),
    Sampling(min_p=0.05, seed=4),
)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "model": 2}])
def test_rows_that_begin_at_different_times_have_the_tokens_of_the_generator(mesh, llama):
    model = load(llama[1])
    generator = Generator(model, batch_size=4)
    expected = [
        generator.generate([prompt], max_new_tokens=13, sampling=sampling)[0]
        for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True)
    ]
    with use_mesh(make_mesh(MeshConfig(**mesh), jax.devices())):
        slots = Slots(load(llama[1]), num_slots=4, max_length=64, tokens_per_call=3)
        found: list[list[int]] = [[] for _ in _PROMPTS]
        order = (2, 0, 3, 1)  # slot of each prompt
        is_active_B = np.zeros(4, bool)
        for number, (prompt, sampling) in enumerate(zip(_PROMPTS, _SAMPLINGS, strict=True)):
            slot = order[number]
            row = Row(slot=slot, tokens=prompt, sampling=sampling, number=0)
            found[number] += slots.begin([row])
            is_active_B[slot] = True
            new_BM = slots.advance(is_active_B)
            for other in range(number + 1):
                found[other] += new_BM[order[other]].tolist()
        while min(map(len, found)) < 13:
            new_BM = slots.advance(is_active_B)
            for other in range(len(found)):
                found[other] += new_BM[order[other]].tolist()
    assert [tokens[:13] for tokens in found] == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [{}, pytest.param({"data": 2, "model": 2}, marks=pytest.mark.thorough)]
)
def test_requests_compile_nothing_after_a_warm_up(mesh, llama, compilations):
    expected = Generator(load(llama[1]), batch_size=2).generate(
        [_PROMPTS[0]], max_new_tokens=7, sampling=_SAMPLINGS[2]
    )
    with use_mesh(make_mesh(MeshConfig(**mesh), jax.devices())):
        slots = Slots(load(llama[1]), num_slots=2, max_length=64, tokens_per_call=3)
        slots.warm_up()
        compilations.clear()
        found = slots.begin([Row(slot=1, tokens=_PROMPTS[0], sampling=_SAMPLINGS[2], number=0)])
        for _ in range(2):
            found += slots.advance(np.array([False, True]))[1].tolist()
    assert found == expected[0] and compilations == []


def test_numbers_that_do_not_fit_are_refused(llama):
    model = load(llama[1])
    most = model.config.max_positions
    with pytest.raises(ValueError, match=rf"max_length={most + 1} must be .* model's {most} pos"):
        Slots(model, num_slots=1, max_length=most + 1, tokens_per_call=1)
