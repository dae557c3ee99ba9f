"""Exports have every file and tensor that vLLM's loader reads; vLLM itself needs a GPU.

vLLM's DefaultModelLoader (vllm/model_executor/model_loader) finds the class by its name, and reads
the weights from `*.safetensors`, or from those that an index names. Every tensor must have the name
of a parameter in transformers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from convert import from_hf, to_hf
from tests.convert import cases

#: Classes that Taibai exports and vLLM can generate text with.
_CLASSES = {
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}


def read_as_vllm_does(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the files that the index names, or of all files without an index."""
    assert not [*folder.glob("consolidated*.safetensors")]  # would be read in Mistral's own format
    files = {*folder.glob("*.safetensors")}
    assert files
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files &= {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    for file in sorted(files):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                yield name, tensors.get_tensor(name)


@pytest.mark.thorough(but=["gpt2-1000000000", "llama-20000"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "mistral", "qwen2", "qwen3"])
def test_export_has_what_vllm_reads(name, shard_bytes, tmp_path):
    model = cases.make(name)
    model.save_pretrained(tmp_path / "hf")
    from_hf.convert(tmp_path / "hf", tmp_path / "run")
    folder = tmp_path / "export"
    to_hf.convert(tmp_path / "run", folder, max_shard_bytes=shard_bytes)

    config: Any = transformers.AutoConfig.from_pretrained(folder)
    assert {*config.architectures} <= _CLASSES and "auto_map" not in config.to_dict()
    assert config.dtype == torch.float32
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == model.generation_config.eos_token_id

    found = [*read_as_vllm_does(folder)]
    assert len(found) == len({name for name, _ in found})
    assert len([*folder.glob("*.safetensors")]) == 1 or shard_bytes < 10**9
    expected = model.state_dict()
    for key, tensor in found:
        # vLLM adds the prefix of GPT-2 and OPT where it is missing, as transformers does.
        assert torch.equal(tensor, expected[key]), key
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert {key for key, _ in found} >= expected.keys() - tied
