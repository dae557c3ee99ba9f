"""A Transformer block: attention and an MLP, and the norms around them.

B batch, T seq, D embed.
"""

from collections.abc import Callable

import jax
from flax import nnx

from models.layers.dropout import dropout

#: Where the norm of a branch stands, as `Block` describes.
NORMS = ("before", "after", "around", "after_sum")


class Block(nnx.Module):
    """Two residual branches, attention and an MLP, each with a norm.

        before      x + scale · branch(norm(x))
        after       x + scale · norm(branch(x))
        around      x + scale · norm₂(branch(norm(x)))
        after_sum   norm(x + scale · branch(x))

    A subclass defines `attend`, and builds the layers in the order in which they draw random keys.

    Args:
        attention: called by `attend`.
        norms: one of NORMS.
        attention_norm_2: norm of the output of attention, for "around".
        mlp_norm_2: norm of the output of the MLP, for "around".
        dropout: rate for both branches, in [0, 1).
        scale: factor of both branches.
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

        def branch_of(x_BTD: jax.Array, norms: tuple, branch: Callable, number: int) -> jax.Array:
            norm, norm_2 = norms
            x_BTD = norm(x_BTD) if self.norms in ("before", "around") else x_BTD
            branch_BTD = branch(x_BTD)
            if self.norms == "after":
                branch_BTD = norm(branch_BTD)
            elif self.norms == "around":
                branch_BTD = norm_2(branch_BTD)
            branch_BTD = branch_BTD if self.scale == 1.0 else self.scale * branch_BTD
            return self.drop(branch_BTD, batch, keys, number)

        def add(x_BTD: jax.Array, norms: tuple, branch: Callable, number: int) -> jax.Array:
            x_BTD += branch_of(x_BTD, norms, branch, number)
            return norms[0](x_BTD) if self.norms == "after_sum" else x_BTD

        of_attention = self.attention_norm, self.attention_norm_2
        x_BTD = add(x_BTD, of_attention, lambda x_BTD: self.attend(x_BTD, batch), 0)
        return add(x_BTD, (self.mlp_norm, self.mlp_norm_2), self.mlp, 1)

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
