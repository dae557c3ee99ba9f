"""Models and adapters on the Hugging Face hub: downloaded files, recorded commits."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
import yaml

from convert import from_hf, to_hf
from convert.source import read_source
from data.text.hub_tokenizer import local_tokenizer
from generate import __main__ as generate
from tests.convert.hf_files import edit_config, parameters
from tests.convert.test_peft import make, ours
from tests.hub import use_hub
from tests.hugging_face import OPT, save_model
from untrusted.commands import REFUSED


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """A directory with an OPT in one file, and one with the same OPT in several."""
    directory = tmp_path_factory.mktemp("models")
    model = save_model(directory / "opt", "OPTForCausalLM", **OPT)
    model.save_pretrained(directory / "sharded", max_shard_size="20KB")
    return directory


@pytest.mark.parametrize("name", ["opt", "sharded"])
def test_model_of_the_hub_is_the_one_on_disk(name, opt, hub):
    hub.commit("me/opt", opt / name)
    other = {"model.fp16.safetensors": b"", "original/model.safetensors": b"", "a.py": b""}
    files = hub.repositories["models", "me/opt"].commits
    next(iter(files.values())).update(other)
    jax.tree.map(np.testing.assert_array_equal, parameters(Path("me/opt")), parameters(opt / name))
    assert not {*hub.downloads()} & {*other}


@pytest.mark.thorough
def test_converted_model_records_its_commit(opt, hub, tmp_path, capsys):
    tag = hub.commit("me/opt", opt / "opt", revision="v1")
    hub.commit("me/opt", {"config.json": b"{}"})
    assert from_hf.main(["me/opt@v1", str(tmp_path / "run")]) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["init_from"] == f"me/opt@{tag}"
    assert (tmp_path / "run" / "hf" / "tokenizer.json").exists()
    assert from_hf.main(["me/none", str(tmp_path / "none")]) == REFUSED
    assert "'hf download me/none'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "new", "architectures": ["NewForCausalLM"]}, "NewForCausalLM"),
        ({"word_scale": 2.0}, "word_scale"),
    ],
)
def test_unsupported_model_is_refused_before_its_weights_are_downloaded(
    change, problem, opt, hub, tmp_path
):
    shutil.copytree(opt / "opt", tmp_path / "changed")
    edit_config(tmp_path / "changed", **change)
    hub.commit("me/opt", tmp_path / "changed")
    with pytest.raises(ValueError, match=problem):
        read_source("me/opt")
    assert "model.safetensors" not in hub.downloads()


def test_model_without_safetensors_is_refused(opt, hub, tmp_path):
    shutil.copytree(opt / "opt", tmp_path / "changed")
    (tmp_path / "changed" / "model.safetensors").rename(tmp_path / "changed" / "pytorch_model.bin")
    hub.commit("me/opt", tmp_path / "changed")
    with pytest.raises(ValueError, match=r"me/opt@.* has neither model.safetensors nor .* pickles"):
        from_hf.load("me/opt", allow_pickle_weights=True)
    assert hub.downloads() == []
    hub.commit("me/empty", {"README.md": b""})
    with pytest.raises(ValueError, match=r"me/empty@.* has no config.json"):
        read_source("me/empty")


@pytest.mark.parametrize("missing", [None, "last", "config.json", "tokenizer.json"])
def test_model_without_a_list_of_its_files_is_read_if_complete(
    missing, opt, hub, monkeypatch, tmp_path
):
    """A download of single files, as transformers does it, leaves no list of all files."""
    paths = [*(opt / "sharded").iterdir(), opt / "opt" / "tokenizer.json"]
    hub.commit("me/opt", {path.name: path.read_bytes() for path in paths})
    names = sorted(path.name for path in paths)
    weights = [name for name in names if name.endswith(".safetensors")]
    missing = weights[-1] if missing == "last" else missing
    for name in names:
        if name != missing:
            huggingface_hub.hf_hub_download("me/opt", name)
    use_hub(monkeypatch, hub.url, tmp_path / "hf_home", is_offline=True)
    if missing == "tokenizer.json":
        with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set; run 'hf download me/opt"):
            local_tokenizer("me/opt")
    elif missing is not None:
        with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set; run 'hf download me/opt"):
            read_source("me/opt")
    else:
        read_source("me/opt")
        local_tokenizer("me/opt")


@pytest.mark.thorough
def test_adapter_and_its_base_on_the_hub_are_read_and_written(hub, tmp_path):
    make("gpt2", "LoRA", tmp_path)
    expected = ours(tmp_path / "adapter")
    base = hub.commit("me/base", tmp_path / "base", revision="v1")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": "me/base"}
    file.write_text(json.dumps({**config, "revision": "v1"}))
    adapter = hub.commit("me/adapter", tmp_path / "adapter")
    np.testing.assert_array_equal(ours(Path("me/adapter")), expected)

    from_hf.convert(tmp_path / "adapter", tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["init_from"] == f"me/base@{base}"
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/base", base)
    np.testing.assert_array_equal(ours(tmp_path / "back"), expected)
    assert str(read_source("me/adapter").path) == f"me/adapter@{adapter}"

    # A run that started from the adapter has recorded the commit of the base.
    commits = {"train": {"hub_commits": [f"adapter_base me/base@v1 {base}"]}}
    changed = {**written, "init_from": str(tmp_path / "adapter"), **commits}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(changed))
    hub.commit("me/base", {"config.json": b"{}"}, revision="v1")
    to_hf.convert(tmp_path / "run", tmp_path / "later")
    config = json.loads((tmp_path / "later" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/base", base)


@pytest.mark.thorough
def test_generate_continues_with_a_model_of_the_hub(opt, hub, capsys):
    hub.commit("me/opt", opt / "opt")
    arguments = ["--prompt=def", "--max_new_tokens=4", "--temperature=0"]
    texts = []
    for model in (str(opt / "opt"), "me/opt"):
        assert generate.main([f"--model={model}", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()


def test_generate_refuses_a_model_that_the_hub_lacks(hub, capsys):
    assert generate.main(["--model=me/none", "--prompt=def"]) == REFUSED
    assert "error: me/none is neither a path" in capsys.readouterr().err
