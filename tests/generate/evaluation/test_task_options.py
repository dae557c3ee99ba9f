"""Settings of generation that tasks of lm-eval and generation_config.json name."""

import pytest

from generate.evaluation.task_options import applied_settings, task_options
from generate.sampling import Sampling


@pytest.mark.parametrize(
    "generation, options, message",
    [
        ({"no_repeat_ngram_size": 2}, {}, r"generation_config\.json has .*no_repeat_ngram_size"),
        ({"typical_p": 0.5}, {"temperature": 0.5}, r"generation_config\.json has .*typical_p"),
        ({"repetition_penalty": "much"}, {}, "repetition_penalty is 'much', but must be"),
        ({"num_beams": 2, "repetition_penalty": 1.2}, {}, "num_beams=2 with do_sample"),
        ({}, {"do_sample": True}, "have do_sample without a temperature"),
        ({}, {"best_of": 2}, r"generation_kwargs have \['best_of'\]"),
    ],
)
def test_generation_settings_that_are_not_supported_are_refused(generation, options, message):
    with pytest.raises(ValueError, match=message):
        task_options(options, generation)


def test_generation_settings_have_the_defaults_of_transformers():
    harmless = {"no_repeat_ngram_size": 0, "typical_p": 0.5, "bad_words_ids": None, "unknown": 1}
    found = task_options({"temperature": 0.5}, {"top_p": 0.8})
    assert found.search == Sampling(temperature=0.5, top_k=50, top_p=0.8)
    found = task_options({"max_gen_toks": 3}, harmless | {"top_p": 0.8, "max_new_tokens": 9})
    assert found.search == Sampling(temperature=0.0)
    assert (found.num_reserved, found.max_new_tokens) == (3, 9)
    assert applied_settings(harmless | {"top_p": 0.8, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1
    }
