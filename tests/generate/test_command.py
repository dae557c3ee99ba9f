"""The command `python -m generate`: models, prompts, output, errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import transformers as hf

from data.text.tokenization.byte_tokenizer import ByteTokenizer
from distributed.compilation_cache import VerifiedCache
from generate import Sampling, load_generator
from generate.__main__ import main
from tests.convert import hf_files
from tests.runs import TINY, arguments
from train import main as train

pytestmark = pytest.mark.drawn(3, among="thorough")

TOKENIZER = ByteTokenizer(has_special_tokens=True)
NEW = "--max_new_tokens=12"
GREEDY = "--temperature=0"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Hugging Face model with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=TOKENIZER.vocab_size, n_positions=64, n_layer=2, n_head=2, n_embd=32
    )
    save(hf.GPT2LMHeadModel(config), path)
    return path


def save(model: Any, path: Path) -> None:
    """Save a model with larger weights, whose continuations vary, and the tokenizer."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    model.generation_config.eos_token_id = TOKENIZER.eos_id
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(TOKENIZER.content, encoding="utf-8")


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_a_file_are_continued_as_in_transformers(directory, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def main("}\n\n{"tokens": [104, 105]}\n', encoding="utf-8")
    out = tmp_path / "out.jsonl"
    arguments = [f"--model={directory}", f"--prompts={prompts}", f"--out={out}", NEW, GREEDY]
    assert main(arguments) == 0
    found = lines(out.read_text(encoding="utf-8"))
    assert [line["prompt"] for line in found] == ["def main(", [104, 105]]
    model: Any = hf.GPT2LMHeadModel.from_pretrained(directory)
    for line, prompt in zip(found, (list(b"def main("), [104, 105]), strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False
        )
        assert line["tokens"] == expected[0, len(prompt) :].tolist()
        assert isinstance(line["text"], str)


def test_one_prompt_is_printed_with_its_continuation(directory, capsys, tmp_path):
    prompt = "--prompt=héllo"
    assert main([f"--model={directory}", prompt, NEW, GREEDY]) == 0
    printed, log = capsys.readouterr()
    assert main([f"--model={directory}", prompt, NEW, GREEDY, f"--out={tmp_path / 'out'}"]) == 0
    (line,) = lines((tmp_path / "out").read_text(encoding="utf-8"))
    assert printed == f"héllo{line['text']}\n"
    assert "12 tokens in" in log and "tokens/s" in log


@pytest.mark.thorough
def test_options_of_conversion_read_a_model_with_other_keys_and_files(directory, capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    hf_files.edit_config(other, new_feature="on", other=3)
    (other / "model.safetensors").unlink()
    weights = hf.GPT2LMHeadModel.from_pretrained(directory).state_dict()
    torch.save(weights, other / "pytorch_model.bin")
    arguments = [f"--model={other}", "--prompt=abc", NEW, GREEDY]
    for option in ("--harmless=new_feature", "--harmless=new_feature,other"):
        assert main(arguments) == 2
        assert capsys.readouterr().err.endswith(f"if it does not, set {option}\n")
        arguments = [*arguments, option]
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith("if you trust it, add --allow_pickle_weights\n")
    assert main([*arguments, "--allow_pickle_weights"]) == 0
    printed = capsys.readouterr().out
    assert main([f"--model={directory}", *arguments[1:4]]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.thorough
def test_a_second_start_loads_the_programs_of_the_first(
    directory, own_cache, monkeypatch, tmp_path, capsys
):
    printed = []
    compiled = []
    for _ in range(2):
        jax.clear_caches()
        assert main([f"--model={directory}", "--prompt=def", NEW, GREEDY]) == 0
        printed.append(capsys.readouterr().out)
        assert list((tmp_path / "taibai" / "xla").glob("*.program"))
        monkeypatch.setattr(VerifiedCache, "put", lambda _, key, program: compiled.append(key))
    assert printed[0] == printed[1] and compiled == []


@pytest.mark.thorough
def test_texts_are_continued_in_python_as_by_the_command(directory, tmp_path):
    texts = ["def main(", "héllo"]
    options = [*(f"--prompt={text}" for text in texts), "--num_samples=2", "--top_k=20", "--seed=5"]
    assert main([f"--model={directory}", NEW, *options, f"--out={tmp_path / 'out'}"]) == 0
    expected = [line["text"] for line in lines((tmp_path / "out").read_text(encoding="utf-8"))]
    generator = load_generator(directory)
    sampling = Sampling(top_k=20, seed=5)
    found = generator.generate_texts(texts, max_new_tokens=12, sampling=sampling, num_samples=2)
    assert found == expected and len({*found}) == 4


def test_texts_need_a_tokenizer(directory, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    generator = load_generator(tmp_path)
    assert len(generator.generate([[1, 2]], max_new_tokens=3)[0]) == 3
    with pytest.raises(ValueError, match="has no tokenizer; load it with load_generator"):
        generator.generate_texts(["a"], max_new_tokens=3)
    for dtype, message in (("float33", "must be one of float32"), ("float64", "jax_enable_x64")):
        with pytest.raises(ValueError, match=message):
            load_generator(directory, dtype=dtype)


@pytest.mark.thorough
def test_a_t5_answers_a_prompt(capsys, tmp_path):
    start = 7
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 32}
    sizes |= {"vocab_size": TOKENIZER.vocab_size, "decoder_start_token_id": start}
    torch.manual_seed(0)
    config = hf.T5Config(pad_token_id=0, **sizes)
    save(hf.T5ForConditionalGeneration(config), tmp_path)
    arguments = [f"--model={tmp_path}", "--prompt=héllo", NEW, GREEDY]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert main([*arguments, f"--out={tmp_path / 'out'}"]) == 0
    (line,) = lines((tmp_path / "out").read_text(encoding="utf-8"))
    assert printed == f"{line['text']}\n"
    model: Any = hf.T5ForConditionalGeneration.from_pretrained(tmp_path)
    expected = model.generate(
        torch.tensor([list("héllo".encode())]), max_new_tokens=12, do_sample=False
    )
    assert line["tokens"] == expected[0, 1:].tolist()
    assert expected[0, 0] == start


@pytest.mark.thorough
def test_samples_are_as_many_as_asked_for_and_the_same_on_a_mesh(directory, capsys):
    options = [f"--model={directory}", "--prompt=a", "--prompt=bc", "--num_samples=3", NEW]
    assert main([*options, "--seed=1"]) == 0
    alone = lines(capsys.readouterr().out)
    assert [line["prompt"] for line in alone] == ["a"] * 3 + ["bc"] * 3
    assert len({tuple(line["tokens"]) for line in alone}) == 6
    for mesh in (["data=2,model=2"], ["data=2,model=4", "--tensor_mode=2d_stationary"]):
        assert main([*options, "--seed=1", f"--mesh={mesh[0]}", *mesh[1:]]) == 0
        assert lines(capsys.readouterr().out) == alone


@pytest.mark.thorough
def test_a_run_continues_prompts_with_its_own_tokenizer(tmp_path, corpus_overrides, capsys):
    workdir = tmp_path / "run"
    assert train.main(arguments(workdir, (*TINY, *corpus_overrides, "train.num_steps=2"))) == 0
    capsys.readouterr()
    assert main([f"--model={workdir}", "--prompt=def", "--prompt=x", NEW, GREEDY]) == 0
    found = lines(capsys.readouterr().out)
    assert [line["prompt"] for line in found] == ["def", "x"]
    assert all(line["tokens"] for line in found)


@pytest.mark.thorough
def test_beams_are_searched(directory, capsys):
    arguments = [f"--model={directory}", "--prompt=ab", NEW, "--num_beams=3"]
    assert main([*arguments, "--length_penalty=2", "--early_stopping=never"]) == 0
    (line,) = lines(capsys.readouterr().out)
    model: Any = hf.GPT2LMHeadModel.from_pretrained(directory)
    tokens = torch.tensor([list(b"ab")])
    expected = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=12,
        do_sample=False,
        num_beams=3,
        length_penalty=2.0,
        early_stopping="never",
    )
    assert line["tokens"] == expected[0, 2:].tolist()


def test_a_path_that_does_not_exist_is_named(tmp_path, capsys):
    assert main([f"--model={tmp_path}/nowhere", "--prompt=a"]) == 2
    assert f"{tmp_path}/nowhere does not exist; correct the path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--prompt=a", "--num_beams=2", "--top_k=3"],
            "--num_beams=2 searches for the most likely",
        ),
        (["--prompt=a", "--num_beams=0"], "num_beams=0 must be at least 1"),
        ([], "give either --prompt or --prompts=FILE"),
        (["--prompt=a", "--out=nowhere/a.jsonl"], "--out=nowhere/a.jsonl: the directory nowhere"),
        (["--prompt=a", "--out=/"], "--out=/ is a directory; add the name of a file"),
        (["--prompt="], "has no tokens"),
        (["--prompt=a", "--mesh=rows=2"], "'rows=2' is not one of pipeline, data"),
        (["--prompt=a", "--mesh=model=2", "--tensor_mode=2d"], "mesh.model=2 must be a square"),
        (["--prompt=a", "--mesh=data=3", "--batch_size=4"], "batch_size=4 must be a positive"),
        (["--prompt=a", "--banned=x"], "--banned=x must be ids"),
        (["--prompt=a", "--top_p=2"], "top_p=2.0 must be in"),
        (["--prompt=a", "--draft_model=other"], "also needs --num_drafts, such as"),
        (["--prompt=a", "--num_drafts=2", "--num_beams=2"], "a beam search has no drafts"),
        (["--prompt=a", "--num_drafts=0"], "--num_drafts=0 must be at least 1, or left out"),
        (["--prompt=a", "--length_penalty=2"], "are about beams; add --num_beams"),
        (["--prompt=a", "--max_new_tokens=64"], "more than the model's 64 positions"),
    ],
)
def test_unusable_options_end_in_one_sentence(options, message, directory, capsys):
    assert main([f"--model={directory}", *options]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:1 is not valid JSON"),
        ("[]", "prompts.jsonl:1 must contain a JSON object"),
        ('{"text": "a"}', "prompts.jsonl:1 has the keys"),
        ('{"prompt": 3}', "prompts.jsonl:1: prompt is 3, but"),
        ('{"tokens": ["a"]}', "prompts.jsonl:1: tokens is"),
        ("", "has no prompts"),
        ('{"tokens": [-1]}', "error: prompt 0 has the token id -1"),
        ('{"tokens": [10000000000000000000000]}', "error: prompt 0 has the token id 1000000"),
    ],
)
def test_unusable_lines_are_named(line, message, directory, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line, encoding="utf-8")
    assert main([f"--model={directory}", f"--prompts={prompts}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_drafts_do_not_change_a_continuation(directory, capsys):
    arguments = [f"--model={directory}", "--prompt=def f(a):", NEW, "--seed=3"]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert "per pass" not in plain.err
    assert main([*arguments, "--num_drafts=3", f"--draft_model={directory}"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    # 11 tokens after the first, in passes of 4, 4 and 3
    assert "3.67 tokens of a row per pass" in drafted.err


def test_a_draft_model_with_other_tokens_is_refused(directory, tmp_path, capsys):
    config = hf.GPT2Config(vocab_size=TOKENIZER.vocab_size, n_layer=1, n_head=1, n_embd=8)
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    other = TOKENIZER.content.replace('"Ā"', '"ĀĀ"')
    assert other != TOKENIZER.content
    (tmp_path / "tokenizer.json").write_text(other, encoding="utf-8")
    arguments = [f"--model={directory}", "--prompt=a", "--num_drafts=3"]
    assert main([*arguments, f"--draft_model={tmp_path}"]) == 2
    assert "has another tokenizer than" in capsys.readouterr().err
