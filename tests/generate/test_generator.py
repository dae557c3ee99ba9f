"""Continuations have the same tokens as in `transformers.generate`, on every mesh."""

import dataclasses
from typing import Any

import jax
import peft
import pytest
import torch
import transformers
from flax import nnx

from convert.from_hf import load
from generate.beam_search import Beams
from generate.generator import Generator
from generate.sampling import Sampling
from models.text.bert import Bert, BertConfig
from models.text.llama import Llama, LlamaConfig
from predict.program.memory import memory
from tests.generate.references import (
    GREEDY,
    NEW,
    SAMPLED,
    START,
    VOCAB,
    mesh_of,
    prompts,
    theirs,
)


@pytest.mark.drawn(2)
def test_greedy_continuations_equal_those_of_transformers(model):
    reference, directory = model
    expected = theirs(reference)
    assert len({token for tokens in expected for token in tokens}) > 10
    generator = Generator(load(directory), start=START)
    found = generator.generate(prompts(), max_new_tokens=NEW, sampling=GREEDY)
    assert found == expected


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_adapters_continue_prompts_as_in_peft(llama, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(llama[1])
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    adapted = peft.get_peft_model(base, settings).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.2 * torch.randn_like(weight))
    adapted.save_pretrained(str(tmp_path))
    base.generation_config = llama[0].generation_config
    expected = theirs(adapted)
    found = Generator(load(tmp_path)).generate(prompts(), max_new_tokens=NEW, sampling=GREEDY)
    assert found == expected
    assert found != Generator(load(llama[1])).generate(
        prompts(), max_new_tokens=NEW, sampling=GREEDY
    )


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4},
        {"model": 2},
        {"pipeline": 2, "data": 2, "model": 2},
        {"data": 3},
        {"context": 4},
        {"data": 2, "context": 2, "model": 2},
        {"hidden": 2, "model": 2},
        {"row": 2, "hidden": 2, "model": 2},
    ],
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


@pytest.mark.slow(only=["{'data': 4}", "{'model': 2}"])
@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes", [{"data": 4}, {"model": 2}, {"pipeline": 2, "data": 2, "model": 2}], ids=str
)
def test_a_t5_continues_the_same_on_every_mesh(sizes, t5):
    beams = Beams(num_beams=3)

    def continued() -> list[list[list[int]]]:
        generator = Generator(load(t5[1]), start=START, batch_size=4)
        samples = [
            generator.generate(prompts(), max_new_tokens=NEW, sampling=sampling)
            for sampling in (GREEDY, SAMPLED)
        ]
        return [*samples, generator.beam_search(prompts(), max_new_tokens=NEW, beams=beams)]

    alone = continued()
    with jax.set_mesh(mesh_of(sizes)):
        assert continued() == alone


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


@pytest.mark.parametrize("start", [None, VOCAB])
def test_a_decoder_without_a_start_token_is_refused(start, t5):
    with pytest.raises(ValueError, match=f"a start token, whose id must be in 0..210, not {start}"):
        Generator(load(t5[1]), start=start)


@pytest.mark.thorough
def test_cross_attention_is_not_computed_again(t5):
    # A decode step with longer prompts differs only by the attention to their cached keys.
    generator = Generator(load(t5[1]), start=START)

    def flops(length: int) -> float:
        state = generator._started({0: [5] * length}, NEW, GREEDY)
        step = generator._advance.lower(GREEDY, generator._params, NEW, state=state).compile()
        analysis = step.cost_analysis()
        assert analysis is not None
        return analysis["flops"]

    config = generator._config
    per_token = 4 * config.num_decoder_layers * config.num_heads * config.head_dim
    softmax = 10 * config.num_decoder_layers * config.num_heads
    assert flops(96) - flops(32) < 64 * (per_token + softmax)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_decoding_copies_no_cache(name, request):
    generator = Generator(load(request.getfixturevalue(name)[1]), start=START)
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
