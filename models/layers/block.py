"""A Transformer block: attention and an MLP, and the norms around them.

B batch, T seq, D embed.
"""

from collections.abc import Callable

import jax
from flax import nnx

from models.layers.dropout import dropout


class Block(nnx.Module):
    """Two residual branches, attention and an MLP, each with a norm.

        before      x + branch(norm(x))
        after_sum   norm(x + branch(x))

    A subclass defines `attend`, and builds the layers in the order in which they draw random keys.

    Args:
        attention: called by `attend`.
        norms: where norms stand, `before` or `after_sum`.
        dropout: rate for both branches, in [0, 1).
    """

    can_split_tokens = True

    def __init__(
        self,
        *,
        attention_norm: nnx.Module,
        attention: nnx.Module,
        mlp_norm: nnx.Module,
        mlp: nnx.Module,
        norms: str = "before",
        dropout: float = 0.0,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.norms = norms
        self.dropout = dropout

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block to `x_BTD`; arguments as in models/stack.py."""

        def add(x_BTD: jax.Array, norm: Callable, branch: Callable, number: int) -> jax.Array:
            if self.norms == "before":
                return x_BTD + self.drop(branch(norm(x_BTD)), batch, keys, number)
            return norm(x_BTD + self.drop(branch(x_BTD), batch, keys, number))

        x_BTD = add(x_BTD, self.attention_norm, lambda x_BTD: self.attend(x_BTD, batch), 0)
        return add(x_BTD, self.mlp_norm, self.mlp, 1)

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
