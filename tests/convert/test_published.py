"""Published configs of models are understood, all keys of them."""

import pytest
import torch
import transformers
from flax import nnx

from convert.keys import read
from convert.model_on_disk import shapes_of
from convert.registry import find
from tests.convert.published import CONFIGS, ENCODERS


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_gives_the_sizes_of_transformers(name):
    hf = CONFIGS[name]
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless)
    fields |= architecture.fields
    ours = architecture.model_class.Config(**fields)
    theirs = getattr(transformers, hf["architectures"][0]).config_class(**hf)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    by_type = {"full": "full_attention", "window": "sliding_attention"}
    has_window = getattr(theirs, "layer_types", None) or ()
    if "sliding_attention" in has_window:
        types = [by_type.get(each, "full_attention") for each in ours.types]
        assert types == theirs.layer_types
    rope = theirs.rope_parameters
    if "full_attention" in rope:
        assert ours.window_rope_theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rotary_fraction == rope.get("partial_rotary_factor", 1.0)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == size


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
    ours = sorted(mapping.their_shape for mapping in mappings)
    assert ours == sorted(tuple(weight.shape) for weight in theirs.parameters())
    norms = [m.eps for m in theirs.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert {*norms} == {config.layer_norm_epsilon}
    assert config.num_heads == theirs.config.num_attention_heads
    assert config.init_stddev == theirs.config.initializer_range


def test_keys_without_effect_are_ignored_with_one_line(caplog):
    hf = {**CONFIGS["microsoft/phi-4"], "unsloth_version": "2025.1", "max_sequence_length": 4096}
    architecture = find(hf)
    with caplog.at_level("INFO"):
        read(hf, architecture.keys, harmless=architecture.harmless)
    (line,) = caplog.messages
    assert line.endswith("no effect and are ignored: unsloth_version, max_sequence_length")


def test_keys_that_could_have_an_effect_are_refused():
    hf = {**CONFIGS["microsoft/phi-4"], "attention_sink": 4}
    architecture = find(hf)
    with pytest.raises(ValueError, match="config.json has attention_sink=4, which is not"):
        read(hf, architecture.keys, harmless=architecture.harmless)
