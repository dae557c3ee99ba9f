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

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.field_checks import check_needs
from models.layers import kv_cache
from models.layers.attention import attend
from models.layers.basic import Linear, RMSNorm
from models.layers.transformer import projected
from sharding.logical import constrain_branch, gather_tokens

#: Added to the mean square in the norms of latents, as in the published models.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Fields of the config of a model that may have latent attention."""

    latent_dim: int | None = None  # size of the latent of keys and values
    query_latent_dim: int | None = None  # the same for queries, which may have none
    latent_rotary_dim: int = 64  # with latents: rotated features of a head, besides head_dim others
    value_dim: int | None = None  # with latents: size of a head's values; head_dim if None

    def check_latents(self) -> None:
        """Check these fields together with the fields of grouped-query attention."""
        if self.latent_dim is None:
            check_needs(self, query_latent_dim="latent_dim", value_dim="latent_dim")
            return
        config: Any = self
        is_grouped = config.num_kv_heads != config.num_heads
        has_others = is_grouped or config.qk_norm or config.attention_sinks
        if has_others or config.qkv_bias != config.out_bias:
            raise ValueError(
                f"model.latent_dim={self.latent_dim} needs model.num_kv_heads={config.num_heads}, "
                "the number of heads, model.qk_norm=False, model.attention_sinks=False, and equal "
                "values of model.qkv_bias and model.out_bias"
            )


class LatentAttention(nnx.Module):
    """Causal self-attention with latent keys and values.

    Args:
        config: has the fields of LatentConfig, `embed_dim`, `num_heads`, `head_dim`, `qkv_bias`
            and `init_stddev`.
        rngs: random keys for the initialization.
    """

    same_input = ("q_down", "q", "kv_down")

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        embed = {"embed": config.embed_dim}
        options: dict[str, Any] = {"stddev": config.init_stddev, "rngs": rngs}
        biased: dict[str, Any] = options | {"use_bias": config.qkv_bias}
        unbiased: dict[str, Any] = options | {"use_bias": False}

        def heads(size: int) -> dict[str, int]:
            return {"heads": config.num_heads, "head_dim": size}

        head_dim = config.head_dim
        rotary_dim = config.latent_rotary_dim
        value_dim = config.value_dim or head_dim
        if config.query_latent_dim is None:
            of_queries = embed
            self.q_down = self.q_norm = None
        else:
            of_queries = {"_latent": config.query_latent_dim}
            self.q_down = Linear(embed, of_queries, **biased)
            self.q_norm = RMSNorm(config.query_latent_dim, epsilon=_EPSILON, rngs=rngs)
        self.q = Linear(of_queries, heads(head_dim + rotary_dim), **unbiased)
        self.kv_down = Linear(embed, {"_latent": config.latent_dim + rotary_dim}, **biased)
        self.kv_norm = RMSNorm(config.latent_dim, epsilon=_EPSILON, rngs=rngs)
        latent = {"_latent": config.latent_dim}
        self.kv_up = Linear(latent, heads(head_dim + value_dim), **unbiased)
        self.out = Linear(heads(value_dim), embed, **biased)
        self.head_dim = head_dim
        self.latent_dim = config.latent_dim

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
                checkpoint_name(constrain_branch(x, "batch", "seq", "heads", "head_dim"), "qkv")
                for x in (q_BTNH, k_BSNH, v_BSNW)
            )
            y_BTNW = attend(*qkv, cached_BSKH=cached_BS1L, **mask_options)
        return projected(self.out, y_BTNW)

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
