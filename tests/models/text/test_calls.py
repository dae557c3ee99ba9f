"""Calls of models from Python that cannot work are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.text.bert import Bert, BertConfig
from models.text.gpt2 import GPT2, GPT2Config
from models.text.t5 import T5, T5Config
from sharding.mesh import MeshConfig, make_mesh


def gpt2() -> GPT2:
    config = GPT2Config(
        vocab_size=50, max_positions=8, num_layers=1, num_heads=2, embed_dim=8, dropout=0.0
    )
    return GPT2(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("token", [-1, 50])
def test_token_ids_outside_the_vocabulary_are_refused(token):
    model = gpt2()
    with pytest.raises(ValueError, match=f"token id {token} is not in the vocab.*ids are 0 to 49"):
        model(jnp.array([[1, token]]))
    assert model(jnp.array([[0, 49]])).shape == (1, 2, 50)


def test_traced_function_may_use_tokens_that_are_no_argument_of_it():
    model = gpt2()
    good = jnp.array([[0, 49]])
    bad = good + 1
    assert nnx.jit(lambda model: model(good))(model).shape == (1, 2, 50)
    with pytest.raises(ValueError, match="token id 50 is not in the vocabulary"):
        nnx.jit(lambda model: model(bad))(model)


def test_token_ids_of_both_sides_of_t5_are_checked():
    config = T5Config(
        vocab_size=50,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        head_dim=4,
        embed_dim=8,
        mlp_dim=8,
        dropout=0.0,
    )
    model = T5(config, rngs=nnx.Rngs(0))
    good = jnp.array([[1, 2]])
    assert model(good, good).shape == (1, 2, 50)
    for sides in ((good, good + 49), (good + 49, good)):
        with pytest.raises(ValueError, match="token id 50 is not in the vocabulary"):
            model(*sides)


def test_mesh_with_explicit_axes_is_refused_with_the_remedy():
    model = gpt2()
    tokens = jnp.zeros((2, 4), jnp.int32)
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        with pytest.raises(ValueError, match=r"explicit axes \(data\).*AxisType\.Auto"):
            nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    with jax.set_mesh(make_mesh(MeshConfig(data=2), jax.devices())):
        assert nnx.jit(lambda model, tokens: model(tokens))(model, tokens).shape == (2, 4, 50)


def test_token_types_are_refused_by_a_model_without_any():
    sizes: dict[str, Any] = {"vocab_size": 50, "max_positions": 8, "num_layers": 1, "num_heads": 2}
    config = BertConfig(**sizes, embed_dim=8, mlp_dim=8, head="none", num_token_types=0)
    model = Bert(config, rngs=nnx.Rngs(0))
    tokens = jnp.array([[1, 2]])
    assert model(tokens).shape == (1, 2, 8)
    with pytest.raises(ValueError, match="this model has 0; leave them out"):
        model(tokens, token_types=tokens)
    with pytest.raises(ValueError, match=r"model\.num_token_types=-1 must be at least 0"):
        BertConfig(**sizes, embed_dim=8, mlp_dim=8, head="none", num_token_types=-1)
