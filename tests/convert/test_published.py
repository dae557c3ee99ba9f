"""Published configs of models are understood, all keys of them."""

import dataclasses
import inspect
import json
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from convert import from_hf
from convert.keys import WITHOUT_EFFECT, read
from convert.model_on_disk import shapes_of
from convert.registry import architectures, find
from models.text.llama import LlamaConfig
from models.text.modernbert import ModernBertConfig
from models.text.t5 import T5Config
from tests.convert import cases
from tests.convert.published import CONFIGS, ENCODERS
from tests.convert.published_experts import SWITCH
from tests.runs import ROOT
from train.config.config_files import load

#: Field of ours -> attribute of the config in transformers.
SAME = {
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
}


@pytest.mark.drawn(12)
@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_gives_the_sizes_of_transformers(name):
    hf = CONFIGS[name]
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless)
    ours = architecture.model_class.Config(**fields | dict(architecture.fields))
    theirs = getattr(transformers, hf["architectures"][0]).config_class(**hf)
    for field, key in SAME.items():
        assert getattr(ours, field) == getattr(theirs, key)
    by_type = {"full": "full_attention", "window": "sliding_attention"}
    if "sliding_attention" in (getattr(theirs, "layer_types", None) or ()):
        types = [by_type.get(each, "full_attention") for each in ours.types]
        assert types == theirs.layer_types
    rope = theirs.rope_parameters
    if "full_attention" in rope:
        assert ours.window_rope_theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rotary_fraction == rope.get("partial_rotary_factor", 1.0)
    # Qwen's config turns a window that is not used into 0.
    assert ours.sliding_window == (getattr(theirs, "sliding_window", None) or None)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    # With latents, their head_dim has only the features that are rotated.
    assert ours.head_dim == getattr(theirs, "qk_nope_head_dim", size)


#: Size of configs/llama.py -> the published model.
SIZES = {
    "2-7b": "meta-llama/Llama-2-7b-hf",
    "3.2-1b": "meta-llama/Llama-3.2-1B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "olmo2-7b": "allenai/OLMo-2-1124-7B",
    "olmo3-7b": "allenai/Olmo-3-1025-7B",
    "gemma2-2b": "google/gemma-2-2b",
    "gemma3-1b": "google/gemma-3-1b-it",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "granite3.1-2b": "ibm-granite/granite-3.1-2b-instruct",
    "phi4-14b": "microsoft/phi-4",
    "glm4-9b": "THUDM/GLM-4-9B-0414",
    "nemotron-4b": "nvidia/Nemotron-Mini-4B-Instruct",
    "stablelm2-1.6b": "stabilityai/stablelm-2-1_6b",
    "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
    "seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Instruct",
}
#: The same of configs/mixtral.py.
SIZES_OF_EXPERTS = {
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "glm4.5-air": "zai-org/GLM-4.5-Air",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
#: Settings of training, which config.json does not have.
_TRAINING = ("router_loss", "router_loss_over", "router_z_loss", "balancing_rate", "mtp_loss")


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    "file, size, name",
    [
        *(("llama", *item) for item in SIZES.items()),
        *(("mixtral", *item) for item in SIZES_OF_EXPERTS.items()),
    ],
)
def test_sizes_of_configs_are_the_published_ones(file, size, name):
    hf = CONFIGS[name]
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless)
    published = LlamaConfig(**fields | dict(architecture.fields))
    config = load(str(ROOT / "configs" / f"{file}.py:{size}"), ())
    ours = config.model.to_dict() | {"vocab_size": published.vocab_size}
    for other in ("name", *_TRAINING):
        ours.pop(other, None)
    ours = LlamaConfig(**ours)
    # The configs do not train the layers that predict tokens after the next.
    published = dataclasses.replace(published, mtp_depths=0)
    assert dataclasses.asdict(ours) == dataclasses.asdict(published)


def reduced(hf: dict) -> dict:
    """Return a config.json with smaller sizes and token ids; all other keys are as published."""
    has_groups = hf["num_key_value_heads"] < hf["num_attention_heads"]
    rope = dict(hf.get("rope_scaling") or {})
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][-3:]  # for the 6 of 8 features that are rotated
    by_layer = {name: hf[name][:4] for name in ("layer_types", "no_rope_layers") if name in hf}
    sizes = {
        "vocab_size": cases.VOCAB,
        "num_hidden_layers": 4 if hf.get("sliding_window_pattern") or by_layer else 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2 if has_groups else 6,
        "head_dim": 8,
        "kv_channels": 8,
        "hidden_size": 48,
        "intermediate_size": 44,
        "num_experts": 16,
        "num_local_experts": 16,
        "n_routed_experts": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 22,
        "shared_expert_intermediate_size": 26,
        "kv_lora_rank": 14,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "rope_scaling": rope,
    }
    reduced_sizes = {name: size for name, size in sizes.items() if hf.get(name) is not None}
    hf = {name: value for name, value in hf.items() if name != "quantization_config"}
    return {**hf, **reduced_sizes, **by_layer}


@pytest.mark.thorough(but=["tiiuae/Falcon3-7B-Base"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_model_with_a_published_config_has_the_logits_of_transformers(name, tmp_path):
    hf = reduced(CONFIGS[name])
    model_class = getattr(transformers, hf["architectures"][0])
    config = model_class.config_class(**hf, **cases.EAGER)
    torch.manual_seed(0)
    theirs = model_class(config).eval().float()
    cases.set_random_weights(theirs)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    rng = np.random.default_rng(0)
    mask = np.ones((3, 14), np.int32)
    mask[1, 9:] = 0
    mask[2, :4] = 0
    tokens = np.where(mask, rng.integers(4, cases.VOCAB, mask.shape, dtype=np.int32), 1)
    found = np.asarray(from_hf.load(tmp_path)(tokens, mask))
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask)
        )
    # As in test_parity.py: float32 rounding, accumulated over the layers.
    np.testing.assert_allclose(
        found[mask > 0], expected.logits.numpy()[mask > 0], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_published_encoder_has_the_tensors_and_settings_of_transformers(name):
    hf = ENCODERS[name]
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless)
    fields |= architecture.fields
    config = architecture.model_class.Config(**fields)
    model = nnx.eval_shape(lambda: architecture.model_class(config, rngs=nnx.Rngs(0)))
    shapes = shapes_of(nnx.to_pure_dict(nnx.split(model)[1]))
    mappings = architecture.tensor_mappings(shapes, vocab_size=hf.get("vocab_size"))
    model_class = getattr(transformers, hf["architectures"][0])
    with torch.device("meta"):
        theirs = model_class(model_class.config_class(**hf))
    # A tensor of ours is a layer of a stacked parameter; transformers may name modules otherwise.
    ours = sorted({mapping.theirs: mapping.their_shape for mapping in mappings}.values())
    assert ours == sorted(tuple(weight.shape) for weight in theirs.parameters())
    norms = [m.eps for m in theirs.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert {*norms} == {config.layer_norm_epsilon}
    assert config.num_heads == theirs.config.num_attention_heads
    assert config.init_stddev == theirs.config.initializer_range


@pytest.mark.parametrize("size", ["base", "large"])
def test_published_modernbert_has_the_layers_of_transformers(size):
    hf = dict(ENCODERS["answerdotai/ModernBERT-base"])
    if size == "large":
        hf |= {"hidden_size": 1024, "intermediate_size": 2624}
        hf |= {"num_attention_heads": 16, "num_hidden_layers": 28}
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless)
    published = ModernBertConfig(**fields, head="masked_lm")
    theirs: Any = transformers.ModernBertConfig(**hf)
    names = {"full": "full_attention", "window": "sliding_attention"}
    assert [names[layer_type] for layer_type in published.types] == theirs.layer_types
    # Theirs is the largest distance that is seen, ours the smallest that is not.
    assert published.sliding_window == theirs.sliding_window + 1
    thetas = (published.rope_theta, published.window_rope_theta)
    assert thetas == tuple(theirs.rope_parameters[name]["rope_theta"] for name in names.values())
    config = load(str(ROOT / "configs" / f"bert.py:modernbert-{size}"), ())
    ours = config.model.to_dict() | {"vocab_size": 50368, "max_positions": 8192}
    ours = ModernBertConfig(**{name: value for name, value in ours.items() if name != "name"})
    assert dataclasses.asdict(ours) == dataclasses.asdict(published)


@pytest.mark.thorough
def test_switch_transformer_is_that_of_configs_and_has_the_logits_of_transformers(
    tmp_path,
):
    architecture = find(SWITCH)
    fields = read(SWITCH, architecture.keys, harmless=architecture.harmless)
    published = T5Config(**fields | dict(architecture.fields))
    config = load(str(ROOT / "configs" / "t5.py:switch-base-8"), ())
    ours = config.model.to_dict() | {"vocab_size": published.vocab_size}
    for other in ("name", *_TRAINING):
        ours.pop(other, None)
    assert dataclasses.asdict(T5Config(**ours)) == dataclasses.asdict(published)

    sizes = {"d_model": 38, "d_ff": 50, "d_kv": 7, "num_heads": 3, "vocab_size": cases.VOCAB}
    sizes |= {f"num_{name}layers": 4 for name in ("", "decoder_")}
    sizes |= {f"num_sparse_{side}_layers": 2 for side in ("encoder", "decoder")}
    hf = SWITCH | sizes | {"num_experts": 3, "expert_capacity": 4}
    model_class: Any = transformers.SwitchTransformersForConditionalGeneration
    torch.manual_seed(0)
    theirs = model_class(model_class.config_class(**hf, **cases.EAGER)).eval().float()
    cases.set_random_weights(theirs)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tokens = np.random.default_rng(0).integers(2, cases.VOCAB, (2, 13), dtype=np.int32)
    found = from_hf.load(tmp_path)(tokens, tokens[:, :9])
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        expected = theirs(input_ids=ids, decoder_input_ids=ids[:, :9]).logits
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4)  # as above


def test_keys_without_effect_are_ignored_with_one_line(caplog):
    hf = {**CONFIGS["microsoft/phi-4"], "unsloth_version": "2025.1", "max_sequence_length": 4096}
    architecture = find(hf)
    with caplog.at_level("INFO"):
        read(hf, architecture.keys, harmless=architecture.harmless)
    (line,) = caplog.messages
    assert line.endswith("no effect and are ignored: unsloth_version, max_sequence_length")


def test_keys_without_effect_are_not_read_by_transformers():
    classes = [getattr(transformers, name) for name in architectures()]
    modules = {each.__module__ for each in (*classes, *(each.config_class for each in classes))}
    source = "".join(inspect.getsource(sys.modules[name]) for name in sorted(modules))
    assert re.search(r"config\.num_hidden_layers\b", source)
    read_keys = [k for k in WITHOUT_EFFECT if re.search(rf"config\.{k}\b|^    {k}:", source, re.M)]
    assert read_keys == []


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_quantized_weights_are_refused(name):
    hf = {**CONFIGS["Qwen/Qwen3-8B"], name: {"bits": 4, "group_size": 64}}
    with pytest.raises(ValueError, match=f"config.json has a {name}, but quantized weights"):
        read(hf, find(hf).keys, harmless=())


def test_keys_that_could_have_an_effect_are_refused():
    hf = {**CONFIGS["microsoft/phi-4"], "attention_sink": 4}
    architecture = find(hf)
    with pytest.raises(ValueError, match="config.json has attention_sink=4, which is not"):
        read(hf, architecture.keys, harmless=architecture.harmless)
