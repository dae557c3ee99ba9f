"""Tasks of lm-eval have the same metrics as with its own backend for Hugging Face models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import yaml
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from convert.from_hf import load_model
from convert.source import read_source
from data.text.tokenization.byte_tokenizer import ByteTokenizer
from data.text.tokenization.file_tokenizer import load_tokenizer_file
from generate.evaluation.task_model import TaskModel
from generate.lm_eval import main
from generate.prompts import stop_tokens_of
from tests.convert import hf_files

TASKS = ("choose", "perplexity", "continue", "search")
POSITIONS = 64


@pytest.fixture(scope="module", params=["plain", "bos", "own end"])
def directory(tmp_path_factory, request):
    """A Hugging Face model with a tokenizer of bytes, of one of the kinds of `save_model`."""
    return save_model(tmp_path_factory.mktemp("model"), request.param)


def save_model(path: Path, kind: str) -> Path:
    """Save a Hugging Face model with a tokenizer of bytes; return its path.

    Args:
        path: where to save it.
        kind: "plain"; "bos", whose texts begin with a token; or "own end", whose texts end with a
            token of their own, as those of chat models do.
    """
    torch.manual_seed(0)
    tokenizer = ByteTokenizer(has_special_tokens=True)
    config = hf.GPT2Config(
        vocab_size=tokenizer.vocab_size + (kind == "own end"),
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
    if kind == "bos":
        first = {"id": end, "ids": [tokenizer.eos_id], "tokens": [end]}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": end, "type_id": 0}}, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {end: first},
        }
        values["bos_token"] = end
    if kind == "own end":
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
@pytest.mark.drawn(1)
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


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    """Return requests of lm-eval with these arguments."""
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]  # type: ignore


@dataclasses.dataclass
class Backends:
    """A model in our backend and in lm-eval's own, with the same generation settings."""

    ours: TaskModel
    theirs: Any
    generation: dict[str, Any]

    def set_generation(self, **values: Any) -> None:
        """Set what generation_config.json says, apart from special tokens."""
        self.generation.clear()
        self.generation.update(values)
        original = self.theirs.model.generation_config
        ids = {"eos_token_id": original.eos_token_id, "pad_token_id": original.pad_token_id}
        self.theirs.model.generation_config = hf.GenerationConfig(**ids, **values)


@pytest.fixture(scope="module")
def backends(directory):
    source = read_source(directory)
    tokenizer = load_tokenizer_file(str(directory))
    generation: dict[str, Any] = {}
    ours = TaskModel(
        load_model(source),
        tokenizer,
        stop=stop_tokens_of(source, tokenizer),
        batch_size=4,
        generation=generation,
    )
    settings: Any = {"pretrained": str(directory), "device": "cpu", "dtype": "float32"}
    return Backends(ours, HFLM(**settings), generation)


@pytest.mark.drawn(1)
def test_log_probabilities_equal_those_of_the_hugging_face_backend(backends):
    pairs = [
        ("abc", " de"),
        ("abc  ", "de"),  # spaces that belong to the continuation
        ("", "abc"),
        ("", "<|endoftext|>abc"),  # may begin with the token that an empty context consists of
        ("<|endoftext|>ab", "c"),
        ("a" * 100, "bcd"),
        ("ab", "c" * POSITIONS),
    ]
    found = backends.ours.loglikelihood(requests("loglikelihood", *pairs))
    # One at a time: its cache of contexts confuses pairs with the same tokens.
    expected = [
        backends.theirs.loglikelihood(requests("loglikelihood", pair), disable_tqdm=True)[0]
        for pair in pairs
    ]
    # float32 sums in another order
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-4)
    assert [x for _, x in found] == [x for _, x in expected]

    texts = [("abc",), ("",), ("abcdefg " * 30,), ("<|endoftext|>abc",)]
    rolling = requests("loglikelihood_rolling", *texts)
    found = backends.ours.loglikelihood_rolling(rolling)
    expected = backends.theirs.loglikelihood_rolling(rolling, disable_tqdm=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.drawn(1)
def test_empty_continuation_has_the_log_probability_of_the_hugging_face_backend(backends):
    # Its own backend scores one only if a continuation of one token has the same context.
    pairs = requests("loglikelihood", ("ab", "c"), ("ab", ""))
    found = backends.ours.loglikelihood(pairs)
    expected = backends.theirs.loglikelihood(pairs, disable_tqdm=True)
    assert found[1] == expected[1] == (0.0, True)
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-4)


@pytest.mark.parametrize(
    "context, continuation, message",
    [
        ("ab", "c" * (POSITIONS + 1), "'ccc.* has 65 tokens, but the model has 64 positions"),
        ("  ", "c", "the context of the continuation 'c' has no tokens"),
        ("", "", "the context and the continuation of the continuation '' has no tokens"),
    ],
)
@pytest.mark.parametrize("directory", ["plain"], indirect=True)
def test_requests_that_the_hugging_face_backend_fails_for_are_refused(
    context, continuation, message, backends
):
    request = requests("loglikelihood", (context, continuation))
    with pytest.raises((AssertionError, IndexError)):
        backends.theirs.loglikelihood(request, disable_tqdm=True)
    with pytest.raises(ValueError, match=message):
        backends.ours.loglikelihood(request)


def assert_equal_texts(backends, **options):
    contexts = ["abc", "<|endoftext|>ab", "abcdefgh " * 12, "d"]
    options = {"until": ["\n"], "max_gen_toks": 12, **options}
    asked = requests("generate_until", *((context, options) for context in contexts))
    found = backends.ours.generate_until(asked)
    assert found == backends.theirs.generate_until(asked, disable_tqdm=True)
    return found


@pytest.mark.drawn(1)
def test_texts_equal_those_of_the_hugging_face_backend(backends):
    backends.set_generation()
    assert_equal_texts(backends, until=["q"], max_gen_toks=40)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stop, penalty", [("[CLS]", 1.0), ("[SEP]", 30.0)])
@pytest.mark.parametrize("directory", ["plain"], indirect=True)
def test_special_tokens_stop_texts_as_in_the_hugging_face_backend(stop, penalty, backends):
    # It chooses among two letters and four special tokens, which texts do not show.
    others = set(range(361)) - {97, 98, 258, 259, 359, 360}
    backends.set_generation(suppress_tokens=[*others], repetition_penalty=penalty)
    stopped = assert_equal_texts(backends, until=[stop], max_gen_toks=30)
    assert stopped != assert_equal_texts(backends, until=[], max_gen_toks=30)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "generation, options",
    [
        ({"repetition_penalty": 1.7}, {}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.2}),
        ({"suppress_tokens": [46, 56]}, {}),  # which it would choose
        ({"num_beams": 3, "length_penalty": 0.3}, {}),
        ({"max_new_tokens": 5, "temperature": 0.3, "do_sample": True, "top_k": 2}, {}),
    ],
)
@pytest.mark.parametrize("directory", ["plain"], indirect=True)
def test_generation_settings_apply_as_in_the_hugging_face_backend(generation, options, backends):
    backends.set_generation(**generation)
    assert_equal_texts(backends, **options)


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
    hf_files.edit_config(tmp_path, new_feature="on")
    arguments = [f"--model={tmp_path}", f"--include_path={tasks}", "--tasks=choose"]
    assert main(arguments) == 2
    assert "if it does not, set --harmless=new_feature" in capsys.readouterr().err
    assert main([*arguments, "--harmless=new_feature"]) == 2
    assert "has no tokenizer.json; put it beside the model" in capsys.readouterr().err
