"""Published configs of models are understood, all keys of them."""

import inspect
import re
import sys

import pytest
import transformers

from convert.keys import WITHOUT_EFFECT, read
from convert.registry import architectures, find
from tests.convert.published import CONFIGS

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


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_gives_the_sizes_of_transformers(name):
    hf = CONFIGS[name]
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless) | architecture.fields
    ours = architecture.model_class.Config(**fields)
    theirs = getattr(transformers, hf["architectures"][0]).config_class(**hf)
    for field, key in SAME.items():
        assert getattr(ours, field) == getattr(theirs, key)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rotary_fraction == rope.get("partial_rotary_factor", 1.0)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == size


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


def test_norms_with_a_tensor_for_each_head_are_refused():
    """StableLM 2 12B has a tensor for each head, which no row can express."""
    hf = {**CONFIGS["stabilityai/stable-code-3b"], "qk_layernorm": True}
    with pytest.raises(ValueError, match="qk_layernorm=True, which is not supported"):
        read(hf, find(hf).keys, harmless=find(hf).harmless)


def test_keys_that_could_have_an_effect_are_refused():
    hf = {**CONFIGS["microsoft/phi-4"], "attention_sink": 4}
    architecture = find(hf)
    with pytest.raises(ValueError, match="config.json has attention_sink=4, which is not"):
        read(hf, architecture.keys, harmless=architecture.harmless)
