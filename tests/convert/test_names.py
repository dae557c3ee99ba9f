"""Weight names in the variants found in published files, and loading some of the parameters."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from convert import from_hf
from convert.from_hf import load
from convert.keys import read
from convert.model_on_disk import shapes_of
from convert.registry import architectures, find
from convert.source import load_params, read_source
from convert.to_hf import describe
from models.layers.experts import ExpertsConfig
from tests.convert import cases, hf_files, test_clip


def rename(tensors: dict, new_name) -> None:
    for name in list(tensors):
        tensors[new_name(name)] = tensors.pop(name)


#: A variant found in published files -> (case, a change of its tensors without a meaning).
HARMLESS = {
    "no prefix": ("gpt2", lambda t: rename(t, lambda n: n.removeprefix("transformer."))),
    "needless prefix": ("llama_base", lambda t: rename(t, lambda n: f"model.{n}")),
    "needless prefix and head": (
        "bert_base",
        lambda t: (
            rename(t, lambda n: f"bert.{n}"),
            t.update({"cls.predictions.bias": torch.ones(cases.VOCAB)}),
        ),
    ),
    "gamma and beta": (
        "bert_mlm",
        lambda t: rename(
            t,
            lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ),
        ),
    ),
    "buffers": (
        "gpt2",
        hf_files.add(
            transformer__h__0__attn__bias=torch.ones(1, 1, 9, 9, dtype=torch.uint8),
            transformer__h__1__attn__masked_bias=torch.tensor(-1e4),
        ),
    ),
    "positions": ("bert_mlm", hf_files.add(bert__embeddings__position_ids=torch.arange(9)[None])),
    "frequencies": (
        "llama",
        hf_files.add(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(5)),
    ),
    "tied twice": ("opt", lambda t: t.update(_tied(t, "model.decoder.embed_tokens.weight"))),
    "tied under the other name": (
        "gpt2",
        lambda t: t.update({"lm_head.weight": t.pop("transformer.wte.weight")}),
    ),
    "a tied decoder without the embedding": (
        "modernbert_mlm",
        lambda t: t.update({"decoder.weight": t.pop("model.embeddings.tok_embeddings.weight")}),
    ),
    "tied four times": (
        "t5",
        lambda t: t.update(
            {**_tied(t, "shared.weight"), "encoder.embed_tokens.weight": t["shared.weight"]}
        ),
    ),
    "another head": (
        "bert_mlm",
        hf_files.add(
            bert__pooler__dense__weight=torch.ones(39, 39),
            bert__pooler__dense__bias=torch.ones(39),
            cls__seq_relationship__bias=torch.ones(2),
        ),
    ),
    "unread bias": (
        "t5",
        hf_files.add(
            decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight=(
                torch.ones(8, 3)
            )
        ),
    ),
}


def _tied(tensors: dict, name: str) -> dict:
    return {"lm_head.weight": tensors[name]}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("what", HARMLESS)
def test_published_forms_of_names_are_read(what, tmp_path):
    case, change = HARMLESS[what]
    cases.save(case, tmp_path / "plain")
    cases.save(case, tmp_path / "changed")
    hf_files.edit(tmp_path / "changed", change)
    expected = hf_files.parameters(tmp_path / "plain")
    found = hf_files.parameters(tmp_path / "changed")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert_mlm", "roberta_mlm", "t5"])
def test_config_without_architectures_gets_the_default_one(name, tmp_path):
    directory = cases.save(name, tmp_path / "theirs")
    hf_files.edit_config(directory, architectures=None)
    architecture = read_source(directory).architecture
    assert architecture is not None and architecture.name == cases.CASES[name][0]


def test_pooler_is_left_out_if_the_file_has_none(tmp_path):
    cases.save("bert_base", tmp_path / "theirs")
    hf_files.edit(
        tmp_path / "theirs", lambda t: [t.pop(n) for n in list(t) if n.startswith("pooler")]
    )
    assert load(tmp_path / "theirs").pooler is None


def test_bert_with_additional_heads_is_read_completely(tmp_path):
    """The first published BERTs are named BertForMaskedLM, but contain the head for pairs too."""
    whole = cases.save("bert_pretraining", tmp_path / "whole")
    named = cases.save("bert_pretraining", tmp_path / "named")
    hf_files.edit_config(named, architectures=["BertForMaskedLM"])
    expected = hf_files.parameters(whole)
    found = hf_files.parameters(named)
    assert "pooler" in found
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    source = read_source(named)
    assert describe(source.model, source.config, source)[0].name == "BertForPreTraining"


def test_t5_head_is_tied_according_to_its_files(tmp_path):
    """Transformers also decides by the files, regardless of the config."""
    cases.save("t5_v1.1", tmp_path / "untied")
    assert load(tmp_path / "untied").output_embedding is not None
    hf_files.edit(tmp_path / "untied", lambda t: t.pop("lm_head.weight"))
    assert load(tmp_path / "untied").output_embedding is None


def test_parameters_can_be_read_partially_and_with_another_padding(tmp_path):
    """A run needs this if it has another head, or another padding of the vocabulary."""
    cases.save("bert_mlm", tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    shapes = {"token_embedding": (224, 39), "embedding_norm": {"bias": (39,)}}
    abstract = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    expected = cases.make("bert_mlm").bert.embeddings.word_embeddings.weight.detach().numpy()
    for path in (tmp_path / "theirs", tmp_path / "ours"):
        params = load_params(read_source(path), abstract)
        table = np.asarray(params["token_embedding"])
        np.testing.assert_array_equal(table[: cases.VOCAB], expected)
        assert not table[cases.VOCAB :].any()
        assert params["token_embedding"].sharding == sharding
        abstract_wrong = {"embedding_norm": {"bias": jax.ShapeDtypeStruct((40,), np.float32)}}
        with pytest.raises(ValueError, match=r"\[39\].*\[40\]|\[40\].*\[39\]"):
            load_params(read_source(path), abstract_wrong)
        with pytest.raises(ValueError, match="it has no pooler.bias"):
            load_params(
                read_source(path), {"pooler": {"bias": jax.ShapeDtypeStruct((39,), np.float32)}}
            )


@functools.cache
def known_parameters(model_class: type) -> set[str]:
    """Return the paths of all parameters that the cases of a model class have."""
    paths: set[str] = set()
    models = {name: cases.make(name) for name in cases.CASES}
    models |= {name: test_clip.make(name) for name in test_clip.CASES}
    models |= {name: test_clip.make_encoder(name) for name in test_clip.ENCODERS}
    for name, theirs in models.items():
        hf = json.loads(theirs.config.to_json_string(use_diff=False))
        architecture = find({**hf, "architectures": [type(theirs).__name__]})
        if architecture.model_class is not model_class:
            continue
        fields = read(hf, architecture.keys, harmless=list(hf)) | dict(architecture.fields)
        fields |= {"tie_embeddings": name not in cases.UNTIED_T5} if "t5" in name else {}
        fields |= {"use_pooler": True} if name == "vit_base" else {}
        fields |= {"mtp_depths": 1} if name in ("deepseek3", "glm4_moe") else {}
        variants = [fields]
        if name in ("deepseek3", "glm4_moe"):
            of_experts = {"dense_layers", *(f.name for f in dataclasses.fields(ExpertsConfig))}
            dense = {key: value for key, value in fields.items() if key not in of_experts}
            has_gate = {"shared_expert_gate": True, "norm": "layer"}
            variants += [dense | {"mlp_bias": True}, fields | has_gate]
        for variant in variants:
            paths.update(
                re.sub(r"block_\d+\.", "", path).removeprefix("last_")
                for path in _paths(model_class, variant)
            )
    return paths


def _paths(model_class: Any, fields: dict[str, Any]) -> Iterable[str]:
    config = model_class.Config(**fields)
    model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    return shapes_of(nnx.to_pure_dict(nnx.split(model)[1]))


@pytest.mark.thorough(but=["GPT2Model", "OPTForCausalLM", "OPTModel"])
@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", architectures())
def test_every_row_matches_a_parameter_of_some_model(name):
    """A typo in a row would go unnoticed: the row would pass for one of another variant."""
    architecture = architectures()[name]
    # Both stacks of LLaMA and of ModernBERT have the same rows.
    wanted = {row.ours.removeprefix("last_") for row in architecture.rows}
    assert wanted <= known_parameters(architecture.model_class)
