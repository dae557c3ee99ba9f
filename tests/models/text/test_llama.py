"""Settings of the LLaMA family that do not fit together are refused; attention in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from generate.generator import Generator
from models.layers.attention import attend
from models.text.llama import Llama, LlamaConfig
from tests.generate.references import GREEDY

SIZES = {
    "vocab_size": 64,
    "max_positions": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "embed_dim": 24,
    "mlp_dim": 48,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": "behind"}, "model.norms='behind' is unknown; choose before, after, around"),
        ({"norm": "batch"}, "model.norm='batch' is unknown; choose rms, rms_1p, layer"),
        ({"rotary_pairs": "all"}, "model.rotary_pairs='all' is unknown; choose halves, neighbours"),
        ({"rotary_fraction": 0.0}, "model.rotary_fraction=0.0 must be more than 0 and at most 1"),
        (
            {"rotary_fraction": 0.5},
            "model.rotary_fraction=0.5 must be more than 0 and at most 1, and its part of "
            "model.head_dim=6, 3 features, must be even",
        ),
        ({"qk_norm_over_heads": True}, "model.qk_norm_over_heads=True needs model.qk_norm=True"),
        ({"qk_norm_by_head": True}, "model.qk_norm_by_head=True needs model.qk_norm=True"),
        (
            {"qk_norm": True, "qk_norm_over_heads": True, "qk_norm_by_head": True},
            "model.qk_norm_over_heads=True and model.qk_norm_by_head=True: choose one of them",
        ),
        ({"activation": "sine"}, "model.activation='sine' is unknown; choose relu, relu2"),
        ({"layer_types": ("local",)}, "model.layer_types: 'local' is unknown; choose full"),
        ({"layer_types": ("chunked",)}, "model.attention_chunk=None must be set if, and only"),
        ({"attention_chunk": 4}, "model.attention_chunk=4 must be set if, and only if"),
        ({"layer_types": ("full",) * 3}, "model.layer_types has 3 entries, for model.num_layers=2"),
        ({"layer_types": ("window", "full")}, "model.sliding_window=None must be set if, and only"),
        ({"layer_types": ("full",), "sliding_window": 4}, "model.sliding_window=4 must be set if"),
        ({"attention_softcap": 0.0}, "model.attention_softcap=0.0 must be positive, or None"),
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 must divide model.num_heads=4"),
        ({"expert_bias": True}, "model.expert_bias=True needs experts; set model.num_experts"),
        ({"num_experts": 4, "gate_limit": 0.0}, "model.gate_limit=0.0 must be positive, and needs"),
        (
            {"num_experts": 4, "gate_limit": 7.0, "is_gated": False},
            "model.gate_limit=7.0 must be positive, and needs model.is_gated=True",
        ),
        (
            {"num_experts": 8, "router_groups": 4, "router_group_scores": 3},
            "model.router_group_scores=3 must be from 1 to the 2 experts of a group",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        LlamaConfig(**SIZES | changes)
    assert str(caught.value).startswith(message)


CHUNKED = {**SIZES, "layer_types": ("chunked", "no_positions"), "attention_chunk": 5}


@pytest.mark.thorough
@pytest.mark.parametrize("has_padding", [False, True])
def test_tokens_of_a_chunk_see_each_other_only(has_padding):
    """Output and gradient equal attention by its definition, in numpy in float64."""
    length = 17
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((2, length, 1, 4)) for _ in range(4))
    # The first row begins with padding; the second has two texts.
    ids = np.array([[0] * 3 + [1] * 14, [1] * 8 + [2] * 9]) if has_padding else np.ones((2, length))
    first = np.array([3, 0]) if has_padding else np.zeros(2)
    chunk = (np.arange(length) - first[:, None]) // 5
    place = np.arange(length)
    visible = (place[:, None] >= place) & (chunk[:, :, None] == chunk[:, None])
    visible &= ids[:, :, None] == ids[:, None]
    logits = np.where(visible, np.einsum("btnh,bsnh->bts", q, k) / 2, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    batch = {"tokens": jnp.zeros((2, length), jnp.int32)}
    if has_padding:
        batch["segment_ids"] = jnp.asarray(ids, jnp.int32)
    with jax.enable_x64(True):
        masks = LlamaConfig(**CHUNKED).masks("chunked", batch)

        def attended(v):
            return attend(jnp.asarray(q), jnp.asarray(k), v, is_causal=True, **masks)

        y, pullback = jax.vjp(attended, jnp.asarray(v))
        np.testing.assert_allclose(y[:, :, 0], weights @ v[:, :, 0], rtol=1e-12, atol=1e-12)
        dv = np.einsum("bts,bth->bsh", weights, dy[:, :, 0])
        np.testing.assert_allclose(pullback(jnp.asarray(dy))[0][:, :, 0], dv, rtol=1e-12)


@pytest.mark.thorough
def test_cached_chunks_continue_as_whole_rows_do():
    """Without caches, each token is predicted from a pass over the whole row."""
    model = Llama(LlamaConfig(**CHUNKED, init_stddev=0.5), rngs=nnx.Rngs(0))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    found = Generator(model).generate(prompts, max_new_tokens=9, sampling=GREEDY)
    whole = nnx.jit(lambda model, tokens: model(tokens))
    for prompt, continued in zip(prompts, found, strict=True):
        row = np.zeros((1, 16), np.int32)
        row[0, : len(prompt) + 9] = [*prompt, *continued]
        expected = np.argmax(np.asarray(whole(model, jnp.asarray(row)))[0], axis=-1)
        assert [*expected[len(prompt) - 1 : len(prompt) + 8]] == continued
    assert len({*found[0], *found[1]}) > 3
