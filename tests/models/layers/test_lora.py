"""Adapters equal their formulas, start without an effect, and are found by patterns."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.adapters import add_adapters, is_adapter
from models.layers.basic import Linear
from models.layers.lora import LoraConfig, use_dropout
from models.text.gpt2 import GPT2
from models.text.llama import Llama

CONFIG = GPT2.Config(vocab_size=64, max_positions=16, num_layers=2, num_heads=2, embed_dim=16)
EXPERTS = Llama.Config(
    vocab_size=64,
    max_positions=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    embed_dim=16,
    mlp_dim=24,
    num_experts=4,
    init_stddev=0.3,
)
TOKENS = jnp.arange(8)[None]


def gpt2(**lora) -> GPT2:
    model = GPT2(CONFIG, rngs=nnx.Rngs(0))
    add_adapters(model, LoraConfig(**lora), seed=0)
    return model


def params_of(model) -> dict:
    return nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.split(model)[1]))


@pytest.mark.thorough
def test_adapters_start_without_an_effect_and_leave_other_parameters():
    plain = gpt2()
    for variant in ({}, {"use_dora": True}):
        adapted = gpt2(rank=4, **variant)
        np.testing.assert_allclose(adapted(TOKENS), plain(TOKENS), atol=1e-6)
        found = params_of(adapted)
        for path, value in params_of(plain).items():
            np.testing.assert_array_equal(found[path], value)
        words = {path[-1] for path in found if is_adapter(path)}
        assert words == {"a", "b", *(["magnitude"] if variant else [])}


@pytest.mark.thorough
def test_layers_of_a_stack_start_with_different_values():
    a = params_of(gpt2(rank=4))[("decoder", "layers", "mlp", "up", "lora", "a")]
    b = params_of(gpt2(rank=4))[("decoder", "layers", "attention", "qkv", "lora", "a")]
    assert not np.array_equal(a[0], a[1]) and not np.array_equal(a[0], b[0])
    assert np.abs(a).max() <= 1 / np.sqrt(CONFIG.embed_dim)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_linear_with_an_adapter_equals_its_formula(use_rslora, use_dora):
    linear = Linear({"heads": 2, "head_dim": 3}, {"embed": 5}, stddev=0.1, rngs=nnx.Rngs(0))

    class Model(nnx.Module):
        def __init__(self):
            self.linear = linear

    config = LoraConfig(
        rank=4, alpha=6, use_rslora=use_rslora, use_dora=use_dora, targets=("linear",)
    )
    add_adapters(Model(), config, seed=0)
    lora: Any = linear.lora
    assert linear.bias is not None
    rng = np.random.default_rng(0)
    lora.b[...] = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    linear.bias[...] = jnp.asarray(rng.normal(size=5), jnp.float32)
    if use_dora:
        lora.magnitude[...] = jnp.asarray(rng.normal(size=5), jnp.float32)
    x = rng.normal(size=(7, 2, 3))

    kernel = np.asarray(linear.kernel[...], np.float64).reshape(6, 5)
    a = np.asarray(lora.a[...], np.float64).reshape(6, 4)
    b = np.asarray(lora.b[...], np.float64)
    adapted = kernel + (6 / (2 if use_rslora else 4)) * a @ b
    if use_dora:
        adapted *= np.asarray(lora.magnitude[...], np.float64) / np.linalg.norm(adapted, axis=0)
    expected = x.reshape(7, 6) @ adapted + np.asarray(linear.bias[...], np.float64)
    np.testing.assert_allclose(linear(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)


def get_mlp(model: Any) -> Any:
    return model.decoder.layers.mlp


@pytest.mark.thorough
def test_experts_with_adapters_equal_merged_experts():
    """A router and experts compute as with W + scale · A · B, which numpy computes here."""
    config = dataclasses.replace(EXPERTS, router_loss=0.1)
    model = Llama(config, rngs=nnx.Rngs(0))
    merged = Llama(config, rngs=nnx.Rngs(0))
    lora = LoraConfig(rank=3, alpha=6, targets=("mlp.*",))
    add_adapters(model, lora, seed=0)
    rng = np.random.default_rng(0)
    mlp, merged_mlp = (get_mlp(each) for each in (model, merged))
    for name in ("router", "gate", "up", "down"):
        adapter = getattr(mlp, f"{name}_lora")
        weight = getattr(mlp, name)
        assert adapter.a.shape == (*weight.shape[:-1], 3)
        experts = adapter.a[...].reshape(-1, *adapter.a.shape[-2:])
        assert not np.array_equal(experts[0], experts[1])
        adapter.b[...] = jnp.asarray(0.3 * rng.normal(size=adapter.b.shape), jnp.float32)
        a, b = (np.asarray(x[...], np.float64) for x in (adapter.a, adapter.b))
        merged_weight = np.asarray(weight[...], np.float64) + 2 * a @ b
        getattr(merged_mlp, name)[...] = jnp.asarray(merged_weight, jnp.float32)
    plain = Llama(config, rngs=nnx.Rngs(0))(TOKENS)
    assert np.abs(model(TOKENS) - plain).max() > 0.1
    np.testing.assert_allclose(model(TOKENS), merged(TOKENS), atol=1e-4)


@pytest.mark.parametrize("variant", [{"use_dora": True}, {"dropout": 0.1}])
def test_experts_have_plain_adapters_only(variant):
    message = "mlp.down belongs to experts, whose adapters are plain LoRA without dropout"
    with pytest.raises(ValueError, match=re.escape(message)):
        add_adapters(Llama(EXPERTS, rngs=nnx.Rngs(0)), LoraConfig(rank=2, **variant), seed=0)


@pytest.mark.thorough
def test_dropout_is_drawn_per_example_and_per_adapter():
    model = gpt2(rank=4, dropout=0.5)
    block = nnx.merge(
        nnx.graphdef(model.decoder.layers),
        jax.tree.map(lambda x: x[0], nnx.state(model.decoder.layers)),
    )
    for adapter in (block.mlp.up.lora, block.mlp.down.lora):
        adapter.b[...] = jnp.ones(adapter.b.shape)
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    x = jnp.ones((3, 4, 16))
    use_dropout(block, keys)
    assert block.mlp.up.lora.site != block.mlp.down.lora.site
    batch = block.mlp.up(x)
    assert not np.allclose(batch[0], batch[1])
    use_dropout(block, keys[1:2])
    np.testing.assert_array_equal(block.mlp.up(x[1:2]), batch[1:2])
    use_dropout(block, None)
    np.testing.assert_array_equal(block.mlp.up(x)[0], block.mlp.up(x)[1])


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("attention.*",), {"attention.qkv", "attention.out"}),
        (("qkv", "mlp.up"), {"attention.qkv", "mlp.up"}),
        (("decoder.layers.mlp.down",), {"mlp.down"}),
        (("*",), {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
    ],
)
def test_patterns_choose_layers(targets, found):
    paths = params_of(gpt2(rank=2, targets=targets))
    assert {".".join(path[2:4]) for path in paths if is_adapter(path)} == found


def test_pattern_that_matches_nothing_is_rejected():
    message = "lora.targets: 'attention.q' matches no linear layer; the nearest are decoder.layers"
    with pytest.raises(ValueError, match=re.escape(message)):
        gpt2(rank=2, targets=("mlp.up", "attention.q"))


@pytest.mark.parametrize(
    ("pattern", "ours"), [("all-linear", "*"), ("c_attn", "attention.qkv"), ("fc2", "mlp.down")]
)
def test_names_of_peft_lead_to_ours(pattern, ours):
    message = f"{pattern!r} matches no linear layer; that is a name of PEFT; here it is {ours!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        gpt2(rank=2, targets=(pattern,))
    assert gpt2(rank=2, targets=(ours,)) is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "lora.rank=0 must be at least 1, or None"),
        ({"alpha": 0.0}, "lora.alpha=0.0 must be more than 0"),
        ({"dropout": 1.0}, "lora.dropout=1.0 must be"),
        ({"targets": (1,)}, "lora.targets"),
        ({"use_dora": "yes"}, "lora.use_dora"),
    ],
)
def test_bad_values_are_rejected(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LoraConfig(**values)
