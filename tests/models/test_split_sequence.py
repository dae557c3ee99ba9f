"""Whether a model may see a part of a sequence: each class that computes something says so."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.functions import cannot_split_sequence
from models.stack import Stack
from models.text.gpt2 import GPT2, GPT2Config
from models.text.gpt2 import _Block as GPT2Block


class Shifted(GPT2Block):
    """A block whose tokens also read the ones before them."""

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        x_BTD = super().__call__(x_BTD, batch, keys)
        return x_BTD + jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))


class Renamed(GPT2Block):
    """A block that computes nothing else."""


class Averaged(GPT2):
    """A model whose embedding averages over a row."""

    def embed(self, batch: dict) -> jax.Array:
        x_BTD = super().embed(batch)
        return x_BTD + x_BTD.mean(axis=1, keepdims=True)


class Declared(Averaged):
    can_split_sequence = True


CONFIG = GPT2Config(
    vocab_size=8, num_layers=2, num_heads=2, embed_dim=16, max_positions=8, dropout=0.0
)


def with_blocks(*kinds: Callable[..., nnx.Module]) -> GPT2:
    model = GPT2(CONFIG, rngs=nnx.Rngs(0))

    def maker(kind: Callable[..., nnx.Module]) -> Callable[[nnx.Rngs], nnx.Module]:
        return lambda rngs: kind(CONFIG, rngs=rngs)

    makers = [maker(kind) for kind in kinds]
    model.decoder = Stack(makers, 2, rngs=nnx.Rngs(0))
    return model


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: GPT2(CONFIG, rngs=nnx.Rngs(0)), ""),
        (lambda: with_blocks(Renamed), ""),
        (lambda: with_blocks(Shifted), "Shifted"),
        (lambda: with_blocks(Renamed, Shifted), "Shifted"),
        (lambda: Averaged(CONFIG, rngs=nnx.Rngs(0)), "Averaged"),
        (lambda: Declared(CONFIG, rngs=nnx.Rngs(0)), ""),
    ],
)
def test_class_that_computes_something_else_must_declare_it(model, name):
    assert cannot_split_sequence(model()) == name
