"""The translation of config.json: old forms of keys, defaults, and keys that are refused."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import transformers

from convert import from_hf, to_hf
from convert.from_hf import load
from convert.keys import REQUIRED, Key, read, write
from convert.registry import architectures
from convert.source import read_source
from models.text.llama import LlamaConfig
from models.vision.swin import SwinConfig
from tests.convert import cases, hf_files


def fields_of(name: str, class_name: str | None = None, /, **changes) -> dict:
    """Return the config fields read from a case's config.json.

    Args:
        name: case.
        class_name: architecture; None for the one of the case.
        **changes: keys to change before; `...` removes a key.
    """
    class_name = class_name or cases.CASES[name][0]
    config = json.loads(cases.make(name).config.to_json_string())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not ...:
            config[key] = value
    architecture = architectures()[class_name]
    fields = read(config, architecture.keys, harmless=architecture.harmless)
    return {**fields, **architecture.fields}


REFUSED = [
    ("gpt2", {"activation_function": "mish"}, "activation_function='mish'.*'gelu_new'"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ("gpt2", {"n_head": ...}, "no 'n_head'"),
    ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights=None"),
    ("opt", {"do_layer_norm_before": None}, "no 'do_layer_norm_before'"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads=.*--harmless=pruned_heads"),
    ("opt", {"enable_bias": False}, "enable_bias=False.*Galactica"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "must be the same for all layers"),
    ("llama", {"rope_parameters": "yarn"}, r"config\.json: rope_parameters is 'yarn', but must be"),
    ("llama", {"rope_scaling": [1]}, r"config\.json: rope_scaling is \[1\], but must be of type"),
    ("llama", {"head_dim": None, "num_attention_heads": 0}, "num_key_value_heads=.*cannot be read"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
    ("llama", {"sliding_window": 9}, "sliding_window=9"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    (
        "qwen2_windowed",
        {"layer_types": ["sliding_attention", "chunked_attention", "sliding_attention"]},
        "layer_types=.*must have one of sliding_attention, full_attention for each layer",
    ),
    ("qwen2_windowed", {"layer_types": ["full_attention"]}, "with num_hidden_layers=3"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3", {"sliding_window": None}, "sliding_window=None with layer_types"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types=.*full_attention"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("deepseek2_moe", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*greedy"),
    ("deepseek2_moe", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("deepseek2_moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ("deepseek2_moe", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("deepseek2_moe", {"mlp_bias": True}, "mlp_bias=True.*layers with experts"),
    ("deepseek2_moe", {"moe_intermediate_size": {}}, "moe_intermediate_size=.*cannot be read"),
    ("deepseek3", {"topk_method": "greedy"}, "topk_method='greedy'.*noaux_tc"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] .* must have an entry per layer"),
    (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
        "rope_type='yarn' for sliding_attention",
    ),
    ("bert_mlm", {"position_embedding_type": "relative_key"}, "position_embedding_type="),
    ("bert_mlm", {"is_decoder": True}, "is_decoder=True"),
    ("bert_sequence", {"problem_type": "regression"}, "problem_type='regression'"),
    ("roberta_mlm", {"pad_token_id": None}, "no pad_token_id"),
    ("electra_mlm", {"hidden_act": "relu"}, "hidden_act='relu'.*are 'gelu'; the head has GELU"),
    ("modernbert_mlm", {"layer_types": ["full_attention"]}, "with num_hidden_layers=7"),
    (
        "modernbert_mlm",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_type='yarn' for full_attention",
    ),
    ("modernbert_mlm", {"rope_scaling": {"factor": 2.0}}, "rope_scaling="),
    ("modernbert_sequence", {"classifier_pooling": "max"}, "classifier_pooling='max'"),
    (
        "t5",
        {"feed_forward_proj": "gated-mish", "dense_act_fn": ...},
        "feed_forward_proj='gated-mish'",
    ),
    ("t5", {"is_decoder": True}, "is_decoder=True"),
]


@pytest.mark.parametrize("name, changes, expected", REFUSED)
def test_keys_that_change_the_computation_are_refused(name, changes, expected):
    with pytest.raises(ValueError, match=expected):
        fields_of(name, **changes)


@pytest.mark.parametrize(
    "name, key, value, field",
    [
        ("llama", "rope_theta", 0, "rope_theta"),
        ("llama", "head_dim", 0, "head_dim"),
        ("llama", "num_key_value_heads", 0, "num_kv_heads"),
        ("qwen3", "head_dim", 0, "head_dim"),
    ],
)
def test_zero_is_a_value_and_not_an_absent_key(name, key, value, field):
    fields = fields_of(name, rope_parameters=..., **{key: value})
    assert fields[field] == value
    with pytest.raises(ValueError, match=rf"model\.{field}=0.* must be"):
        LlamaConfig(**fields)


@pytest.mark.parametrize("value", [10**400, math.inf])
def test_huge_numbers_in_config_json_are_refused_by_name(value, tmp_path):
    cases.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": value}))
    with pytest.raises(ValueError, match=r"config\.json.*"):
        load(tmp_path)


def test_rope_type_of_a_wrong_type_is_refused_by_name():
    fields = fields_of("llama", rope_parameters={"rope_type": ["yarn"], "factor": 2.0})
    with pytest.raises(ValueError, match=r"rope_type=\['yarn'\] is unknown; choose default"):
        LlamaConfig(**fields)


def test_model_with_another_head_is_written_as_the_same_family(tmp_path):
    source = read_source(cases.save("xlm_roberta_mlm", tmp_path))
    config = dataclasses.replace(source.config, head="sequence")
    architecture, _ = to_hf.describe("bert", config, source)
    assert architecture.name == "XLMRobertaForSequenceClassification"


def test_unknown_keys_are_accepted_if_empty_or_declared_harmless(tmp_path):
    assert fields_of("gpt2", new_feature=False) == fields_of("gpt2")
    directory = cases.save("gpt2", tmp_path / "theirs")
    hf_files.edit_config(directory, new_feature="on", other=3)
    with pytest.raises(ValueError, match="new_feature='on'"):
        load(directory)
    args = [str(directory), str(tmp_path / "ours"), "--harmless=new_feature,other"]
    assert from_hf.main(args) == 0
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["new_feature"] == "on"


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}


@pytest.mark.parametrize(
    "changes, theta, scaling",
    [
        ({"rope_theta": 7.0}, 7.0, None),
        ({"rope_theta": 7.0, "rope_scaling": None}, 7.0, None),
        ({}, 10000.0, None),
        (
            {"rope_theta": 7.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            7.0,
            {"rope_type": "llama3", **LLAMA3},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            10000.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 7.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            7.0,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
    ],
)
def test_rope_is_read_in_old_and_new_forms(changes, theta, scaling):
    fields = fields_of("llama", **{"rope_parameters": ..., **changes})
    assert (fields["rope_theta"], fields["rope_scaling"]) == (theta, scaling)
    LlamaConfig(**{k: v for k, v in fields.items()})


@pytest.mark.parametrize(
    "name, changes, expected",
    [
        ("llama", {"head_dim": ...}, {"head_dim": 6}),
        ("llama", {"num_key_value_heads": ...}, {"num_kv_heads": 6}),
        ("llama", {"head_dim": None}, {"head_dim": 6, "num_kv_heads": 2}),
        ("mistral", {"sliding_window": ...}, {"sliding_window": 4096}),
        ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
        ("qwen2", {"sliding_window": 9}, {"sliding_window": None, "layer_types": ()}),
        (
            "qwen2_windowed",
            {"layer_types": ...},
            {"sliding_window": 4, "layer_types": ("full", "window", "window")},
        ),
        ("bert_sequence", {"id2label": ..., "num_labels": 4}, {"num_labels": 4}),
        ("bert_sequence", {"id2label": ...}, {"num_labels": 2}),
        ("opt", {"word_embed_proj_dim": ...}, {"token_embed_dim": None}),
        ("t5", {"num_decoder_layers": ...}, {"num_decoder_layers": 3}),
        (
            "t5",
            {"scale_decoder_outputs": ..., "tie_word_embeddings": False},
            {"scale_outputs": False},
        ),
        (
            "t5",
            {"feed_forward_proj": "gated-silu", "dense_act_fn": ..., "is_gated_act": ...},
            {"is_gated": True, "activation": "silu"},
        ),
    ],
)
def test_absent_keys_have_the_library_defaults(name, changes, expected):
    fields = fields_of(name, **changes)
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.drawn(20)
@pytest.mark.parametrize("name", cases.CASES)
def test_defaults_equal_the_library_defaults(name):
    """A config.json may omit keys that have defaults, except the sizes that we require."""
    class_name = cases.CASES[name][0]
    config = json.loads(getattr(transformers, class_name).config_class().to_json_string(False))
    architecture = architectures()[class_name]
    without_experts = {"first_k_dense_replace"} & config.keys()  # by default, all layers have them
    config |= dict.fromkeys(without_experts, config.get("num_hidden_layers"))
    full = read(config, architecture.keys, harmless=architecture.harmless)
    required = [k.theirs for k in architecture.keys if isinstance(k, Key) and k.default is REQUIRED]
    # A file has layers for later tokens only if its config says so.
    stated = {"num_nextn_predict_layers"} & config.keys()
    brief = {key: config[key] for key in (*required, *without_experts, *stated)}
    assert read(brief, architecture.keys, harmless=architecture.harmless) == full


def test_write_changes_only_what_our_config_changed():
    architecture = architectures()["LlamaForCausalLM"]
    original = json.loads(cases.make("llama_llama3").config.to_json_string())
    fields = fields_of("llama_llama3")
    harmless = architecture.harmless
    assert write(fields, architecture.keys, original, harmless=harmless) == original
    changed = write({**fields, "max_positions": 99}, architecture.keys, original, harmless=harmless)
    assert changed == {**original, "max_position_embeddings": 99}
    plain = write(
        {**fields, "rope_scaling": None, "rope_theta": 3.0},
        architecture.keys,
        original,
        harmless=harmless,
    )
    assert "rope_parameters" not in plain
    assert (plain["rope_theta"], plain["rope_scaling"]) == (3.0, None)


def test_models_without_a_matching_architecture_are_rejected(tmp_path, capsys):
    cases.save("llama", tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    config = (tmp_path / "ours" / "config.yaml").read_text()
    assert "activation: silu" in config
    changed = config.replace("activation: silu", "activation: gelu")
    (tmp_path / "ours" / "config.yaml").write_text(changed)
    assert to_hf.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 2
    assert "LlamaForCausalLM, cannot have model.activation='gelu'" in capsys.readouterr().err


@pytest.mark.thorough
def test_model_with_another_head_gets_another_architecture(tmp_path):
    """This is the case after fine-tuning: hf/ describes the model that training started from."""
    cases.save("bert_mlm", tmp_path / "began_with")
    cases.save("bert_sequence", tmp_path / "became")
    from_hf.convert(tmp_path / "began_with", tmp_path / "first")
    from_hf.convert(tmp_path / "became", tmp_path / "second")
    kept = json.loads((tmp_path / "first" / "hf" / "config.json").read_text())
    config = {**kept, "hidden_act": "gelu", "custom": "kept"}
    (tmp_path / "second" / "hf" / "config.json").write_text(json.dumps(config))
    to_hf.convert(tmp_path / "second", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["architectures"] == ["BertForSequenceClassification"]
    assert len(written["id2label"]) == 5 and written["custom"] == "kept"
    np.testing.assert_array_equal(
        hf_files.parameters(tmp_path / "back", harmless=["custom"])["classifier"]["kernel"],
        hf_files.parameters(tmp_path / "became")["classifier"]["kernel"],
    )


def test_swin_whose_windows_are_larger_than_a_stage_is_not_exported():
    """Version 1 of transformers' Swin has tables for whole windows; version 2 has smaller ones."""
    sizes: dict[str, Any] = {
        "image_size": 32,
        "num_channels": 3,
        "patch_size": 4,
        "embed_dim": 12,
        "depths": (2, 2),
        "num_heads": (2, 2),
        "window_size": 8,
    }

    def exported(**changes: Any) -> tuple[str, int]:
        architecture, hf = to_hf.describe("swin", SwinConfig(**{**sizes, **changes}), None)
        return architecture.name, hf["window_size"]

    assert exported(window_size=4) == ("SwinForImageClassification", 4)
    assert exported(version=2) == ("Swinv2ForImageClassification", 8)
    with pytest.raises(
        ValueError, match=r"SwinFor.* cannot have model.window_size=8 in stage 1, .* 4 × 4 patches"
    ):
        exported()
