"""Speculative decoding finds the tokens that plain decoding finds, in fewer passes."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as some

from convert.from_hf import load
from generate.drafts import Drafts, following
from generate.generator import Generator
from tests.generate.references import (
    GREEDY,
    LENGTHS,
    MODELS,
    NEW,
    SAMPLED,
    START,
    VOCAB,
    mesh_of,
    prompts,
    theirs,
)

PENALIZED = dataclasses.replace(SAMPLED, repetition_penalty=1.2, banned=(7,))
_SETTINGS = {"greedy": GREEDY, "penalized": PENALIZED}


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """The directory of a model like the LLaMA, with other weights and two tokens more."""
    directory = tmp_path_factory.mktemp("draft")
    torch.manual_seed(1)
    model = MODELS["llama"]()
    model.resize_token_embeddings(VOCAB + 2)
    model.save_pretrained(directory)
    return directory


def passes_of(num_tokens: int, num_drafts: int) -> int:
    """Return the number of passes if all drafts are right; the prompt's finds one token."""
    return -(-(num_tokens - 1) // (num_drafts + 1))


@pytest.mark.thorough
@pytest.mark.drawn(1)
def test_drafts_of_the_text_do_not_change_greedy_continuations(model):
    reference, directory = model
    generator = Generator(load(directory), start=START, drafts=Drafts(num_tokens=4))
    found = generator.generate(prompts(), max_new_tokens=NEW, sampling=GREEDY)
    assert found == theirs(reference)
    assert 0 < generator.num_passes < (NEW - 1) * len(LENGTHS)  # some drafts were right


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.slow(only=[f"{name}-{how}" for name in ("opt", "qwen3") for how in _SETTINGS])
@pytest.mark.parametrize("sampling", _SETTINGS.values(), ids=_SETTINGS)
def test_all_drafts_of_the_model_itself_are_right(sampling, model):
    # So the draft model's caches have all tokens, and it uses the same random numbers.
    itself = load(model[1])
    expected = Generator(itself, start=START).generate(
        prompts(), max_new_tokens=NEW, sampling=sampling
    )
    generator = Generator(itself, start=START, drafts=Drafts(num_tokens=3, model=itself))
    assert generator.generate(prompts(), max_new_tokens=NEW, sampling=sampling) == expected
    assert generator.num_passes == len(LENGTHS) * passes_of(NEW, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", _SETTINGS.values(), ids=_SETTINGS)
@pytest.mark.parametrize("takes_from_model", [True, False], ids=["model", "text"])
def test_wrong_drafts_do_not_change_continuations(sampling, takes_from_model, llama, draft_model):
    target = load(llama[1])
    plain = Generator(target)
    expected = plain.generate(prompts(), max_new_tokens=NEW, sampling=sampling)
    stop = expected[1][5]
    drafts = Drafts(num_tokens=5, model=load(draft_model) if takes_from_model else None)
    drafted = Generator(target, stop=[stop], batch_size=4, drafts=drafts)
    found = drafted.generate(prompts(), max_new_tokens=NEW, sampling=sampling)
    assert found == [row[: row.index(stop) + 1] if stop in row else row for row in expected]
    assert plain.num_passes == (NEW - 1) * len(LENGTHS)


@pytest.mark.thorough
def test_streams_yield_each_token_once(llama):
    target = load(llama[1])
    prompt = [5, 6, 7, 5, 6]
    expected = [*Generator(target).stream(prompt, max_new_tokens=NEW, sampling=SAMPLED)]
    generator = Generator(target, drafts=Drafts(model=target))
    assert [*generator.stream(prompt, max_new_tokens=NEW, sampling=SAMPLED)] == expected
    assert generator.num_passes == passes_of(NEW, 4)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "sizes",
    [{"data": 4}, {"model": 2}, {"pipeline": 2, "data": 2, "model": 2}],
    ids=["data=4", "model=2", "2x2x2"],
)
def test_continuations_are_the_same_on_every_mesh(sizes, llama, draft_model):
    expected = Generator(load(llama[1])).generate(prompts(), max_new_tokens=NEW, sampling=SAMPLED)
    with jax.set_mesh(mesh_of(sizes)):
        drafts = Drafts(num_tokens=3, model=load(draft_model))
        generator = Generator(load(llama[1]), drafts=drafts)
        assert generator.generate(prompts(), max_new_tokens=NEW, sampling=SAMPLED) == expected


@pytest.mark.thorough
def test_texts_may_reach_the_last_position(llama):
    # Drafts go beyond the last position of the model; they are not taken.
    target = load(llama[1])
    prompt = [*range(2, 2 + 128 - NEW)]
    expected = Generator(target).generate([prompt], max_new_tokens=NEW, sampling=GREEDY)
    for drafts in (Drafts(num_tokens=9), Drafts(num_tokens=9, model=target)):
        generator = Generator(target, drafts=drafts)
        assert generator.generate([prompt], max_new_tokens=NEW, sampling=GREEDY) == expected


@pytest.mark.thorough
def test_draft_model_may_have_fewer_positions(tmp_path):
    torch.manual_seed(1)
    names = ("long", "short")
    for name, positions in zip(names, (128, 50), strict=True):
        config = hf.GPT2Config(
            vocab_size=VOCAB, n_positions=positions, n_layer=1, n_head=2, n_embd=12
        )
        hf.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    target, short = (load(tmp_path / name) for name in names)
    prompt = [*range(2, 42)]  # padding to 64 tokens would exceed the 50 positions
    expected = Generator(target).generate([prompt], max_new_tokens=10, sampling=GREEDY)
    generator = Generator(target, drafts=Drafts(model=short))
    assert generator.generate([prompt], max_new_tokens=10, sampling=GREEDY) == expected


def test_models_that_do_not_fit_are_refused(llama, t5):
    with pytest.raises(ValueError, match="a T5 cannot draft for a Llama"):
        Generator(load(llama[1]), start=START, drafts=Drafts(model=load(t5[1])))
    with pytest.raises(ValueError, match="num_tokens=0 of drafts must be at least 1"):
        Drafts(num_tokens=0)
    short = load(llama[1])
    short.config = dataclasses.replace(short.config, max_positions=32)
    generator = Generator(load(llama[1]), drafts=Drafts(model=short))
    with pytest.raises(ValueError, match="more than the draft model's 32 positions"):
        generator.generate([[5] * 20], max_new_tokens=13)


def searched(text: Sequence[int], num_tokens: int, max_ngram: int) -> list[int]:
    """Return the continuation of the longest and then latest match, by comparing slices."""
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                return [text[end + i % (len(text) - end)] for i in range(num_tokens)]
    return [text[-1]] * num_tokens


@given(
    texts=some.lists(
        some.lists(some.integers(0, 3), min_size=1, max_size=24), min_size=4, max_size=4
    ),
    max_ngram=some.integers(1, 4),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_text_is_searched_for_its_last_tokens(texts, max_ngram):
    text_BL = np.full((len(texts), 24), -1, np.int32)
    for row, text in zip(text_BL, texts, strict=True):
        row[: len(text)] = text
    lengths_B = jnp.array([len(text) for text in texts], jnp.int32)
    found = following(jnp.asarray(text_BL), lengths_B, num_tokens=5, max_ngram=max_ngram)
    assert found.tolist() == [searched(text, 5, max_ngram) for text in texts]
