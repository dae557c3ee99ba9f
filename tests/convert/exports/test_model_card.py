"""Exports of runs have a card with data, config, evaluation and the curve of the loss."""

import json

import huggingface_hub
import pytest
import yaml

from convert import from_hf, to_hf
from generate.evaluation.following import follow
from tests.hugging_face import save_model
from tests.runs import TINY, arguments, write_corpus
from train.main import main

_FEW = ("train.num_steps=4", "checkpoint.every_steps=2", "eval.every_steps=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a short run with adapters."""
    directory = tmp_path_factory.mktemp("run")
    overrides = (*TINY, *write_corpus(directory), *_FEW, "lora.rank=2")
    assert main(arguments(directory / "run", overrides)) == 0
    return directory / "run"


@pytest.mark.thorough
def test_card_describes_the_run(run, tmp_path):
    to_hf.convert(run, tmp_path / "model", merge=True)
    card = huggingface_hub.ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.to_dict()["library_name"] == "transformers"
    text = card.text
    assert "# GPT2LMHeadModel" in text and "trained with Taibai for 4 steps" in text
    assert "| sequence_length | 16 |" in text
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [entry for entry in logged if "eval_loss" in entry][-1]
    assert last["step"] == 4 and f"| loss | {last['eval_loss']:.6g} |" in text
    assert f"| perplexity | {last['eval_perplexity']:.6g} |" in text
    shown = text.partition("```yaml\n")[2].partition("\n```")[0]
    assert yaml.safe_load(shown)["lora"]["rank"] == 2
    assert (tmp_path / "model" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_card_has_other_evaluations_of_the_same_checkpoint(run, tmp_path):
    settings = {"tasks": "my_task"}
    follow(run, "lm_eval", settings, lambda step: {"my_task/acc": int(step.name) / 8})
    try:
        to_hf.convert(run / "checkpoints" / "2", tmp_path / "adapter")
    finally:
        (run / "lm_eval.jsonl").unlink()
    text = huggingface_hub.ModelCard.load(tmp_path / "adapter" / "README.md").text
    assert "After step 2, by `generate.lm_eval --tasks=my_task`:" in text
    assert "| my_task/acc | 0.25 |" in text and "0.5 |" not in text


@pytest.mark.thorough
def test_card_of_an_earlier_checkpoint_ends_there(run, tmp_path):
    to_hf.convert(run / "checkpoints" / "2", tmp_path / "adapter")
    card = huggingface_hub.ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.to_dict()["library_name"] == "peft"
    assert "Adapters (rank 2) of a `gpt2`" in card.text
    assert "After step 2, on the validation split" in card.text


def test_converted_model_has_no_card(tmp_path):
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16}
    save_model(tmp_path / "model", "GPT2LMHeadModel", **settings)
    from_hf.convert(tmp_path / "model", tmp_path / "run")
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back" / "README.md").exists()
