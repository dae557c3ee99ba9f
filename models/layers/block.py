"""A Transformer block: attention and an MLP, and the norms around them.

B batch, T seq, D embed.
"""

from typing import Any

import jax
from flax import nnx

from models.layers.basic import LayerNorm
from models.layers.dropout import dropout
from models.layers.masks import segments
from models.layers.transformer import MLP, Attention

#: How a branch may be joined to the activations, when its sum has no norm; see `Block`.
NORMS = ("before", "after", "around", "parallel")


class Block(nnx.Module):
    """Two residual branches, attention and an MLP, each with a norm.

        before      x + scale · branch(norm(x))
        after       x + scale · norm₂(branch(x))
        around      x + scale · norm₂(branch(norm(x)))
        after_sum   norm(x + scale · branch(x))
        parallel    x + scale · attention(norm(x)) + scale · mlp(norm(x)), with one norm

    A subclass defines `attend`, and builds the layers in the order in which they draw random keys.

    Args:
        attention: called by `attend`.
        norms: one of the five kinds above.
        attention_norm: norm before attention, or after the sum; None for "after".
        attention_norm_2: norm of the output of attention, for "after" and "around".
        mlp_norm: the same for the MLP; None for "parallel" too.
        mlp_norm_2: the same for the MLP.
        dropout: rate for both branches, in [0, 1).
        scale: factor of both branches.
    """

    can_split_tokens = True
    can_split_sequence = True

    def __init__(
        self,
        *,
        attention_norm: nnx.Module | None,
        attention: nnx.Module,
        mlp_norm: nnx.Module | None,
        mlp: nnx.Module,
        norms: str = "before",
        attention_norm_2: nnx.Module | None = None,
        mlp_norm_2: nnx.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.norms = norms
        self.attention_norm_2 = attention_norm_2
        self.mlp_norm_2 = mlp_norm_2
        self.dropout = dropout
        self.scale = scale

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block to `x_BTD`; arguments as in models/stack.py."""

        def apply(norm: nnx.Module | None, x_BTD: jax.Array) -> jax.Array:
            return x_BTD if norm is None else norm(x_BTD)

        def branch_of(x_BTD: jax.Array, number: int) -> jax.Array:
            branch_BTD = self.mlp(x_BTD) if number else self.attend(x_BTD, batch)
            branch_BTD = apply((self.attention_norm_2, self.mlp_norm_2)[number], branch_BTD)
            return self.drop(scaled(branch_BTD, self.scale), batch, keys, number)

        if self.norms == "parallel":
            normal_BTD = apply(self.attention_norm, x_BTD)
            return x_BTD + branch_of(normal_BTD, 0) + branch_of(normal_BTD, 1)
        for number, norm in enumerate((self.attention_norm, self.mlp_norm)):
            if self.norms == "after_sum":
                x_BTD = apply(norm, x_BTD + branch_of(x_BTD, number))
            else:
                x_BTD += branch_of(apply(norm, x_BTD), number)
        return x_BTD

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return the output of attention, `[B, T, D]`."""
        raise NotImplementedError

    def drop(
        self, branch_BTD: jax.Array, batch: dict, keys: jax.Array | None, number: int
    ) -> jax.Array:
        """Drop parts of a branch at random.

        Args:
            branch_BTD: output of the branch.
            batch: as for the block.
            keys: as for the block.
            number: 0 for attention, 1 for the MLP.
        """
        return dropout(branch_BTD, self.dropout, keys, site=number)


def attention_of(config: Any, *, stddev: float | None = None, rngs: nnx.Rngs, **options: Any):
    """Return the attention of a `PlainBlock`; `options` are further arguments of `Attention`."""
    stddev = config.init_stddev if stddev is None else stddev
    sizes = config.embed_dim, config.num_heads, config.embed_dim // config.num_heads
    options = {"use_bias": True, "stddevs": (stddev, stddev, stddev)} | options
    return Attention(*sizes, rngs=rngs, **options)


def mlp_of(config: Any, *, stddev: float | None = None, rngs: nnx.Rngs, **options: Any) -> MLP:
    """Return the MLP of a `PlainBlock`; `options` are further arguments of `MLP`."""
    stddev = config.init_stddev if stddev is None else stddev
    sizes = config.embed_dim, config.mlp_dim or 4 * config.embed_dim
    options = {"use_bias": True, "stddevs": (stddev, stddev)} | options
    return MLP(*sizes, activation=config.activation, rngs=rngs, **options)


def norm_of(config: Any, *, rngs: nnx.Rngs, **options: Any) -> LayerNorm:
    """Return a norm of a `PlainBlock`; `options` are further arguments of `LayerNorm`."""
    return LayerNorm(config.embed_dim, epsilon=config.layer_norm_epsilon, rngs=rngs, **options)


class PlainBlock(Block):
    """A block of layer norms, attention and an MLP, all of them with biases.

    Args:
        config: has the fields of `models.text.common.BlockConfig`, and may have `dropout`.
        is_causal: whether a token only sees those before it.
        norms: as for `Block`.
        branches_first: whether attention and the MLP draw random keys before their norms do.
        attention: further arguments of `attention_of`.
        mlp: further arguments of `mlp_of`.
        rngs: random keys for the initialization.
    """

    can_split_sequence = True

    def __init__(
        self,
        config: Any,
        *,
        is_causal: bool,
        norms: str = "before",
        branches_first: bool = False,
        attention: dict[str, Any] | None = None,
        mlp: dict[str, Any] | None = None,
        rngs: nnx.Rngs,
    ):
        makers = {
            "attention_norm": lambda: norm_of(config, rngs=rngs),
            "attention": lambda: attention_of(config, rngs=rngs, **attention or {}),
            "mlp_norm": lambda: norm_of(config, rngs=rngs),
            "mlp": lambda: mlp_of(config, rngs=rngs, **mlp or {}),
        }
        order = ("attention", "attention_norm", "mlp", "mlp_norm") if branches_first else makers
        layers = {name: makers[name]() for name in order}
        super().__init__(**layers, norms=norms, dropout=getattr(config, "dropout", 0.0))
        self.is_causal = is_causal

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return the output of attention, `[B, T, D]`."""
        return self.attention(x_BTD, is_causal=self.is_causal, segments=segments(batch))


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return `factor * x`, without a product if the factor is 1."""
    return x if factor == 1.0 else factor * x
