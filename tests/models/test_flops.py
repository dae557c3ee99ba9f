"""Tests of FLOP formulas against the matrix products of the traced models."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.flops import attention_flops, num_tokens, traced_flops, train_flops
from models.text.bert import Bert, BertConfig
from models.text.gpt2 import GPT2, GPT2Config
from models.text.llama import Llama, LlamaConfig
from models.text.modernbert import ModernBert, ModernBertConfig
from models.text.opt import OPT, OPTConfig
from models.text.t5 import T5, T5Config

B = 3
S = 11
T = 7
VOCAB = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_multiple": VOCAB,  # the padding of a table is multiplied, but does not count
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 24,
}
OF_BERT: dict[str, Any] = SIZES | {"max_positions": 16, "mlp_dim": 40, "dropout": 0.0}
OF_LLAMA: dict[str, Any] = SIZES | {
    "max_positions": 16,
    "num_kv_heads": 2,
    "head_dim": 10,
    "mlp_dim": 40,
}
#: A window that is longer than the sequence hides nothing.
PATTERN: dict[str, Any] = {
    "num_layers": 3,
    "layer_types": ("window", "full"),
    "sliding_window": 16,
    "attention_softcap": 5.0,
}
OF_MODERNBERT: dict[str, Any] = OF_BERT | {"num_layers": 7, "sliding_window": 16}
LATENTS: dict[str, Any] = {
    "num_kv_heads": 4,
    "latent_dim": 9,
    "latent_rotary_dim": 6,
    "value_dim": 8,
}
OF_T5: dict[str, Any] = SIZES | {
    "num_decoder_layers": 3,
    "head_dim": 5,
    "mlp_dim": 40,
    "dropout": 0.0,
}

#: name -> (class, config, number of causal layers).
MODELS = {
    "gpt2": (GPT2, GPT2Config(**SIZES, max_positions=16, dropout=0.0, mlp_dim=40), 2),
    "opt": (OPT, OPTConfig(**OF_BERT), 2),
    "opt 350m": (OPT, OPTConfig(**OF_BERT, token_embed_dim=10, norm_first=False), 2),
    "llama": (Llama, LlamaConfig(**OF_LLAMA), 2),
    "qwen": (Llama, LlamaConfig(**OF_LLAMA, qkv_bias=True, qk_norm=True, tie_embeddings=True), 2),
    "gemma": (Llama, LlamaConfig(**OF_LLAMA | PATTERN), 3),
    "deepseek": (Llama, LlamaConfig(**OF_LLAMA | LATENTS), 2),
    "deepseek, latents of queries": (
        Llama,
        LlamaConfig(**OF_LLAMA | LATENTS, query_latent_dim=8),
        2,
    ),
    "bert": (Bert, BertConfig(**OF_BERT, head="masked_lm"), 0),
    "bert, labels of rows": (Bert, BertConfig(**OF_BERT, head="sequence", num_labels=5), 0),
    "bert, labels of tokens": (Bert, BertConfig(**OF_BERT, head="token", num_labels=5), 0),
    "distilbert": (
        Bert,
        BertConfig(**OF_BERT, head="sequence", num_token_types=0, pooler_activation="relu"),
        0,
    ),
    "electra, tokens": (Bert, BertConfig(**OF_BERT, head="masked_lm", token_embed_dim=10), 0),
    "electra, replaced tokens": (
        Bert,
        BertConfig(**OF_BERT, head="replaced_token", token_embed_dim=10),
        0,
    ),
    "modernbert": (ModernBert, ModernBertConfig(**OF_MODERNBERT, head="masked_lm"), 0),
    "modernbert, labels of rows": (
        ModernBert,
        ModernBertConfig(**OF_MODERNBERT, head="sequence", num_labels=5, pool="mean"),
        0,
    ),
    "modernbert, labels of tokens": (
        ModernBert,
        ModernBertConfig(**OF_MODERNBERT, head="token", num_labels=5),
        0,
    ),
    "t5": (T5, T5Config(**OF_T5), 3),
    "t5, gated": (T5, T5Config(**OF_T5, is_gated=True, tie_embeddings=False), 3),
}


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize("name", MODELS)
def test_forward_flops_equal_the_traced_ones_without_the_masked_half(name):
    cls, config, num_causal = MODELS[name]
    model = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    shapes = {"tokens": ids(B, S)} | ({"decoder_tokens": ids(B, T)} if cls is T5 else {})
    traced = traced_flops(lambda state, *a: nnx.merge(graph, state)(*a), state, *shapes.values())
    length = T if cls is T5 else S
    head_dim = getattr(config, "head_dim", config.embed_dim // config.num_heads)
    if getattr(config, "latent_dim", None):  # the mean of both products
        head_dim = (config.head_dim + config.latent_rotary_dim + config.value_dim) // 2
    # A sequence this short is a single block: all products are computed, also the masked ones.
    masked = attention_flops(length, config.num_heads, head_dim, is_causal=True)
    assert model.forward_flops(shapes) == traced - num_causal * B * length * masked
    assert train_flops(model, shapes, num_params=0) == 3 * model.forward_flops(shapes)


def test_pretraining_flops_count_both_heads():
    model = nnx.eval_shape(
        lambda: Bert(BertConfig(**OF_BERT, head="pretraining"), rngs=nnx.Rngs(0))
    )
    masked_lm = nnx.eval_shape(
        lambda: Bert(BertConfig(**OF_BERT, head="masked_lm"), rngs=nnx.Rngs(0))
    )
    shapes = {"tokens": ids(B, S)}
    pairs = B * 2 * (24 * 24 + 24 * 2)  # pooler and classifier, per row
    assert model.forward_flops(shapes) == masked_lm.forward_flops(shapes) + pairs


@pytest.mark.parametrize("window", [1, 4, 16, 100])
def test_window_attention_flops_count_the_band(window):
    length = 16
    seen = min(window, 16)
    # The band is a parallelogram minus a triangle; products on the diagonals count half.
    band = length * seen - seen * seen / 2
    flops = attention_flops(length, 3, 5, is_causal=True, window=window)
    assert flops == int(4 * 3 * 5 * band / length)
    # A window on both sides has two such bands, which share the diagonal.
    flops = attention_flops(length, 3, 5, is_causal=False, window=window)
    assert flops == int(4 * 3 * 5 * 2 * band / length)


def test_flops_without_a_formula_count_a_multiply_add_per_parameter_and_token():
    shapes = {"tokens": ids(2, 5), "decoder_tokens": ids(2, 3), "targets": ids(2, 3)}
    assert num_tokens(shapes) == 16
    assert train_flops(object(), shapes, num_params=10) == 6 * 10 * 16
    assert train_flops(object(), shapes, num_params=10, has_adapters=True) == 4 * 10 * 16
