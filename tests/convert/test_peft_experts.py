"""Adapters of experts and routers that PEFT trained compute the same, read, written and merged."""

import dataclasses
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.numpy import load_file

from convert import from_hf, to_hf
from convert.adapters.write_peft import write_adapter
from convert.source import read_source
from models.layers.lora import LoraConfig
from tests.convert.cases import save
from tests.convert.test_peft import TOLERANCE, ours, theirs

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    # Large enough that the experts of a token differ.
    "initializer_range": 0.3,
}
FAMILIES: dict[str, Any] = {
    "mixtral": (hf.MixtralForCausalLM, {"num_local_experts": 3}),
    "qwen3": (
        hf.Qwen3MoeForCausalLM,
        {"num_experts": 3, "moe_intermediate_size": 20, "head_dim": 8, "norm_topk_prob": True},
    ),
}


def reload(family, path):
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return FAMILIES[family][0].from_pretrained(path, **options).eval()


def make(family, parameters, directory):
    """Return the logits of a model with adapters of random values, saved in base/ and adapter/."""
    model_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model_class(model_class.config_class(**_SIZES, **sizes)).save_pretrained(directory / "base")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters
    )
    model = peft.get_peft_model(reload(family, directory / "base"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(directory / "adapter"))
    return theirs(model)


# PEFT converts the rank of gate and up, and then warns of its own conversion.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("mixtral", ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]),
        ("qwen3", ["experts.gate_up_proj", "experts.down_proj"]),
        ("qwen3", ["experts.down_proj"]),
    ],
)
def test_adapters_of_experts_compute_the_same(family, parameters, tmp_path):
    expected = make(family, parameters, tmp_path)
    np.testing.assert_allclose(ours(tmp_path / "adapter"), expected, atol=TOLERANCE)
    assert np.abs(ours(tmp_path / "base") - expected).max() > 0.1

    # They are written under the names of modules in transformers 4, which PEFT converts.
    from_hf.convert(tmp_path / "adapter", tmp_path / "run")
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    np.testing.assert_array_equal(ours(tmp_path / "back"), ours(tmp_path / "adapter"))
    names = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert any(".mlp.experts.2." in name for name in names)
    base = reload(family, tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "back").eval()
    np.testing.assert_allclose(theirs(again), expected, atol=TOLERANCE)

    to_hf.convert(tmp_path / "run", tmp_path / "merged", merge=True)
    merged = reload(family, tmp_path / "merged")
    np.testing.assert_allclose(theirs(merged), expected, atol=TOLERANCE)


def test_adapters_of_gate_and_up_alone_are_read(tmp_path):
    expected = make("qwen3", ["experts.gate_up_proj"], tmp_path)
    np.testing.assert_allclose(ours(tmp_path / "adapter"), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("gpt_oss", "mlp.up", r"mlp\.up has an adapter, which PEFT has no .* --merge"),
        ("qwen2_moe", "mlp.shared.*", r"mlp\.shared\.\w+ has an adapter, which PEFT takes for exp"),
        ("qwen3_moe", "mlp.up", r"mlp has adapters of up, but PEFT converts"),
    ],
)
def test_adapters_that_peft_cannot_convert_are_refused(name, target, message, tmp_path):
    source = read_source(save(name, tmp_path))
    assert source.architecture is not None
    lora = LoraConfig(rank=2, targets=(target,))
    changed = dataclasses.replace(source, lora=lora)
    with pytest.raises(ValueError, match=message):
        write_adapter(changed, source.architecture, tmp_path / "out", None, base=source)
