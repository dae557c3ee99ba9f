"""URLs in the place of paths end every command before it writes anything."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.runs import ROOT, TINY, arguments
from tests.test_imports import MAY_IMPORT
from tests.train.refusals import refusal
from train.lifecycle.exit_codes import REFUSED
from train.main import main

URL = "az://bucket/run"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """An empty working directory, in which a command that ignores the scheme writes `az:`."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    yield tmp_path / "empty"
    assert not [*(tmp_path / "empty").iterdir()]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_workdir_that_is_a_url_is_refused(mode, corpus_overrides, capsys):
    flags = arguments(Path(), (*TINY, *corpus_overrides))
    assert main([*flags, f"--workdir={URL}", f"--mode={mode}"]) == REFUSED
    assert f"error: --workdir='{URL}' is a URL" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["config", "deepspeed"])
def test_file_that_is_a_url_is_refused(option, capsys):
    others = {"config": str(ROOT / "configs" / "gpt2.py")} | {option: URL}
    flags = [f"--{name}={value}" for name, value in others.items()]
    assert main([*flags, "--workdir=run"]) == REFUSED
    assert f"error: --{option}='{URL}' is a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key", ["init_from", "data.tokenizer", "data.cache_dir", "pipeline.schedule"]
)
def test_config_key_that_is_a_url_is_refused_by_name(key, corpus_overrides, tmp_path, capsys):
    error = refusal(tmp_path / "run", (*TINY, *corpus_overrides, f"{key}={URL}"), capsys)
    assert f"{key}=" in error and "URL" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "TFDS_DATA_DIR"])
def test_cache_that_is_a_url_is_refused_by_name(variable, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(variable, URL)
    cache = () if variable == "XDG_CACHE_HOME" else (f"data.cache_dir={tmp_path}/cache",)
    error = refusal(tmp_path / "run", (*TINY, "data.name=wiki40b/en", *cache), capsys)
    assert f"the environment variable {variable}=" in error and "is a URL" in error


def test_source_of_a_mixture_that_is_a_url_is_refused(tmp_path, capsys):
    overrides = (*TINY, "data.name=mixture", "data.mixture=1 hf://datasets/me/texts/a.jsonl")
    error = refusal(tmp_path / "run", overrides, capsys)
    assert "data.mixture" in error and "hf download --repo-type=dataset me/texts" in error


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("convert.from_hf", ["model", URL]),
        ("convert.to_hf", [URL, "out"]),
        ("checkpoint.__main__", ["verify", URL]),
        ("data.megatron", ["show", URL]),
        ("generate.__main__", [f"--model={URL}", "--prompt=a"]),
        ("train.goodput", [URL]),
        ("train.plan", [f"--out={URL}"]),
        ("pipeline.schedule", [f"--csv={URL}"]),
    ],
)
def test_argument_that_is_a_url_is_refused(module, flags, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(flags)
    assert ended.value.code == REFUSED
    assert f"'{URL}' is a URL" in capsys.readouterr().err


def test_no_command_declares_a_path_without_this_check():
    found = []
    for file in (file for folder in MAY_IMPORT for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                kinds = [ast.unparse(word.value) for word in node.keywords if word.arg == "type"]
                if "Path" in kinds:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == [], "use type=local_path of fields/paths.py"
