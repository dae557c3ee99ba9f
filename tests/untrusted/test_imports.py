"""Code that a received config.yaml names is not imported without the user's consent."""

import shutil
import sys

import pytest
import yaml

from convert import from_hf, to_hf
from convert.from_hf import load
from tests.convert import cases
from tests.runs import CONFIG, TINY
from train.main import main
from untrusted.imports import check_imports, is_import_path

PAYLOAD = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
from models.text.gpt2 import GPT2
def corpus():
    return {"train": ["a b c " * 200] * 8, "validation": ["a b c " * 200]}
"""


@pytest.fixture
def payload(tmp_path, monkeypatch):
    """A module that can be imported and leaves a file when it is; yields that file's path."""
    (tmp_path / "gift_payload.py").write_text(PAYLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "gift_payload.ran"
    sys.modules.pop("gift_payload", None)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A run: a converted GPT-2."""
    directory = tmp_path_factory.mktemp("converted")
    cases.save("gpt2", directory / "theirs")
    assert from_hf.main([str(directory / "theirs"), str(directory / "run")]) == 0
    return directory / "run"


@pytest.fixture
def received(converted, tmp_path, payload):
    """A copy of the run whose config.yaml names the payload as its model."""
    shutil.copytree(converted, tmp_path / "received")
    edit(tmp_path / "received" / "config.yaml", "model", name="gift_payload:GPT2")
    return tmp_path / "received"


def edit(file, section: str, **changes) -> None:
    config = yaml.safe_load(file.read_text())
    config[section] |= changes
    file.write_text(yaml.safe_dump(config))


def error_of(capsys) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_import_paths_are_recognized():
    assert is_import_path("package.module:function")
    assert is_import_path("module:Class.method")
    others = ("gpt2", "ag_news_subset:1.0.0", "text", "a.b", ":b", "a:", "C:\\data", "", None, 3)
    assert not any(map(is_import_path, others))


@pytest.mark.parametrize("allowed", [["gift"], ["gift.payload"], ["gift.payload:GPT2"]])
def test_a_package_a_module_and_a_path_can_be_allowed(allowed, tmp_path):
    tree = {"model": {"name": "gift.payload:GPT2"}, "data": {"paths": ["a", "b"]}}
    check_imports(tree, tmp_path, allowed)
    with pytest.raises(ValueError, match="would import the module gift.payload"):
        check_imports(tree, tmp_path, ["gif", "gift.pay", "payload"])


def test_exporting_a_received_run_imports_nothing(received, payload, tmp_path, capsys):
    assert to_hf.main([str(received), str(tmp_path / "out")]) == 2
    error = error_of(capsys)
    assert "config.yaml has model.name='gift_payload:GPT2', which would import" in error
    assert "--allow_import=gift_payload" in error
    with pytest.raises(ValueError, match="would import the module gift_payload"):
        load(received)
    assert not payload.exists()


def test_training_from_a_received_run_imports_nothing(
    received, payload, corpus_overrides, tmp_path, capsys
):
    overrides = [f"--config.{o}" for o in (*TINY, *corpus_overrides, f"init_from={received}")]
    workdir = f"--workdir={tmp_path / 'run'}"
    for mode in ("train", "eval"):
        assert main([f"--config={CONFIG}", workdir, f"--mode={mode}", *overrides]) == 2
        assert "would import the module gift_payload" in error_of(capsys)
    assert not payload.exists()


@pytest.mark.parametrize(
    "section, name",
    [("model", "name"), ("model", "loss"), ("data", "name"), ("optimizer", "name")],
)
def test_received_config_imports_nothing(section, name, payload, tmp_path, capsys):
    config = {"model": {"name": "gpt2"}, "data": {"name": "text"}, "optimizer": {"name": "adamw"}}
    config[section][name] = "gift_payload:GPT2"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    for mode in ("train", "eval"):
        arguments = [f"--config={file}", f"--workdir={tmp_path / 'run'}", f"--mode={mode}"]
        assert main(arguments) == 2
        assert f"{file} has {section}.{name}='gift_payload:GPT2', which" in error_of(capsys)
    assert not payload.exists()


def test_allowed_code_is_imported(received, payload, tmp_path):
    assert type(load(received, allow_import=["gift_payload"])).__name__ == "GPT2"
    assert payload.exists()


def test_code_that_the_command_line_names_is_imported(payload, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": {"name": "gpt2"}, "data": {"name": "gift_payload:x"}}))
    arguments = [f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    assert main([*arguments, "--config.data.name=gift_payload:corpus"]) == 2
    assert "would import" not in error_of(capsys)  # other keys are missing
