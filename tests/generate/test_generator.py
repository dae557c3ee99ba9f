"""Continuations equal those of `transformers.generate`, on every mesh."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from flax import nnx
from jax.sharding import AxisType

from convert.from_hf import load
from generate.beam_search import Beams
from generate.generator import Generator
from generate.sampling import Sampling
from models.text.bert import Bert, BertConfig
from models.text.llama import Llama, LlamaConfig
from sharding.analysis.memory import memory
from sharding.mesh import AXES

VOCAB = 211
#: Lengths of the prompts; the window of the Mistral is shorter than most of them.
LENGTHS = (3, 20, 7, 12, 1, 33, 16, 9)
NEW = 64
PAD = 1

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_size": 36,
    "intermediate_size": 44,
}
_MODELS: dict[str, Any] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCAB, n_positions=128, n_layer=3, n_head=4, n_embd=40)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCAB,
            max_position_embeddings=128,
            num_hidden_layers=3,
            num_attention_heads=3,
            hidden_size=39,
            word_embed_proj_dim=39,
            ffn_dim=50,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=10)),
}


def saved(name: str, directory: Path) -> Any:
    """Save a random model whose continuations have many different tokens; return it."""
    torch.manual_seed(0)
    model = _MODELS[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    model.save_pretrained(directory)
    model.generation_config = hf.GenerationConfig(pad_token_id=PAD)
    return model


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def theirs(model: Any, stop: int | None = None, **options: Any) -> list[list[int]]:
    """Return the continuations of transformers, without random choices.

    Its prompts are padded on the left.
    """
    width = max(LENGTHS)
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts()]
    masks = [[0] * (width - length) + [1] * length for length in LENGTHS]
    found = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(masks),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=stop,
        **options,
    )
    continuations = found[:, width:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in continuations]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in ("gpt2", "mistral") else [pytest.mark.thorough])
        for name in _MODELS
    ],
)
def model(request, tmp_path_factory):
    """A model of transformers, and the directory that it is saved in."""
    directory = tmp_path_factory.mktemp(request.param)
    return saved(request.param, directory), directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model of transformers, and the directory that it is saved in."""
    directory = tmp_path_factory.mktemp("llama")
    return saved("llama", directory), directory


@pytest.fixture(scope="module")
def greedy(llama):
    """The greedy continuations of the LLaMA in transformers."""
    return theirs(llama[0])


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    axes = {axis: sizes.get(axis, 1) for axis in AXES}
    mesh_axes = [*axes.values()], [*axes]
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    return jax.make_mesh(*mesh_axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)


GREEDY = Sampling(temperature=0.0)


def test_greedy_continuations_equal_those_of_transformers(model):
    reference, directory = model
    expected = theirs(reference)
    assert len({token for tokens in expected for token in tokens}) > 10
    found = Generator(load(directory)).generate(prompts(), max_new_tokens=NEW, sampling=GREEDY)
    assert found == expected


def test_stop_tokens_end_a_continuation(llama, greedy):
    reference, directory = llama
    stop = greedy[1][5]
    expected = theirs(reference, stop)
    assert 0 < min(map(len, expected)) < NEW == max(map(len, expected))
    generator = Generator(load(directory), stop=[stop], batch_size=4)
    assert generator.generate(prompts(), max_new_tokens=NEW, sampling=GREEDY) == expected


def test_repetition_penalty_and_banned_tokens_are_those_of_transformers(llama, greedy):
    reference, directory = llama
    banned = tuple({tokens[0] for tokens in greedy})
    options = {"repetition_penalty": 1.3, "bad_words_ids": [[token] for token in banned]}
    expected = theirs(reference, **options)
    sampling = dataclasses.replace(GREEDY, repetition_penalty=1.3, banned=banned)
    found = Generator(load(directory)).generate(prompts(), max_new_tokens=NEW, sampling=sampling)
    assert found == expected


SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=3)


def test_samples_do_not_depend_on_the_other_rows(llama):
    model = load(llama[1])
    together = Generator(model).generate(
        prompts(), max_new_tokens=16, sampling=SAMPLED, num_samples=2
    )
    pairs = Generator(model, batch_size=2).generate(
        prompts(), max_new_tokens=16, sampling=SAMPLED, num_samples=2
    )
    assert together == pairs
    assert together[0::2] != together[1::2]  # two samples of each prompt
    other = dataclasses.replace(SAMPLED, seed=4)
    generator = Generator(model)
    assert generator.generate(prompts(), max_new_tokens=16, sampling=other) != together[::2]


@pytest.mark.parametrize(
    "sizes",
    [{"data": 4}, {"model": 2}, {"pipeline": 2, "data": 2, "model": 2}, {"data": 3}],
    ids=str,
)
def test_continuations_are_the_same_on_every_mesh(sizes, llama):
    def continued() -> list[list[list[int]]]:
        generator = Generator(load(llama[1]), batch_size=12)
        return [
            generator.generate(prompts(), max_new_tokens=NEW, sampling=sampling)
            for sampling in (GREEDY, SAMPLED)
        ]

    alone = continued()
    with jax.set_mesh(mesh_of(sizes)):
        assert continued() == alone


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
def test_beams_of_every_family_equal_those_of_transformers(model):
    reference, directory = model
    stop = a_stop_token(theirs(reference))
    beams = Beams(num_beams=4)
    generator = Generator(load(directory), stop=[stop])
    expected = expected_beams(reference, beams, stop)
    assert generator.beam_search(prompts(), max_new_tokens=NEW, beams=beams) == expected


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
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping='soon' must be True, False"),
    ],
)
def test_unusable_beams_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Beams(**values)


def test_models_that_cannot_generate_are_refused():
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_positions": 8, "num_layers": 1}
    sizes |= {"num_heads": 1, "embed_dim": 4, "mlp_dim": 4}
    bert = BertConfig(**sizes, head="masked_lm")
    with pytest.raises(ValueError, match="Bert cannot generate text"):
        Generator(Bert(bert, rngs=nnx.Rngs(0)))
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0],
        "long_factor": [2.0],
        "original_max_position_embeddings": 4,
    }
    config = LlamaConfig(**sizes, num_kv_heads=1, head_dim=2, rope_scaling=scaling)
    with pytest.raises(ValueError, match="rope_type='longrope', the frequencies depend"):
        Generator(Llama(config, rngs=nnx.Rngs(0)))


def test_decoding_copies_no_cache(llama):
    generator = Generator(load(llama[1]))
    rows = dict(enumerate(prompts()))
    state = generator._started(rows, NEW, GREEDY)
    (cache, *_) = state.caches
    step = generator._advance.lower(GREEDY, generator._params, NEW, state=state).compile()
    temporary = memory(step).temp_bytes
    assert temporary is not None and temporary < cache.k_BKSH.nbytes


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt 1 is empty"),
        ([3, VOCAB], {}, f"prompt 1 has the token id {VOCAB}, but the model's ids are 0 to 210"),
        ([3, -1], {}, "prompt 1 has the token id -1"),
        ([2**40], {}, "prompt 1 has the token id 1099511627776"),
        ([5] * 100, {}, "prompt 1 has 100 tokens; .* more than the model's 128 positions"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([5], {"num_samples": 0}, "num_samples=0 must be at least 1"),
        ([5], {"sampling": Sampling(banned=(VOCAB,))}, f"banned={VOCAB} must be in"),
    ],
)
def test_unusable_requests_are_refused(prompt, options, message, llama):
    generator = Generator(load(llama[1]))
    with pytest.raises(ValueError, match=message):
        generator.generate([[5], prompt], **{"max_new_tokens": NEW} | options)
