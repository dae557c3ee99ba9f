"""A Transformer block: attention and an MLP, and the norms around them.

B batch, T seq, D embed.
"""

import jax
from flax import nnx

from models.layers.dropout import dropout


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
            branch_BTD = branch_BTD if self.scale == 1.0 else self.scale * branch_BTD
            return self.drop(branch_BTD, batch, keys, number)

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
