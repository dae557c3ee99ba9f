"""Adapters of PEFT name their base model; files in both folders, and parameters it lacks."""

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
import yaml
from safetensors.numpy import load_file, save_file

from convert import from_hf, to_hf
from convert.adapters.peft_format import module_mappings, module_of
from convert.adapters.write_peft import write_adapter
from convert.source import read_source
from generate.prompts import stop_tokens_of
from tests.convert.cases import CASES, VOCAB, save
from tests.convert.test_peft import make, ours


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A directory with base/ and adapter/ of a GPT-2."""
    directory = tmp_path_factory.mktemp("peft")
    make("gpt2", "LoRA", directory)
    return directory


@pytest.mark.thorough
def test_base_of_continued_adapters_is_the_model_that_they_are_for(adapter, tmp_path):
    """The adapters of a run that continues others are not added to those."""
    expected = ours(adapter / "adapter")
    from_hf.convert(adapter / "adapter", tmp_path / "first")
    for name, before in {"second": tmp_path / "first", "third": tmp_path / "second"}.items():
        from_hf.convert(adapter / "adapter", tmp_path / name)
        file = tmp_path / name / "config.yaml"
        config = yaml.safe_load(file.read_text()) | {"init_from": str(before)}
        file.write_text(yaml.safe_dump(config))
    to_hf.convert(tmp_path / "third", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(adapter / "base")
    np.testing.assert_array_equal(ours(tmp_path / "back"), expected)

    config["base_model_name_or_path"] = str(tmp_path / "first")
    (tmp_path / "back" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"a run with adapters of its own; .*{adapter}/base"):
        read_source(tmp_path / "back")


@pytest.mark.thorough
def test_parameters_that_the_base_lacks_are_written_with_the_adapters(tmp_path):
    """PEFT would start them from random values."""
    sizes: Any = {
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
    }
    torch.manual_seed(0)
    base = hf.BertForMaskedLM(hf.BertConfig(**sizes))
    base.save_pretrained(tmp_path / "base")
    make("bert", "LoRA", tmp_path / "other")
    from_hf.convert(tmp_path / "other" / "adapter", tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text()) | {"init_from": str(tmp_path / "base")}
    file.write_text(yaml.safe_dump(config))
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    names = load_file(tmp_path / "back" / "adapter_model.safetensors").keys()
    assert {
        "base_model.model.bert.pooler.dense.bias",
        "base_model.model.classifier.weight",
    } <= names


def test_files_of_the_adapter_go_before_those_of_its_base(adapter, tmp_path):
    shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    source = read_source(tmp_path / "adapter")
    assert source.hf_file("generation_config.json") == adapter / "base" / "generation_config.json"
    for name in ("generation_config.json", "chat_template.jinja"):
        (tmp_path / "adapter" / name).write_text('{"eos_token_id": [1, 7]}')
        assert source.hf_file(name) == tmp_path / "adapter" / name
    assert stop_tokens_of(source, None) == [1, 7]
    from_hf.convert(tmp_path / "adapter", tmp_path / "run")
    assert stop_tokens_of(read_source(tmp_path / "run"), None) == [1, 7]
    assert (tmp_path / "run" / "hf" / "chat_template.jinja").exists()


#: Cases whose files have several linear layers in one tensor.
FUSED = ["glm4", *(name for name in CASES if name.startswith(("phi", "modernbert")))]


@pytest.mark.parametrize("name", FUSED)
def test_adapters_of_linear_layers_that_are_stored_as_one_are_refused(name, tmp_path):
    source = read_source(save(name, tmp_path))
    assert source.architecture is not None
    with pytest.raises(ValueError, match="stores several linear layers in one tensor, such as"):
        module_mappings(source.architecture, source.shapes(), vocab_size=VOCAB)


UNFUSED = {case[0]: name for name, case in CASES.items() if name not in FUSED}


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", UNFUSED.values())
def test_peft_finds_the_modules_of_an_architecture(name, tmp_path):
    source = read_source(save(name, tmp_path))
    assert source.architecture is not None
    mappings = module_mappings(
        source.architecture,
        source.shapes(),
        vocab_size=getattr(source.config, "vocab_size", None),
    )
    model = getattr(hf, CASES[name][0]).from_pretrained(tmp_path)
    # The experts of a layer are one module there, which has no adapters.
    modules = {module_of(m) for m in mappings if ".experts." not in m.theirs}
    assert modules <= {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_trained_experts_are_refused(name, tmp_path):
    source = read_source(save(name, tmp_path))
    assert source.architecture is not None
    lora = dataclasses.replace(source.lora, also_trained=("*.mlp.up", "*.mlp.up_bias"))
    changed = dataclasses.replace(source, lora=lora)
    with pytest.raises(ValueError, match=r"lora\.also_trained has decoder.*mlp.up"):
        write_adapter(changed, source.architecture, tmp_path / "out", None, base=source)


def test_a_base_that_is_no_hugging_face_model_is_warned_of(adapter, tmp_path, caplog):
    from_hf.convert(adapter / "base", tmp_path / "first")
    (tmp_path / "first" / "hf" / "config.json").unlink()
    from_hf.convert(adapter / "adapter", tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text()) | {"init_from": str(tmp_path / "first")}
    file.write_text(yaml.safe_dump(config))
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    assert f"adapters are for {tmp_path}/first, which is not a Hugging Face model" in caplog.text


@pytest.mark.thorough
def test_adapters_under_the_names_of_files_are_read(tmp_path):
    """Older versions of transformers name the modules of a ViT as their weights in files."""
    make("vit", "DoRA", tmp_path)
    expected = ours(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    older = {
        ".layers.": ".encoder.layer.",
        ".q_proj.": ".attention.query.",
        ".o_proj.": ".output.dense.",
        ".mlp.fc1.": ".intermediate.dense.",
    }
    tensors = load_file(file)
    for new, old in older.items():
        assert any(new in name for name in tensors)
        tensors = {name.replace(new, old): x for name, x in tensors.items()}
    save_file(tensors, file)
    np.testing.assert_array_equal(ours(tmp_path / "adapter"), expected)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("model_class", "sizes", "targets"),
    [
        (
            hf.RobertaForSequenceClassification,
            {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64}
            | {"num_attention_heads": 4, "num_labels": 3},
            ["query"],
        ),
        (
            hf.Swinv2ForImageClassification,
            {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "window_size": 2}
            | {"num_heads": [1, 2], "num_labels": 3},
            "all-linear",
        ),
    ],
)
def test_peft_finds_the_modules_that_it_has_named_itself(model_class, sizes, targets, tmp_path):
    """PEFT adds text classifiers itself, and refuses names that also match containers."""
    torch.manual_seed(0)
    base = tmp_path / "base"
    model_class(model_class.config_class(**sizes)).save_pretrained(base)
    task = "SEQ_CLS" if targets == ["query"] else None
    settings = peft.LoraConfig(r=2, target_modules=targets, task_type=task)
    model: Any = peft.get_peft_model(model_class.from_pretrained(base), settings)
    model.save_pretrained(str(tmp_path / "adapter"))
    from_hf.convert(tmp_path / "adapter", tmp_path / "run")
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    again = peft.PeftModel.from_pretrained(model_class.from_pretrained(base), tmp_path / "back")
    expected = model.state_dict()
    found = again.state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0)


def test_adapters_of_convolutions_and_heads_are_refused(tmp_path):
    save("vit", tmp_path / "base")
    model = hf.ViTForImageClassification.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["projection", "v_proj"])
    peft.get_peft_model(model, settings).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"projection\.lora_A.* or a convolution.* merge"):
        read_source(tmp_path / "adapter")

    source = read_source(tmp_path / "base")
    assert source.architecture is not None
    lora = dataclasses.replace(source.lora, rank=2, targets=("patch_embedding.linear",))
    changed = dataclasses.replace(source, lora=lora)
    with pytest.raises(ValueError, match=r"patch_embedding\.linear .* convolution .* --merge"):
        write_adapter(changed, source.architecture, tmp_path / "out", None, base=None)
