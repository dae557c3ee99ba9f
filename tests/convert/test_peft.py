"""Adapters of PEFT are read and written to the bit, and compute the same."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.numpy import load_file, save_file

from convert import from_hf, to_hf
from convert.adapters.write_peft import write_adapter
from convert.from_hf import load
from convert.source import read_source

#: float32, in another order of summation.
TOLERANCE = 1e-5

_IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 3}
_HEADS = {"num_attention_heads": 4, "num_hidden_layers": 2}
#: Model -> (class, config, layers that get an adapter, further settings of PEFT).
MODELS = {
    "llama": (
        hf.LlamaForCausalLM,
        {**_HEADS, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2},
        ["q_proj", "v_proj", "o_proj", "down_proj"],
        {},
    ),
    "gpt2": (
        hf.GPT2LMHeadModel,
        {"n_layer": 2, "n_head": 2, "n_embd": 16, "bos_token_id": 1, "eos_token_id": 1},
        ["c_attn", "c_proj"],
        {"fan_in_fan_out": True},
    ),
    "bert": (
        hf.BertForSequenceClassification,
        {**_HEADS, "hidden_size": 16, "intermediate_size": 24, "num_labels": 3},
        ["query", "dense"],
        {"task_type": "SEQ_CLS"},
    ),
    "t5": (
        hf.T5ForConditionalGeneration,
        {"num_layers": 2, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 24},
        [
            "encoder.block.0.layer.0.SelfAttention.q",
            "encoder.block.1.layer.0.SelfAttention.q",
            "wi",
        ],
        {},
    ),
    "vit": (
        hf.ViTForImageClassification,
        {**_HEADS, **_IMAGES, "hidden_size": 16, "intermediate_size": 24},
        ["q_proj", "o_proj", "fc1"],
        {"modules_to_save": ["classifier"]},
    ),
    "swin": (
        hf.SwinForImageClassification,
        {**_IMAGES, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 2},
        ["v_proj", "fc2", "reduction"],
        {"modules_to_save": ["classifier"]},
    ),
}
VARIANTS = {"LoRA": {}, "DoRA": {"use_dora": True, "use_rslora": True}}


def make(name: str, variant: str, directory: Path) -> peft.PeftModel:
    """Return a model with adapters of random values; it is saved in base/ and adapter/."""
    model_class, config, targets, settings = MODELS[name]
    torch.manual_seed(0)
    vocab = {} if "image_size" in config else {"vocab_size": 64}
    model_class(model_class.config_class(**vocab, **config)).save_pretrained(directory / "base")
    base = model_class.from_pretrained(directory / "base", attn_implementation="eager")
    settings = {"r": 4, "lora_alpha": 6, "target_modules": targets, **settings, **VARIANTS[variant]}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(str(directory / "adapter"))
    return model


TOKENS = np.random.default_rng(0).integers(2, 64, (2, 9))


IMAGES = np.random.default_rng(0).standard_normal((2, 16, 16, 3), np.float32)


def theirs(model) -> np.ndarray:
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.tensor(IMAGES).permute(0, 3, 1, 2)}
    else:
        inputs = {"input_ids": torch.tensor(TOKENS)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        return model(**inputs).logits.numpy()


def ours(path: Path) -> np.ndarray:
    model = load(path)
    if type(model).__name__ in ("ViT", "Swin"):
        return np.asarray(model(jnp.asarray(IMAGES)))
    tokens = jnp.asarray(TOKENS)
    extra = (tokens,) if type(model).__name__ == "T5" else ()
    return np.asarray(model(tokens, *extra))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(
            name, variant, marks=[] if (name, variant) == ("gpt2", "DoRA") else pytest.mark.thorough
        )
        for name in MODELS
        for variant in VARIANTS
    ],
)
@pytest.mark.drawn(3)
def test_adapters_compute_the_same_and_round_trip_to_the_bit(name, variant, tmp_path):
    expected = theirs(make(name, variant, tmp_path))
    np.testing.assert_allclose(ours(tmp_path / "adapter"), expected, atol=TOLERANCE)

    from_hf.convert(tmp_path / "adapter", tmp_path / "run")
    np.testing.assert_allclose(ours(tmp_path / "run"), expected, atol=TOLERANCE)

    to_hf.convert(tmp_path / "run", tmp_path / "back")
    before, after = (
        load_file(tmp_path / each / "adapter_model.safetensors") for each in ("adapter", "back")
    )
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype
        np.testing.assert_array_equal(before[key], after[key])
    model_class = MODELS[name][0]
    base = model_class.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "back").eval()
    np.testing.assert_array_equal(theirs(again), expected)

    to_hf.convert(tmp_path / "run", tmp_path / "merged", merge=True)
    merged = model_class.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    np.testing.assert_allclose(theirs(merged), expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A directory with base/ and adapter/ of a GPT-2."""
    directory = tmp_path_factory.mktemp("peft")
    make("gpt2", "LoRA", directory)
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": "all"}, "bias='all', which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which is not supported"),
        ({"rank_pattern": {"c_attn": 2}}, "rank_pattern={'c_attn': 2}, which is not supported"),
        ({"use_qalora": True}, "use_qalora=True, which is not supported; merge the adapter"),
        ({"r": "4"}, "r is '4', but must be of type int"),
        ({"r": 3}, "has the shape"),
        (
            {"use_dora": True},
            "lacks 6 tensor(s): transformer.h.0.attn.c_attn.lora_magni",
        ),
        ({"base_model_name_or_path": "gpt2"}, "='gpt2', which is neither a directory here nor"),
        ({"base_model_name_or_path": None}, "=None, which is neither a directory here nor"),
    ],
)
def test_unsupported_configs_are_refused(adapter, tmp_path, change, message):
    for file in (adapter / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError) as error:
        read_source(tmp_path)
    assert message in str(error.value)


def test_other_kinds_of_adapters_are_refused_by_name(tmp_path):
    for kind in {*peft.PeftType} - {peft.PeftType.LORA}:
        config = {"peft_type": kind.value, "base_model_name_or_path": "gpt2", "feedforward": ["a"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        reason = f"has peft_type='{kind.value}', which is not supported; choose 'LORA', or merge"
        with pytest.raises(ValueError, match=reason):
            read_source(tmp_path)


def _without_a_layer(tensors):
    return {name: x for name, x in tensors.items() if "h.1.attn.c_attn" not in name}


def _with_a_stranger(tensors):
    return tensors | {"base_model.model.transformer.h.0.attn.extra.lora_A.weight": np.zeros((4, 4))}


def test_a_trained_embedding_that_is_tied_is_refused(adapter, tmp_path):
    """PEFT would train only one of its two uses."""
    base = hf.GPT2LMHeadModel.from_pretrained(adapter / "base")
    settings = peft.LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["wte"], fan_in_fan_out=True
    )
    peft.get_peft_model(base, settings).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"has transformer\.wte, whose weight is also lm_head"):
        read_source(tmp_path)
    source = read_source(adapter / "adapter")
    assert source.architecture is not None
    lora = dataclasses.replace(source.lora, also_trained=("token_embedding",))
    with pytest.raises(ValueError, match=r"lora\.also_trained has transformer\.wte.* --merge"):
        changed = dataclasses.replace(source, lora=lora)
        write_adapter(changed, source.architecture, tmp_path / "out", None, base=None)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
    "ignore:fan_in_fan_out is set to True:UserWarning",
    "ignore:Setting `save_embedding_layers`:UserWarning",
)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["c_attn"], "layers_to_transform": [1]},
            r"h\.0\.attn\.c_attn has no adapter, but other layers have such adapters, .*; merge",
        ),
        (
            {"target_modules": ["c_attn", "wpe"]},
            r"transformer\.wpe\.lora_embedding_A belongs to an adapter of an embedding.*; merge",
        ),
        (
            {"target_modules": ["c_attn", "lm_head"]},
            r"lm_head\..* belongs to a layer that shares its weight with .*; merge",
        ),
    ],
)
def test_adapters_of_some_layers_and_of_embeddings_are_refused(
    adapter, tmp_path, settings, message
):
    base = hf.GPT2LMHeadModel.from_pretrained(adapter / "base")
    config = peft.LoraConfig(r=2, fan_in_fan_out=True, **settings)
    peft.get_peft_model(base, config).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        read_source(tmp_path)


def test_adapters_of_adapters_are_refused(adapter, tmp_path):
    config = json.loads((adapter / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"which has adapters itself; merge these first"):
        read_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_layer, "transformer.h.1.attn.c_attn has no adapter, but other layers have"),
        (_with_a_stranger, "has unknown 1 tensor(s): transformer.h.0.attn.extra.lora_A.weight"),
    ],
)
def test_other_tensors_are_refused(adapter, tmp_path, change, message):
    config = (adapter / "adapter" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    file = "adapter_model.safetensors"
    save_file(change(load_file(adapter / "adapter" / file)), tmp_path / file)
    with pytest.raises(ValueError) as error:
        read_source(tmp_path)
    assert message in str(error.value)


def test_pickles_are_refused(adapter, tmp_path):
    config = (adapter / "adapter" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"adapter_model.bin is a pickle, which can run code"):
        read_source(tmp_path)
