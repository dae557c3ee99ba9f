"""Scaled dot-product attention.

B batch, T query seq, S key seq, N heads, H head_dim.
Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1.
"""

import functools
import itertools
import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

#: Causal attention on a CPU takes this many queries at a time, in at most so many blocks: n blocks
#: compute (n + 1) / 2n of the full products, but matrix products of few rows are slow.
_BLOCK_QUERIES, _MAX_BLOCKS = 128, 8


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
def implementation(dtype: str, head_dim: int) -> Literal["cudnn", "xla", "batched"]:
    """Returns which attention runs for such heads on this backend.

    "cudnn" is flash attention and "xla" the plain form, both `jax.nn.dot_product_attention`;
    "batched" is ours, for CPUs and for float64, which the other two round to float32.
    """
    backend = jax.default_backend()
    chosen, why = "xla", f"backend {backend}"
    if backend == "cpu" or dtype == "float64":
        chosen = "batched"
    elif backend == "gpu":
        # "9.0" on NVIDIA, a name such as "gfx942" elsewhere.
        version = str(getattr(jax.devices()[0], "compute_capability", "0"))
        capability = float(version) if version.replace(".", "", 1).isdigit() else 0.0
        if dtype not in ("bfloat16", "float16"):
            why = f"cuDNN flash attention has no {dtype}"
        elif head_dim % 8 or head_dim > (256 if capability >= 9 else 128):
            why = f"cuDNN flash attention has no head_dim {head_dim}"
        elif capability < 8:
            why = f"compute capability {version} is not 8.0 or more"
        else:
            chosen, why = "cudnn", f"{dtype}, head_dim {head_dim}, capability {version}"
    logging.getLogger(__name__).info("attention: %s (%s)", chosen, why)
    return chosen


def _attend_batched(
    q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, *, is_causal: bool
) -> jax.Array:
    """Attention as matmuls that are batched over leading (B, N), the layout CPUs are fast in."""
    scale = 1.0 / math.sqrt(q_BTNH.shape[-1])
    q_BNTH = jnp.swapaxes(q_BTNH * scale, 1, 2)
    y_BNTH: Any = _batched(is_causal, q_BNTH, k_BSNH.swapaxes(1, 2), v_BSNH.swapaxes(1, 2))
    return jnp.swapaxes(y_BNTH, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _batched(is_causal: bool, q_BNTH: jax.Array, k_BNSH: jax.Array, v_BNSH: jax.Array) -> jax.Array:
    """softmax(q·kᵀ)·v, a block of queries at a time, against the keys that the block can see.

    The backward pass computes the weights again from their log-sum, so nothing of the size `[T, S]`
    lives from one pass to the other: a few more FLOPs cost less than fresh memory.

    Source: Dao et al. 2022 (arXiv:2205.14135), appendix B.
    """
    return _batched_forward(is_causal, q_BNTH, k_BNSH, v_BNSH)[0]


def _batched_forward(is_causal, q_BNTH, k_BNSH, v_BNSH):
    outputs, log_sums = [], []
    for rows, keys in _blocks(is_causal, q_BNTH.shape[2], k_BNSH.shape[2]):
        logits_BNTS = _logits(is_causal, q_BNTH, k_BNSH, rows, keys)
        largest_BNT1 = jnp.max(logits_BNTS, axis=-1, keepdims=True)
        weights_BNTS = jnp.exp(logits_BNTS - largest_BNT1)
        sum_BNT1 = jnp.sum(weights_BNTS, axis=-1, keepdims=True)
        weights_BNTS = weights_BNTS.astype(v_BNSH.dtype)
        y_BNTH = _einsum("BNTS,BNSH->BNTH", weights_BNTS, v_BNSH[:, :, keys]) / sum_BNT1
        outputs.append(y_BNTH.astype(v_BNSH.dtype))
        log_sums.append(largest_BNT1 + jnp.log(sum_BNT1))
    y_BNTH, log_sum_BNT1 = jnp.concatenate(outputs, axis=2), jnp.concatenate(log_sums, axis=2)
    return y_BNTH, (q_BNTH, k_BNSH, v_BNSH, y_BNTH, log_sum_BNT1)


def _batched_backward(is_causal, residuals, dy_BNTH):
    q_BNTH, k_BNSH, v_BNSH, y_BNTH, log_sum_BNT1 = residuals
    dtype, wide = q_BNTH.dtype, log_sum_BNT1.dtype
    # The part of every logit's gradient that the softmax's normalisation brings.
    shift_BNT1 = jnp.sum(dy_BNTH.astype(wide) * y_BNTH, axis=-1, keepdims=True)
    dq, dk_BNSH, dv_BNSH = [], jnp.zeros(k_BNSH.shape, wide), jnp.zeros(v_BNSH.shape, wide)
    for rows, keys in _blocks(is_causal, q_BNTH.shape[2], k_BNSH.shape[2]):
        q, dy = q_BNTH[:, :, rows], dy_BNTH[:, :, rows]
        logits_BNTS = _logits(is_causal, q_BNTH, k_BNSH, rows, keys)
        weights_BNTS = jnp.exp(logits_BNTS - log_sum_BNT1[:, :, rows])
        dweights_BNTS = _einsum("BNTH,BNSH->BNTS", dy, v_BNSH[:, :, keys])
        dlogits_BNTS = (weights_BNTS * (dweights_BNTS - shift_BNT1[:, :, rows])).astype(dtype)
        dq.append(_einsum("BNTS,BNSH->BNTH", dlogits_BNTS, k_BNSH[:, :, keys]).astype(dtype))
        dk = _einsum("BNTS,BNTH->BNSH", dlogits_BNTS, q)
        dv = _einsum("BNTS,BNTH->BNSH", weights_BNTS.astype(dtype), dy)
        dk_BNSH, dv_BNSH = dk_BNSH.at[:, :, keys].add(dk), dv_BNSH.at[:, :, keys].add(dv)
    return jnp.concatenate(dq, axis=2), dk_BNSH.astype(dtype), dv_BNSH.astype(dtype)


_batched.defvjp(_batched_forward, _batched_backward)


def _blocks(is_causal: bool, num_queries: int, num_keys: int) -> list[tuple[slice, slice]]:
    """Returns (queries, the keys that they can see) of every block."""
    count = min(-(-num_queries // _BLOCK_QUERIES), _MAX_BLOCKS) if is_causal else 1
    bounds = [num_queries * i // count for i in range(count + 1)]
    return [
        (slice(start, stop), slice(0, min(stop, num_keys) if is_causal else num_keys))
        for start, stop in itertools.pairwise(bounds)
    ]


def _logits(is_causal, q_BNTH, k_BNSH, rows: slice, keys: slice) -> jax.Array:
    logits_BNTS = _einsum("BNTH,BNSH->BNTS", q_BNTH[:, :, rows], k_BNSH[:, :, keys])
    if not is_causal:
        return logits_BNTS
    visible_TS = jnp.arange(rows.start, rows.stop)[:, None] >= jnp.arange(keys.stop)[None, :]
    return jnp.where(visible_TS[None, None], logits_BNTS, jnp.finfo(logits_BNTS.dtype).min)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum that sums in float32 or wider."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=wide)
