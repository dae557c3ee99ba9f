"""Runs that start from nothing are exported with a tokenizer that transformers loads and uses."""

import jax
import numpy as np
import pytest
import torch
import transformers

from convert.from_hf import load as load_model
from convert.to_hf import convert as to_hf
from data.text.tokenization.file_tokenizer import load_tokenizer_file
from tests.runs import ROOT
from tests.train.test_main import run_main

#: Config, or variant of one -> the class of transformers that loads its export.
CLASSES = {
    "bert": transformers.AutoModelForPreTraining,
    "gpt2": transformers.AutoModelForCausalLM,
    "gpt2_3d": transformers.AutoModelForCausalLM,
    "llama": transformers.AutoModelForCausalLM,
    "modernbert": transformers.AutoModelForMaskedLM,
    "opt": transformers.AutoModelForCausalLM,
    "roberta": transformers.AutoModelForMaskedLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
}
#: Those whose rows begin with CLS and end with SEP.
_WITH_CLS = ("bert", "modernbert", "roberta")
UNTIED = "You should update the config with `tie_word_embeddings=False`"
TEXT = "def naïve(x):\n    return  '数据 🙂'"
SMALL = (
    "data.global_batch_size=8",
    "data.vocab_size=384",
    "train.num_steps=2",
    "optimizer.warmup_steps=1",
    "eval.num_batches=1",
    "data.validation_fraction=0.3",
)
#: Variant -> (config, overrides).
VARIANTS = {
    "modernbert": (
        "bert",
        ("model.name=modernbert", "model.head=masked_lm", "data.objective=masked_lm"),
    )
}
#: RoBERTa counts positions from the padding token, which is another one here.
ROBERTA_ON_BYTES = ("model.pad_id=257", "model.first_position=258")


@pytest.mark.slow(
    only=[
        "bert-bytes",
        "gpt2-bpe",
        "gpt2_3d-bpe",
        "llama-bytes",
        "modernbert-bpe",
        "opt-bpe",
        "roberta-bpe",
        "t5-bytes",
    ]
)
@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
@pytest.mark.parametrize("config", CLASSES)
def test_transformers_loads_and_uses_the_export(
    config, tokenizer, corpus_overrides, tmp_path, warnings
):
    overrides = (*corpus_overrides, *SMALL, "data.name=text", f"data.tokenizer={tokenizer}")
    overrides += ROBERTA_ON_BYTES if (config, tokenizer) == ("roberta", "bytes") else ()
    name, more = VARIANTS.get(config, (config, ()))
    overrides += more
    path = str(ROOT / "configs" / f"{name}.py")
    assert run_main(tmp_path / "run", overrides, config=path) == 0
    exported = tmp_path / "hugging_face"
    to_hf(tmp_path / "run", exported)

    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = load_tokenizer_file(str(tmp_path / "run" / "hf" / "tokenizer.json"))
    (text_ids,) = ours.encode_batch([TEXT])
    plain = theirs(TEXT, add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(plain, text_ids)
    assert theirs.decode(plain) == TEXT
    assert theirs.pad_token_id == ours.special_ids.get("pad", ours.eos_id)
    whole = theirs(TEXT)["input_ids"]
    assert whole == [*before(config, ours), *plain, *after(config, ours)]

    model = CLASSES[config].from_pretrained(exported).eval()
    assert len(theirs) <= model.config.vocab_size
    inputs = theirs([TEXT[:12], "a"], padding=True, return_tensors="pt")
    if model.can_generate():
        more = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert more.max() < model.config.vocab_size
        assert model.generation_config.eos_token_id == ours.eos_id
    else:
        assert theirs.mask_token_id == ours.special_ids["mask"]
        with torch.no_grad():
            logits = model(**inputs)[0].numpy()
        mask = np.asarray(inputs["attention_mask"])
        expected = load_model(tmp_path / "run")(
            jax.numpy.asarray(inputs["input_ids"]), attention_mask=jax.numpy.asarray(mask)
        )
        expected = expected["masked_lm"] if isinstance(expected, dict) else expected
        np.testing.assert_allclose(np.asarray(expected)[mask > 0], logits[mask > 0], atol=1e-5)
    # For T5, transformers says that config.json should have tie_word_embeddings=False. It has, but
    # T5Config replaces the value by True.
    assert [each for each in warnings() if config != "t5" or UNTIED not in each] == []


def before(config, tokenizer) -> list[int]:
    """Return the special tokens before a text, as in the rows of the training objective."""
    return [tokenizer.special_ids["cls"]] if config in _WITH_CLS else []


def after(config, tokenizer) -> list[int]:
    """Return the special tokens after a text."""
    if config == "t5":
        return [tokenizer.eos_id]
    return [tokenizer.special_ids["sep"]] if config in _WITH_CLS else []
