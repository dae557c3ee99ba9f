"""Tests of rotary positions against `transformers`, and of their defining property."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models.layers.rope import check_scaling, rope_frequencies, rotate

HEAD_DIM = 12
THETA = 10000.0
MAX_POSITIONS = 64
LONG = {"original_max_position_embeddings": 32}
SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **LONG,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **LONG},
    "yarn, all keys": {
        **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        **{"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False, **LONG},
    },
    "yarn, attention_factor": {
        **{"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **LONG}
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [2.0 + 0.5 * i for i in range(6)],
        **LONG,
    },
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_transformers(name, length):
    """The longer length exceeds the model's maximum number of positions."""
    config = LlamaConfig(
        hidden_size=3 * HEAD_DIM,
        num_attention_heads=3,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA, **(SCALINGS[name] or {})},
    )
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, length, 3, HEAD_DIM)).astype(np.float32)
    positions = np.arange(length, dtype=np.int32)[None]
    their_q, their_k = (torch.tensor(x).transpose(1, 2) for x in (q, k))
    cos, sin = LlamaRotaryEmbedding(config)(their_q, torch.tensor(positions))
    turned = apply_rotary_pos_emb(their_q, their_k, cos, sin)
    theirs = [x.transpose(1, 2).numpy() for x in turned]
    frequencies, factor = rope_frequencies(
        HEAD_DIM, THETA, SCALINGS[name], num_positions=length, max_positions=MAX_POSITIONS
    )
    for ours, expected in zip((q, k), theirs, strict=True):
        found = rotate(jnp.asarray(ours), jnp.asarray(positions), frequencies, factor)
        # Angles reach 100 radians in float32.
        np.testing.assert_allclose(found, expected, atol=5e-5)


def test_products_depend_only_on_the_distance():
    with jax.enable_x64(True):
        q, k = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 1, 1, HEAD_DIM)))
        turn = rope_frequencies(HEAD_DIM, THETA, None, num_positions=9, max_positions=9)

        def product(query_position, key_position):
            def at(x, position):
                return rotate(x, jnp.array([[position]]), *turn)

            return float(jnp.sum(at(q, query_position) * at(k, key_position)))

        assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-10)
        assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


@pytest.mark.parametrize(
    "scaling, head_dim, message",
    [
        (None, 7, "model.head_dim=7 must be even"),
        ("linear", 8, "must be a mapping"),
        ({"rope_type": "cubic"}, 8, "rope_type='cubic' is unknown; choose default, linear"),
        ({"rope_type": "linear"}, 8, r"lacks \['factor'\]"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, 8, r"does not know \['beta'\]"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], **LONG},
            8,
            r"short_factor=\[1.0\] must be a list of positive numbers, model.head_dim / 2 = 4",
        ),
        ({"rope_type": "linear", "factor": 0.0}, 8, r"rope_scaling.factor=0.0 must be a positive"),
        ({"rope_type": "linear", "factor": "2"}, 8, "rope_scaling.factor='2' must be a positive"),
        ({"rope_type": "dynamic", "factor": 2.0}, 2, "needs model.head_dim=4 or more"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
            | LONG,
            8,
            "low_freq_factor=4.0 must be less than high_freq_factor=1.0",
        ),
    ],
)
def test_bad_scaling_is_refused(scaling, head_dim, message):
    with pytest.raises(ValueError, match=message):
        check_scaling(scaling, head_dim)
