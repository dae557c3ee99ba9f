"""Multi-head latent attention: keys and values of all heads come from one short vector per token.

    c = norm(x·A)            [B, S, L]      the latent
    r = rotate(x·R)          [B, S, P]      positions, shared by all heads
    k = [c·K; r]             [B, S, N, H + P]
    v = c·V                  [B, S, N, W]

While a text is generated, caches keep only c and r. The matrices K and V then move to the other
side of the products: q·kᵀ = [q·Kᵀ; q']·[c; r]ᵀ, and the values of all heads are c itself.

B batch, T query seq, S key seq, D embed, N heads, H head_dim, P rotary dim, W value dim, L latent.

Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.layers import kv_cache
from models.layers.attention import attend
from models.layers.basic import Linear, RMSNorm
from sharding.logical import constrain, gather_tokens, scatter_tokens

#: Added to the mean square in the norms of latents, as in the published models.
_EPSILON = 1e-6


class LatentAttention(nnx.Module):
    """Causal self-attention with latent keys and values.

    Args:
        embed_dim: D.
        num_heads: N.
        head_dim: H.
        rotary_dim: P.
        value_dim: W.
        latent_dim: L.
        query_latent_dim: size of a latent of queries; None if they come from x itself.
        use_bias: whether the projections to latents, and the output, have a bias.
        stddev: standard deviation for initializing the kernels.
        rngs: random keys for the initialization.
    """

    same_input = ("q_down", "q", "kv_down")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        rotary_dim: int,
        value_dim: int,
        latent_dim: int,
        query_latent_dim: int | None,
        use_bias: bool,
        stddev: float,
        rngs: nnx.Rngs,
    ):
        embed = {"embed": embed_dim}
        options: dict[str, Any] = {"stddev": stddev, "rngs": rngs}

        def heads(size: int) -> dict[str, int]:
            return {"heads": num_heads, "head_dim": size}

        if query_latent_dim is None:
            of_queries = embed
            self.q_down = self.q_norm = None
        else:
            of_queries = {"_latent": query_latent_dim}
            self.q_down = Linear(embed, of_queries, use_bias=use_bias, **options)
            self.q_norm = RMSNorm(query_latent_dim, epsilon=_EPSILON, rngs=rngs)
        self.q = Linear(of_queries, heads(head_dim + rotary_dim), use_bias=False, **options)
        of_keys = {"_latent": latent_dim + rotary_dim}
        self.kv_down = Linear(embed, of_keys, use_bias=use_bias, **options)
        self.kv_norm = RMSNorm(latent_dim, epsilon=_EPSILON, rngs=rngs)
        latent = {"_latent": latent_dim}
        self.kv_up = Linear(latent, heads(head_dim + value_dim), use_bias=False, **options)
        self.out = Linear(heads(value_dim), embed, use_bias=use_bias, **options)
        self.head_dim = head_dim
        self.latent_dim = latent_dim

    def __call__(
        self, x_BTD: jax.Array, *, rotate: Callable[[jax.Array], jax.Array], **mask_options: Any
    ) -> jax.Array:
        """Apply attention; arguments and names as for `models.layers.transformer.Attention`."""
        whole_BTD = gather_tokens(x_BTD)
        if self.q_down is None or self.q_norm is None:
            q_BTNH = self.q(whole_BTD, x_BTD)
        else:
            q_BTNH = self.q(self.q_norm(self.q_down(whole_BTD, x_BTD)))
        down_BSL = self.kv_down(whole_BTD, x_BTD)
        latent_BSL = self.kv_norm(down_BSL[..., : self.latent_dim])
        rotated_BS1P = rotate(down_BSL[:, :, None, self.latent_dim :])
        plain_BTNH, positions_BTNP = jnp.split(q_BTNH, [self.head_dim], axis=-1)
        positions_BTNP = rotate(positions_BTNP)
        cached_BS1L = jnp.concatenate((latent_BSL[:, :, None], rotated_BS1P), axis=-1)
        if kv_cache.is_reading():
            y_BTNW = self._attend_to_latents(
                plain_BTNH, positions_BTNP, cached_BS1L, **mask_options
            )
        else:
            q_BTNH = jnp.concatenate((plain_BTNH, positions_BTNP), axis=-1)
            kv_BSNH = self.kv_up(latent_BSL)
            k_BSNH, v_BSNW = jnp.split(kv_BSNH, [self.head_dim], axis=-1)
            shape = (*k_BSNH.shape[:-1], rotated_BS1P.shape[-1])
            k_BSNH = jnp.concatenate((k_BSNH, jnp.broadcast_to(rotated_BS1P, shape)), axis=-1)
            qkv = (
                checkpoint_name(constrain(x, "batch", "seq", "heads", "head_dim"), "qkv")
                for x in (q_BTNH, k_BSNH, v_BSNW)
            )
            y_BTNW = attend(*qkv, cached_BSKH=cached_BS1L, **mask_options)
        out_BTD = self.out(constrain(y_BTNW, "batch", "seq", "heads", "head_dim"))
        return checkpoint_name(scatter_tokens(out_BTD), "attention_out")

    def _attend_to_latents(
        self, plain_BTNH, positions_BTNP, cached_BS1L, *, scale: float, **mask_options: Any
    ) -> jax.Array:
        """Attend to the latents in a cache; returns `[B, T, N, W]`."""
        up_LNH = self.kv_up.kernel[...]
        keys_LNH, values_LNW = jnp.split(up_LNH, [self.head_dim], axis=-1)
        q_BTNL = jnp.einsum("BTNH,LNH->BTNL", plain_BTNH, keys_LNH)
        q_BTNL = jnp.concatenate((q_BTNL, positions_BTNP), axis=-1)
        y_BTNL = attend(q_BTNL, cached_BS1L, cached_BS1L, scale=scale, **mask_options)
        return jnp.einsum("BTNL,LNW->BTNW", y_BTNL[..., : self.latent_dim], values_LNW)
