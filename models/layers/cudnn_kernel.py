"""Bindings of cuDNN's fused attention: one function for the forward, one for the backward pass.

`jax.nn.dot_product_attention` does not suffice: it supports neither packed documents nor returning
the statistics of the softmax. It also queries the GPUs of the current process, and its partitioning
rules need devices, so only parts of it compile for GPUs that are not installed. The two primitives
defined here have no such rules. They use jax's shape functions and lowerings, and this is the only
module that depends on these private parts of jax.

B batch, T query seq, S key seq, N heads, K key-value heads, H head_dim, M documents of a row.

Source: cuDNN's documentation of scaled dot-product attention, forward and backward.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.extend.core import Primitive
from jax.interpreters import mlir

#: Parameters that only newer versions of jax have, for modifying the scores. They stay None.
_MORE_PARAMS = dict.fromkeys(
    {"score_mod_name", "score_mod_jaxpr"}.intersection(
        inspect.signature(fused._dot_product_attention_fwd_cuda_lowering).parameters
    )
)


_forward_p = Primitive("dot_product_attention_fwd")
_forward_p.multiple_results = True
_forward_p.def_abstract_eval(fused._dot_product_attention_fwd_abstract)
mlir.register_lowering(_forward_p, fused._dot_product_attention_fwd_cuda_lowering, platform="cuda")

_backward_p = Primitive("dot_product_attention_bwd")
_backward_p.multiple_results = True
_backward_p.def_abstract_eval(fused._dot_product_attention_bwd_abstract)
mlir.register_lowering(_backward_p, fused._dot_product_attention_bwd_cuda_lowering, platform="cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Static options of a call.

    Attributes:
        scale: factor of the products of queries and keys.
        is_causal: whether query t only sees keys 0..t, counted from the start of its document, if
            there are documents.
        window: if given, query t only sees the last `window` of these keys.
        has_bias_gradient: whether the backward pass returns the gradient of the bias.
    """

    scale: float
    is_causal: bool
    window: int | None = None
    has_bias_gradient: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths and positions of the packed documents of a batch, row by row.

    Attributes:
        q: int32[B, M], numbers of queries; 0 for unused entries, which come last.
        k: the same for keys.
        q_offsets: int32[B, M + 1], index of each document's first element in the whole array,
            counted in elements rather than tokens.
        k_offsets: the same for keys.
    """

    q: jax.Array
    k: jax.Array
    q_offsets: jax.Array
    k_offsets: jax.Array


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias_BNTS: jax.Array | None,
    lengths: Lengths | None,
    options: KernelOptions,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention output, and the log-sum-exp of each query's logits.

    Args:
        q_BTNH: queries, float16 or bfloat16; H is a multiple of 8. With a bias or with lengths, T
            is even.
        k_BSKH: keys, of the same dtype; K divides N. With a bias or with lengths, S is even.
        v_BSKH: values, of the same dtype.
        bias_BNTS: bias in the same dtype, whose first two dims may be 1; None with lengths.
        lengths: packed documents; None if each row is one.
        options: static options.

    Returns:
        output `[B, T, N, H]`, which is undefined for tokens that belong to no document.
        stats float32[B, N, T], or float32[B · M, N, T] with lengths: one row per document, in the
            order of `lengths`, beginning with the document's first query.
    """
    y, stats = _forward_p.bind(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        *_optional(q_BTNH, bias_BNTS, lengths),
        **_params(bias_BNTS, lengths, options),
        is_training=True,
    )
    return y, stats


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias_BNTS: jax.Array | None,
    lengths: Lengths | None,
    options: KernelOptions,
    stats: jax.Array,
    y_BTNH: jax.Array,
    dy_BTNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of q, k, v and the bias; the last is None without a bias gradient.

    Args:
        q_BTNH: as for `forward`.
        k_BSKH: as for `forward`.
        v_BSKH: as for `forward`.
        bias_BNTS: as for `forward`.
        lengths: as for `forward`.
        options: as for `forward`.
        stats: statistics returned by `forward`.
        y_BTNH: output returned by `forward`.
        dy_BTNH: cotangent of the output.
    """
    dq, dk, dv, *dbias = _backward_p.bind(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        *_optional(q_BTNH, bias_BNTS, lengths),
        stats,
        y_BTNH,
        dy_BTNH,
        **_params(bias_BNTS, lengths, options),
    )
    return dq, dk, dv, dbias[0] if dbias else None


def _optional(q_BTNH, bias_BNTS, lengths: Lengths | None) -> list[jax.Array]:
    """Return bias, lengths, offsets and page tables, with an empty array for each that is None."""
    none = jnp.zeros((0,), q_BTNH.dtype)
    arrays = [bias_BNTS]
    arrays += [None] * 4 if lengths is None else dataclasses.astuple(lengths)
    return [none if array is None else array for array in (*arrays, None, None)]


def _params(bias_BNTS, lengths: Lengths | None, options: KernelOptions) -> dict:
    kinds = {
        (False, False): fused.MaskType.NO_MASK,
        (False, True): fused.MaskType.CAUSAL,
        (True, False): fused.MaskType.PADDING,
        (True, True): fused.MaskType.PADDING_CAUSAL,
    }
    return _MORE_PARAMS | {
        "scale": options.scale,
        "seed": 42,  # seed of dropout, which is not used
        "dropout_rate": 0.0,
        "variadic_args": (bias_BNTS is not None, options.has_bias_gradient),
        "mask_type": kinds[lengths is not None, options.is_causal],
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": options.window,
    }
