"""Code that a received config.yaml names is not imported without the user's consent."""

import json
import shutil
import sys
from typing import Any

import pytest
import yaml

from convert import from_hf, to_hf
from convert.from_hf import load
from data.config import DataConfig
from data.text.text_corpus import load_text
from data.tfds_sets import open_builder
from tests.convert import cases
from tests.runs import CONFIG, TINY
from train.config.config_files import load as load_config
from train.main import main
from untrusted.imports import (
    allow_imports,
    allow_imports_in,
    check_imports,
    import_object,
    is_import_path,
    record_received,
)

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
    record_received(tree, tmp_path)
    allow_imports(["gif", "gift.pay", "payload", "gift.payload:GPT"])
    with pytest.raises(ValueError, match="would import the module gift.payload"):
        check_imports(tree)
    allow_imports(allowed)
    check_imports(tree)


def test_import_is_refused_however_a_received_value_becomes_its_path(payload, tmp_path):
    record_received({"a": {"b": [{"c": "0.5  gift_payload:corpus"}]}}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"file has a\.b\.c='0\.5  gift_payload:corpus', which"):
        import_object("gift_payload:corpus", "data.name")
    assert not payload.exists()
    record_received({"x": {"gift_payload:key": {"gift_payload:element"}}}, tmp_path / "file")
    for path in ("gift_payload:key", "gift_payload:element"):
        with pytest.raises(ValueError, match="would import"):
            import_object(path, "data.name")
    allow_imports_in("(1 text, '2 gift_payload:corpus')")
    assert callable(import_object("gift_payload:corpus", "data.name"))


@pytest.mark.parametrize(
    "text",
    ["my_own:loss", "my.own:loss", "1 my.own:loss", "own:loss_2", "own:lossy.part", "own.x:l"],
)
def test_received_path_does_not_refuse_paths_that_are_only_a_part_of_its_text(text, tmp_path):
    record_received({"model": {"loss": text}}, tmp_path / "file")
    check_imports({"model": {"loss": "own:loss"}})
    with pytest.raises(ValueError, match="would import"):
        check_imports({"model": {"loss": text}})


@pytest.mark.parametrize(
    "text",
    [
        "own:loss",
        "0.5 own:loss",
        "(own:loss)",
        "x=own:loss;",
        "a:own:loss",
        "own:loss.part",
        ".own:loss",
    ],
)
def test_received_path_is_found_among_other_characters(text, tmp_path):
    record_received({"model": {"loss": text}}, tmp_path / "file")
    with pytest.raises(ValueError, match="would import the module own and"):
        check_imports({"model": {"loss": "own:loss"}})


def write_yaml(directory, **sections):
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


@pytest.mark.thorough
def test_source_of_a_received_mixture_is_not_imported(payload, tmp_path, capsys):
    data = {"name": "mixture", "mixture": ["1 gift_payload:corpus"], "sequence_length": 16}
    data |= {"global_batch_size": 8, "tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
    sizes = {"num_layers": 1, "num_heads": 1, "embed_dim": 8, "dropout": 0.0}
    file = write_yaml(tmp_path, model={"name": "gpt2", **sizes}, data=data)
    arguments = [f"--config={file}", "--fast_dev_run", "--config.train.num_microbatches=1"]
    assert main(arguments) == 2
    assert "data.mixture='1 gift_payload:corpus', which would import" in error_of(capsys)
    assert not payload.exists()
    assert main([*arguments, "--config.data.mixture=1 gift_payload:corpus"]) == 0
    assert payload.exists()


def test_unknown_override_does_not_import_the_model_of_a_received_config(payload, tmp_path, capsys):
    file = write_yaml(tmp_path, model={"name": "gift_payload:GPT2"})
    for override in ("optimizr.name=adamw", "model.loss=tests.runs:squared_error", "model.x=1"):
        assert main([f"--config={file}", f"--config.{override}", "--fast_dev_run"]) == 2
        assert "would import the module gift_payload" in error_of(capsys)
        assert not payload.exists()
    allowed = load_config(str(file), ["model.loss=own:loss"], allow_import=["gift_payload"])
    assert allowed.model.loss == "own:loss"


def test_received_model_may_be_replaced_on_the_command_line(payload, tmp_path):
    model = {"name": "gift_payload:GPT2", "loss": "gift_payload:loss"}
    file = write_yaml(tmp_path, model=model)
    config = load_config(str(file), ["model.name=gpt2", "model.loss=cross_entropy"])
    assert (config.model.name, config.model.loss) == ("gpt2", "cross_entropy")
    assert not payload.exists()


def test_model_of_a_config_py_is_imported_although_a_received_run_has_it_too(
    received, payload, tmp_path, capsys
):
    file = tmp_path / "own.py"
    file.write_text(
        "from configs.gpt2 import get_config as base\n"
        "def get_config():\n"
        "    config = base()\n"
        "    config.model.name = 'gift_payload:GPT2'\n"
        "    return config\n"
    )
    assert main([f"--config={file}", "--fast_dev_run", f"--config.init_from={received}"]) == 2
    assert payload.exists()
    assert "has neither a tokenizer.json" in error_of(capsys)  # A later check.


FEATURES = {"pythonClassName": "gift_payload.Features", "featuresDict": {"features": {}}}


@pytest.mark.parametrize("is_mixture", [False, True])
def test_classes_of_a_prepared_data_set_are_not_imported(is_mixture, payload, tmp_path):
    directory = tmp_path / "tensorflow_datasets" / "my_texts" / "1.0.0"
    directory.mkdir(parents=True)
    (directory / "features.json").write_text(json.dumps(FEATURES))
    info = {"name": "my_texts", "version": "1.0.0", "fileFormat": "array_record"}
    (directory / "dataset_info.json").write_text(json.dumps(info))
    where: Any = {"name": "my_texts"}
    if is_mixture:
        where = {"name": "mixture", "mixture": ("1 my_texts",)}
    config = DataConfig(
        sequence_length=8, global_batch_size=8, cache_dir=str(tmp_path), tokenizer="bytes", **where
    )
    with pytest.raises(ValueError, match=r"gift_payload\.Features.*add --allow_import=gift_payl"):
        load_text(config)
    assert not payload.exists()
    allow_imports(["gift_payload"])
    with pytest.raises(ValueError, match="cannot be opened|has no"):  # it is not a feature
        load_text(config)
    assert payload.exists()


def test_data_sets_whose_code_tfds_downloads_are_refused(tmp_path):
    for name in ("huggingface:a/b", "kaggle:a/b:1.0.0"):
        with pytest.raises(ValueError, match="namespace"):
            open_builder(name, tmp_path, lambda _: None)


def test_exporting_a_received_run_imports_nothing(received, payload, tmp_path, capsys):
    assert to_hf.main([str(received), str(tmp_path / "out")]) == 2
    error = error_of(capsys)
    assert "config.yaml has model.name='gift_payload:GPT2', which would import" in error
    assert "--allow_import=gift_payload" in error
    with pytest.raises(ValueError, match="would import the module gift_payload"):
        load(received)
    assert not payload.exists()


def test_config_of_a_received_checkpoint_imports_nothing(converted, payload, tmp_path, capsys):
    run = tmp_path / "received"
    shutil.copytree(converted, run)
    shutil.copy(run / "config.yaml", run / "checkpoints" / "0")
    edit(run / "checkpoints" / "0" / "config.yaml", "model", name="gift_payload:GPT2")
    assert to_hf.main([str(run), str(tmp_path / "out")]) == 2
    assert "checkpoints/0/config.yaml has model.name='gift_payload:GPT2', w" in error_of(capsys)
    assert not payload.exists()


@pytest.mark.thorough
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
