"""cuDNN's fused attention, as one function for the forward and one for the backward.

`jax.nn.dot_product_attention` offers neither packed documents nor the softmax's statistics, asks
the GPUs of this process what they can do, and brings rules for XLA's partitioner that need devices;
so it compiles for GPUs that are not there only in part. The two primitives here have no such rules,
only jax's own shapes and lowering. This is the only module that knows jax's private ones.

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

#: Parameters that only newer versions of jax have, for a function of the scores: none is wanted.
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
class Options:
    """What is fixed when a call is traced.

    Attributes:
      scale: of the products of queries and keys.
      is_causal: query t sees keys 0..t, counted from the first of its row or document.
      window: query t sees the `window` last of these alone; None: all.
      has_bias_gradient: whether the backward returns the gradient of the bias.
    """

    scale: float
    is_causal: bool
    window: int | None = None
    has_bias_gradient: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Which queries and keys of each row count, or where its documents are.

    Without offsets, rows have one length each, and what is behind it is padding. With offsets, they
    list all documents of the batch, row after row; unused places at the end have length 0.

    Attributes:
      q, k: int32[B], or int32[B, M] with offsets.
      q_offsets, k_offsets: int32[B, M + 1] or None; number of the document's first element in the
        whole array, counted in elements, not tokens.
    """

    q: jax.Array
    k: jax.Array
    q_offsets: jax.Array | None = None
    k_offsets: jax.Array | None = None


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias_BNTS: jax.Array | None,
    lengths: Lengths | None,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Returns attention's output, and the log-sum of each query's exponentiated logits.

    Args:
      q_BTNH, k_BSKH, v_BSKH: float16 or bfloat16; K divides N, H is a multiple of 8, T and S are
        even.
      bias_BNTS: in their dtype; its first two dims may be 1. Not with offsets.
      lengths: None: all queries and keys count.

    Returns:
      output `[B, T, N, H]`; what belongs to no document is undefined.
      stats float32[B, N, T], or float32[B · M, N, T] with offsets: a row for each document, in the
        order of `lengths`, its first query first.
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
    options: Options,
    stats: jax.Array,
    y_BTNH: jax.Array,
    dy_BTNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the gradients of q, k, v and the bias; None for a bias that has none.

    Args:
      stats, y_BTNH: what `forward` returned.
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
    """Returns bias, lengths, offsets and page tables; an array without elements for none."""
    none = jnp.zeros((0,), q_BTNH.dtype)
    given = [bias_BNTS]
    given += [None] * 4 if lengths is None else dataclasses.astuple(lengths)
    return [none if array is None else array for array in (*given, None, None)]


def _params(bias_BNTS, lengths: Lengths | None, options: Options) -> dict:
    kinds = {
        (False, False): fused.MaskType.NO_MASK,
        (False, True): fused.MaskType.CAUSAL,
        (True, False): fused.MaskType.PADDING,
        (True, True): fused.MaskType.PADDING_CAUSAL,
    }
    return _MORE_PARAMS | {
        "scale": options.scale,
        "seed": 42,  # of a dropout that does not happen
        "dropout_rate": 0.0,
        "variadic_args": (bias_BNTS is not None, options.has_bias_gradient),
        "mask_type": kinds[lengths is not None, options.is_causal],
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": options.window,
    }
