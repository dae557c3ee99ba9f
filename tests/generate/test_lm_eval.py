"""Tasks of lm-eval have the same metrics as with its own backend for Hugging Face models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import yaml
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from data.text.tokenization.byte_tokenizer import ByteTokenizer
from generate.lm_eval import main

TASKS = ("choose", "perplexity", "continue", "search")
POSITIONS = 64


@pytest.fixture(scope="module", params=["plain", "bos", "own end"])
def directory(tmp_path_factory, request):
    """A Hugging Face model with a tokenizer of bytes, which may begin each text with a token.

    Or it ends texts with a token of its own, as tokenizers of chat models do.
    """
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = ByteTokenizer(has_special_tokens=True)
    config = hf.GPT2Config(
        vocab_size=tokenizer.vocab_size + (request.param == "own end"),
        n_positions=POSITIONS,
        n_layer=2,
        n_head=2,
        n_embd=32,
        eos_token_id=tokenizer.eos_id,
    )
    model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    model.save_pretrained(path)
    content = json.loads(tokenizer.content)
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    end = names[tokenizer.eos_id]
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    if request.param == "bos":
        first = {"id": end, "ids": [tokenizer.eos_id], "tokens": [end]}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": end, "type_id": 0}}, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {end: first},
        }
        values["bos_token"] = end
    if request.param == "own end":
        last = content["added_tokens"][-1]
        own = last | {"id": tokenizer.vocab_size, "content": "<|turn_end|>"}
        content["added_tokens"].append(own)
        values["eos_token"] = own["content"]
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Tasks with questions in a local file: choices, perplexity, continuations, and a search."""
    path = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)

    def word(length: int) -> str:
        return "".join(rng.choice([*"abcdefgh "], length))

    rows = [
        {
            "question": word(int(rng.integers(1, 40))),
            # The longest is longer than the model's positions, with its question.
            "choices": [word(int(rng.integers(1, 40))) for _ in range(4)],
            "answer": int(rng.integers(4)),
            "text": word(int(rng.integers(10, 3 * POSITIONS))),
        }
        for _ in range(24)
    ]
    file = path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
    }
    choose = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
    }
    perplexity = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
    }
    generate = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "c"], "max_gen_toks": 16},
        "metric_list": [{"metric": name} for name in ("bleu", "chrf")],
    }
    beams = {"until": ["\n"], "max_gen_toks": 9, "num_beams": 3, "length_penalty": 0.5}
    search = {**generate, "generation_kwargs": beams}
    for name, task in zip(TASKS, (choose, perplexity, generate, search), strict=True):
        content = yaml.safe_dump({"task": name, **common, **task})
        (path / f"{name}.yaml").write_text(content, encoding="utf-8")
    return path


def metrics(results: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in results: "task/metric" -> value."""
    return {
        f"{task}/{name}": value
        for task, values in results.items()
        for name, value in values.items()
        if isinstance(value, float)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [pytest.param("", marks=pytest.mark.slow), "data=2,model=2"])
def test_metrics_equal_those_of_the_hugging_face_backend(mesh, directory, tasks, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = [f"--model={directory}", f"--include_path={tasks}", f"--tasks={','.join(TASKS)}"]
    assert main([*options, f"--out={out}", f"--mesh={mesh}"]) == 0
    table = capsys.readouterr().out
    found = metrics(json.loads(out.read_text(encoding="utf-8"))["results"])

    settings: Any = {"pretrained": str(directory), "device": "cpu", "dtype": "float32"}
    model = HFLM(**settings)
    manager = TaskManager(include_path=str(tasks))
    theirs: Any = simple_evaluate(model=model, tasks=[*TASKS], task_manager=manager)
    expected = metrics(theirs["results"])
    assert {name.split("/")[0] for name in expected} == {*TASKS}
    stderrs = {name for name in expected if "stderr" in name}
    assert found.keys() == expected.keys()
    for name in expected.keys() - stderrs:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert name.split("/")[0] in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--tasks=chose"],
            "lm-eval has no task 'chose'; pass --include_path",
            marks=pytest.mark.thorough,  # lm-eval reads the names of all its tasks
        ),
        (["--tasks=choose", "--batch_size=0"], "batch_size=0 must be a positive multiple"),
        (["--tasks=choose", "--mesh=rows=2"], "'rows=2' is not one of pipeline, data"),
    ],
)
def test_unusable_options_end_in_one_sentence(options, message, directory, tasks, capsys):
    assert main([f"--model={directory}", f"--include_path={tasks}", *options]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error


def test_model_without_a_tokenizer_is_refused(directory, tasks, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(directory) / name).read_bytes())
    assert main([f"--model={tmp_path}", f"--include_path={tasks}", "--tasks=choose"]) == 2
    assert "has no tokenizer.json; put it beside the model" in capsys.readouterr().err
