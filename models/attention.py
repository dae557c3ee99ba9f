"""Scaled dot-product attention.

B batch, T query seq, S key seq, N heads, H head_dim.
Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1.
"""

import functools
import logging
import math

import jax
import jax.numpy as jnp


def attend(
    q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, *, is_causal: bool
) -> jax.Array:
    """Returns softmax(q·kᵀ / √H)·v, `[B, T, N, H]` in the dtype of `q`.

    Args:
      q_BTNH, k_BSNH, v_BSNH: one floating dtype.
      is_causal: position t sees positions 0..t only.
    """
    chosen = implementation(q_BTNH.dtype.name, q_BTNH.shape[-1])
    if chosen == "batched":
        return _attend_batched(q_BTNH, k_BSNH, v_BSNH, is_causal=is_causal)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSNH, v_BSNH, is_causal=is_causal, implementation=chosen
    )


@functools.cache
def implementation(dtype: str, head_dim: int) -> str:
    """Returns which attention runs for such heads on this backend.

    "cudnn" is flash attention and "xla" the plain form, both `jax.nn.dot_product_attention`;
    "batched" is ours, for CPUs and for float64, which the other two round to float32.
    """
    backend = jax.default_backend()
    chosen, why = "xla", f"backend {backend}"
    if backend == "cpu" or dtype == "float64":
        chosen = "batched"
    elif backend == "gpu":
        capability = float(getattr(jax.devices()[0], "compute_capability", "0"))
        if dtype not in ("bfloat16", "float16"):
            why = f"cuDNN flash attention has no {dtype}"
        elif head_dim % 8 or head_dim > (256 if capability >= 9 else 128):
            why = f"cuDNN flash attention has no head_dim {head_dim}"
        elif capability < 8:
            why = f"compute capability {capability} is below 8.0"
        else:
            chosen, why = "cudnn", f"{dtype}, head_dim {head_dim}, capability {capability}"
    logging.getLogger(__name__).info("attention: %s (%s)", chosen, why)
    return chosen


def _attend_batched(q_BTNH, k_BSNH, v_BSNH, *, is_causal: bool) -> jax.Array:
    """Attention as matmuls that are batched over leading (B, N), the layout CPUs are fast in."""
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    scale = 1.0 / math.sqrt(q_BTNH.shape[-1])
    q_BNTH, k_BNSH, v_BNSH = (x.swapaxes(1, 2) for x in (q_BTNH * scale, k_BSNH, v_BSNH))
    logits_BNTS = jnp.einsum("BNTH,BNSH->BNTS", q_BNTH, k_BNSH, preferred_element_type=wide)
    if is_causal:
        T, S = logits_BNTS.shape[2:]
        visible_TS = jnp.tril(jnp.ones((T, S), bool))
        logits_BNTS = jnp.where(visible_TS[None, None], logits_BNTS, jnp.finfo(wide).min)
    weights_BNTS = jax.nn.softmax(logits_BNTS, axis=-1).astype(v_BSNH.dtype)
    return jnp.einsum("BNTS,BNSH->BNTH", weights_BNTS, v_BNSH).swapaxes(1, 2)
