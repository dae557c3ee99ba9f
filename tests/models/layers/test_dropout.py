"""Dropout: its masks depend on the right inputs, and GPT-2 applies it in the right places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.functions import functions_of
from models.layers.dropout import dropout
from models.stack import Stack
from models.text.gpt2 import GPT2, GPT2Config


class Probe(nnx.Module):
    """A block that shifts its input by two rows, and appends its two dropout masks."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.unused = nnx.Param(jnp.zeros(()))

    def __call__(self, x_BMF, batch, keys):
        ones_BF = jnp.ones_like(x_BMF[:, 0])
        masks = [dropout(ones_BF, 0.25, keys, site=site) for site in (0, 1)]
        return jnp.concatenate([x_BMF[:, 2:], jnp.stack(masks, axis=1)], axis=1)


class ProbeModel(nnx.Module):
    def __init__(self, num_layers: int, *, rngs: nnx.Rngs):
        self.stack = Stack(lambda rngs: Probe(rngs=rngs), num_layers, rngs=rngs)

    def embed(self, batch):
        raise NotImplementedError

    def head(self, x, batch):
        raise NotImplementedError


def draw_masks(keys: jax.Array, layers: range) -> np.ndarray:
    """Return float32[B, 2·layers, 64], the dropout masks of these layers of a model."""
    model = ProbeModel(len(layers), rngs=nnx.Rngs(0))
    made = functions_of(model, remat="none")
    params = made.split(nnx.to_pure_dict(nnx.split(model)[1]))
    x = jnp.zeros((len(keys), 2 * len(layers), 64))
    block = made.blocks["stack"]
    batch = {"dropout_keys": keys}
    for i, number in enumerate(layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["stacks"]["stack"])
        x = block(layer, x, batch, jnp.int32(number))
    return np.asarray(x)


def example_keys(seed: int, examples: range) -> jax.Array:
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return fold(jax.random.key(seed), jnp.arange(examples.start, examples.stop))


@pytest.mark.thorough
def test_dropout_mask_depends_only_on_seed_example_layer_and_site():
    masks = draw_masks(example_keys(0, range(6)), range(4))
    # Masks do not depend on the other examples in the batch or on the other layers of a stage.
    np.testing.assert_array_equal(draw_masks(example_keys(0, range(4, 6)), range(4)), masks[4:6])
    np.testing.assert_array_equal(draw_masks(example_keys(0, range(6)), range(2, 4)), masks[:, 4:8])
    # They do depend on seed, example, layer and site: no two of these masks are equal.
    other = draw_masks(example_keys(1, range(6)), range(4))
    rows = {row.tobytes() for row in np.concatenate([masks, other]).reshape(-1, 64)}
    assert len(rows) == 2 * 6 * 4 * 2


def test_dropout_preserves_the_mean_by_scaling_kept_elements():
    x = jax.random.normal(jax.random.key(1), (8, 50, 100))
    y = dropout(x, 0.25, example_keys(0, range(8)))
    kept = np.asarray(y != 0)
    np.testing.assert_allclose(y[kept], x[kept] / 0.75, rtol=1e-6)
    # 40,000 draws: the standard deviation of the share is 0.0022; the seed is fixed.
    assert abs(kept.mean() - 0.75) < 4 * 0.0022


def test_dropout_is_off_without_keys_or_rate():
    x = jnp.ones((2, 3))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, example_keys(0, range(2))) is x


@jax.jit
def branches_with_dropout() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return embeddings, and the update of a block with only attention and with only its MLP."""
    config = GPT2Config(
        vocab_size=50, max_positions=8, num_layers=1, num_heads=2, embed_dim=64, dropout=0.5
    )
    model = GPT2(config, rngs=nnx.Rngs(0))
    keys = example_keys(0, range(4))
    embedded = model.embed({"tokens": jnp.zeros((4, 8), jnp.int32), "dropout_keys": keys})
    graph, state = nnx.split(model.decoder.layers)
    x_BTD = jax.random.normal(jax.random.key(2), (4, 8, 64))
    added = []
    for silent in ("mlp", "attention"):
        params = nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf[0], state))
        params[silent] = jax.tree.map(jnp.zeros_like, params[silent])
        added.append(nnx.merge(graph, params)(x_BTD, {}, keys) - x_BTD)
    return embedded, added[0], added[1]


def test_model_drops_embeddings_and_both_branches_of_a_block():
    for part in branches_with_dropout():
        # 2,048 draws: the standard deviation of the share is 0.011; the seed is fixed. Dropped
        # elements are 0 up to rounding; few of the others are as small.
        assert abs(np.mean(jnp.abs(part) < 1e-6) - 0.5) < 4 * 0.011
