"""Quantized weights are read as the values that transformers decodes."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations import mxfp4

from convert import from_hf, to_hf
from convert.source import read_source
from tests.convert import cases, hf_files
from tests.convert.test_round_trip import all_tensors


def quantize_float8(block: int):
    """Return a change of tensors: matrices of attention and MLPs get float8, with factors."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                continue
            matrix = tensors[name]
            rows, columns = matrix.shape
            padded = torch.nn.functional.pad(matrix, (0, -columns % block, 0, -rows % block))
            blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
            factors = blocks.abs().amax((1, 3)) / 448
            quantized = (blocks / factors[:, None, :, None]).flatten(2, 3).flatten(0, 1)
            tensors[name] = quantized[:rows, :columns].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = factors

    return change


def save_float8(directory, block: int):
    cases.save("deepseek3_halves", directory)
    hf_files.edit(directory, quantize_float8(block))
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [block, block]}
    hf_files.edit_config(directory, quantization_config=config)
    return directory


@pytest.fixture(scope="module")
def float8(tmp_path_factory):
    return save_float8(tmp_path_factory.mktemp("float8"), 16)


def converted(directory, tmp_path):
    """Return the tensors after import and export."""
    from_hf.convert(directory, tmp_path / "run")
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    return all_tensors(tmp_path / "back")


def test_float8_is_read_as_transformers_decodes_it(tmp_path):
    directory = save_float8(tmp_path / "float8", 2)  # transformers has no incomplete blocks.
    options = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(2, 2))
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(
        directory, quantization_config=options, dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "theirs")
    found = converted(directory, tmp_path)
    expected = all_tensors(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name


def test_float8_weights_are_multiplied_by_the_factor_of_their_block(float8, tmp_path):
    stored = load_file(float8 / "model.safetensors")
    found = converted(float8, tmp_path)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"  # 22 x 36, in blocks of 16 x 16
    factors = stored[f"{name}_scale_inv"]
    assert stored[name].dtype == torch.float8_e4m3fn and factors.shape == (2, 3)
    rows, columns = torch.meshgrid(torch.arange(22), torch.arange(36), indexing="ij")
    expected = stored[name].float() * factors[rows // 16, columns // 16]
    assert torch.equal(found[name], expected.bfloat16())
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(found[name], stored[name])


def test_float8_with_factors_of_another_shape_is_refused(float8, tmp_path):
    shutil.copytree(float8, tmp_path, dirs_exist_ok=True)
    hf_files.edit_config(
        tmp_path,
        quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]},
    )
    with pytest.raises(ValueError, match=r"weight_scale_inv \[.*weight_block_size=\[8, 8\]"):
        read_source(tmp_path)


def quantize_float4(tensors: dict[str, torch.Tensor]) -> None:
    """Replace the weights of all experts by random ones of 4 bits."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, shape, dtype=torch.uint8)


@pytest.fixture(scope="module")
def float4(tmp_path_factory):
    """A GPT-OSS whose experts have 64 inputs and 96 hidden units."""
    directory = tmp_path_factory.mktemp("float4")
    _, fields = cases.CASES["gpt_oss"]
    sizes: dict[str, Any] = fields | {"hidden_size": 64, "intermediate_size": 96}
    config = transformers.GptOssConfig(**sizes)
    transformers.GptOssForCausalLM(config).save_pretrained(directory)
    hf_files.edit(directory, quantize_float4)
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": [*modules, "lm_head"]}
    hf_files.edit_config(directory, quantization_config=quantization)
    return directory


def test_float4_is_read_as_transformers_decodes_it(float4, tmp_path):
    stored = load_file(float4 / "model.safetensors")
    found = converted(float4, tmp_path)
    for layer in range(4):
        for part, shape in (("gate_up_proj", (7, 64, 192)), ("down_proj", (7, 96, 64))):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            packed = (stored[f"{name}_{x}"] for x in ("blocks", "scales"))
            assert found[name].shape == shape
            assert torch.equal(found[name], mxfp4.convert_moe_packed_tensors(*packed))
    part = (slice(1, 2), slice(2, 5), slice(7, 9), slice(0, 50))  # layers, experts, D, F
    (array,) = read_source(float4).open({"decoder.layers.block_1.mlp.up": (2, 7, 64, 96)}).values()
    up = found["model.layers.3.mlp.experts.gate_up_proj"][2:5, 7:9, 1:100:2].float()
    np.testing.assert_array_equal(array.read(part)[0].astype(np.float32), up)
    name = "model.layers.3.mlp.experts.gate_up_proj_bias"
    assert torch.equal(found[name], stored[name])


def test_float4_with_scales_of_another_shape_is_refused(float4, tmp_path):
    shutil.copytree(float4, tmp_path, dirs_exist_ok=True)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    hf_files.edit(tmp_path, lambda tensors: tensors.update({name: tensors[name][:, :, :1]}))
    with pytest.raises(ValueError, match=r"down_proj_blocks .* \[7, 64, 1\]; they must be bytes"):
        read_source(tmp_path)


@pytest.mark.parametrize("size", [[16], [0, 16], "16", None])
def test_float8_without_blocks_is_refused(size, float8, tmp_path):
    shutil.copytree(float8, tmp_path, dirs_exist_ok=True)
    hf_files.edit_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": size}
    )
    with pytest.raises(ValueError, match="quantization_config, but quantized weights cannot be"):
        read_source(tmp_path)
