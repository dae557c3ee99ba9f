"""Configs that start from published weights have settings that such weights need."""

import importlib
import json
import logging

import pytest

from configs.chat_finetune import TASKS
from tests.hugging_face import save_model
from tests.runs import ROOT
from tests.train.test_main import run_main
from train.config.config_files import load
from train.config.inherit_config import take_init_from
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.reporting.metrics import read_metrics

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module", params=[300, 8192])
def llama(request, tmp_path_factory):
    """(directory, positions) of a chat model."""
    directory = tmp_path_factory.mktemp("llama")
    save_model(directory, "LlamaForCausalLM", max_position_embeddings=request.param, **SIZES)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory, request.param


def path_of(name: str) -> str:
    return str(ROOT / "configs" / name)


def loaded(name: str, *overrides: str):
    parsed = Overrides.of(overrides)
    config = load(path_of(name), parsed)
    take_init_from(config, parsed)
    return validate_config(config)


@pytest.mark.parametrize("task", TASKS)
def test_chat_starts_with_the_length_of_the_model_and_small_steps(llama, task):
    directory, positions = llama
    config = loaded(f"chat_finetune.py:{task}", f"init_from={directory}", "data.paths=chats.jsonl")
    assert config.data.sequence_length == min(positions, 4096)
    assert config.precision.compute == "bfloat16"
    assert (config.lora.rank is not None) == task.endswith("lora")
    assert config.optimizer.learning_rate == TASKS[task] <= 2e-4
    assert config.model.name == "llama"


@pytest.mark.thorough
@pytest.mark.parametrize("llama", [300], indirect=True)
def test_chat_learns_answers_that_are_longer_than_a_toy_allows(tmp_path, llama):
    chats = tmp_path / "chats.jsonl"
    lines = []
    for number in range(57):
        question = {"role": "user", "content": f"Count from {number}. " * 20}
        answer = {"role": "assistant", "content": "one two three"}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    chats.write_text("".join(lines))
    overrides = (f"init_from={llama[0]}", f"data.paths={chats}", "log.every_steps=1")
    config = path_of("chat_finetune.py:lora")
    assert run_main(tmp_path / "run", overrides, config=config) == 0
    losses = [e["loss"] for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in e]
    assert losses[-1] < losses[0]


def test_length_of_the_model_needs_a_model():
    with pytest.raises(ValueError, match=r"data\.sequence_length=0 stands for the length of the"):
        validate_config(load(path_of("gpt2.py"), ("data.sequence_length=0",)))


def test_unknown_task_is_refused_with_the_known_ones():
    for name in ("chat_finetune", "opt_finetune"):
        module = importlib.import_module(f"configs.{name}")
        with pytest.raises(
            ValueError, match=rf"configs/{name}\.py:all does not exist; choose full"
        ):
            module.get_config("all")


def test_settings_for_random_weights_are_named(llama, caplog):
    caplog.set_level(logging.WARNING)
    start = f"init_from={llama[0]}"
    loaded("opt_finetune.py", start)
    loaded("llama.py", start, "optimizer.learning_rate=0.002")
    assert not caplog.records
    loaded("llama.py", start)
    (record,) = caplog.records
    assert "optimizer.learning_rate=0.003 is for weights that start at random" in record.message
