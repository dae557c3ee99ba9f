"""Scaled dot-product attention, and the selection of its kernel.

The setting `model.attention` is `auto` or `plain`. From it and from the hardware that the step is
compiled for, `attend` selects the kernel:

    "cudnn"     GPUs       cuDNN's fused kernel (cudnn_attention.py)
    "blocked"   CPUs       blocks of queries in jax.numpy (blocked_attention.py); also float64, and
                           on all hardware for soft-capped scores and for windows around a token,
                           which other kernels lack
    "plain"     on demand  all scores at once (jax.nn.dot_product_attention); also on GPUs on which
                           cuDNN's kernel cannot run

B batch, T query seq, S key seq, N heads, K key-value heads, G = N / K, H head_dim.

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; grouped queries: Ainslie et al. 2023
(arXiv:2305.13245); sliding window: Beltagy et al. 2020 (arXiv:2004.05150), section 3.1; soft caps:
Gemma Team 2024 (arXiv:2408.00118), section 2; sinks: OpenAI 2025 (arXiv:2508.10925), section 2.2.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from typing import Any, Literal

import jax

from models.layers import blocked_attention, cudnn_attention
from models.layers.flops import attention_flops, declare_flops
from models.layers.kv_cache import attend_to_cache
from models.layers.masks import Mask, Operands, Options, Segments
from models.layers.relative_bias import RelativeBias
from models.layers.ring_attention import BlockKernel, RingOptions, attend_on_ring
from sharding import hardware
from sharding.context_values import bound
from sharding.ops.heads import (
    group_tokens,
    heads_for_tokens,
    heads_of_device,
    over_heads,
    tokens_for_heads,
)
from sharding.ops.sequence import WHOLE, SequenceSplit, split_here

Kernel = Literal["cudnn", "blocked", "plain"]


_BLOCKED = BlockKernel(forward=blocked_attention.forward, backward=blocked_attention.backward)
#: Whether documents are packed -> cuDNN's kernel for a block of the keys of a ring.
_CUDNN = {
    can_pack: BlockKernel(
        forward=functools.partial(cudnn_attention.forward, can_pack=can_pack),
        backward=functools.partial(cudnn_attention.backward, can_pack=can_pack),
    )
    for can_pack in (False, True)
}

#: Values of the setting `model.attention`: "auto" selects the best kernel for the hardware.
SETTINGS = ("auto", "plain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedKernel:
    """The kernel that runs one attention, and the reason.

    Attributes:
        kernel: "cudnn" is cuDNN's fused attention, whose memory is linear in the sequence length;
            "blocked" is models/layers/blocked_attention.py; "plain" materializes all scores.
        why: reason, for display.
        scores_bytes: bytes of the scores `[B, N, T, S]` that this attention materializes on one
            device; 0 if it never holds all of them.
    """

    kernel: Kernel
    why: str
    scores_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kernel} ({self.why})"


_setting: contextvars.ContextVar[str] = contextvars.ContextVar("attention_setting", default="auto")
_recorded: contextvars.ContextVar[dict[SelectedKernel, None] | None] = contextvars.ContextVar(
    "recorded_attention_kernels", default=None
)

_calls: contextvars.ContextVar[dict["AttentionCall", None] | None] = contextvars.ContextVar(
    "recorded_attention_calls", default=None
)


def use(setting: str) -> contextlib.AbstractContextManager:
    """Use one of SETTINGS for all attention that is traced in this context."""
    return bound(_setting, setting)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The heads and the mask of one attention, before devices divide its heads.

    Attributes:
        num_heads: N.
        num_kv_heads: K.
        is_causal: whether a position only sees earlier ones.
    """

    num_heads: int
    num_kv_heads: int
    is_causal: bool


def recorded_calls() -> contextlib.AbstractContextManager[dict[AttentionCall, None]]:
    """Yield a dict whose keys are the different attentions that are traced in this context."""
    return bound(_calls, {})


def recorded_kernels() -> contextlib.AbstractContextManager[dict[SelectedKernel, None]]:
    """Yield a dict whose keys are the kernels of all attention that is traced in this context."""
    return bound(_recorded, {})


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    is_causal: bool,
    window: int | None = None,
    chunk: int | None = None,
    segments: Segments | None = None,
    bias: jax.Array | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    cached_BSKH: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q·kᵀ · scale + bias)·v, `[B, T, N, H]` in the dtype of `q`.

    The kernel depends on the hardware that the step is compiled for (sharding/hardware.py) and on
    the setting (`use`). Its residuals are named "attention"; plain attention does not name any.
    If sequences are split over devices (sharding/ops/sequence.py), queries see the keys of all of
    them.

    Args:
        q_BTNH: queries, of a floating dtype.
        k_BSKH: keys, of the same dtype; K divides N, and head n uses key-value head n // G.
        v_BSKH: values, of the same dtype, whose size may differ.
        is_causal: whether position t only sees positions 0..t.
        window: if given, position t only sees positions that differ from t by less than `window`.
        chunk: if given, the row is in chunks of `chunk` positions, and `segments` keep them apart.
            Caches then keep one chunk.
        segments: int32[B, T] and int32[B, S]; a query only sees keys of its own segment. On a GPU,
            the tokens of a segment must be contiguous, unless there is a bias.
        bias: added to the logits: `[B, N, T, S]`, with dims of size 1 that are broadcast, or a
            function of positions. Only the latter works for a sequence that is split.
        scale: factor of the products; 1 / √H by default.
        softcap: c, which turns the scaled products s into c · tanh(s / c), before the bias.
        sinks_N: float[N], the logit of a further key of each head, whose value is 0; no key by
            default.
        cached_BSKH: array that a cache keeps instead of keys and values (kv_cache.py).
    """
    if (calls := _calls.get()) is not None:
        calls[AttentionCall(q_BTNH.shape[2], k_BSKH.shape[2], is_causal)] = None
    mask = Mask(is_causal=is_causal, window=window)
    scale = 1.0 / math.sqrt(q_BTNH.shape[-1]) if scale is None else scale
    options = Options(mask=mask, scale=scale, softcap=softcap, chunk=chunk)
    split = split_here()
    if split is None and isinstance(bias, RelativeBias):
        bias = bias.whole(q_BTNH.shape[1])
    whole_bias = None if isinstance(bias, RelativeBias) else bias  # caches have no split sequences
    operands = Operands(q_BTNH, k_BSKH, v_BSKH, whole_bias, segments)
    y_BTNH = attend_to_cache(operands, options, cached_BSKH, sinks_N)
    if y_BTNH is not None:
        return y_BTNH
    on_device = functools.partial(_attend_on_device, options)
    if split is not None:
        on_device = functools.partial(_attend_on_context, options, split)
    of_heads = bias if sinks_N is None else _WithSinks(bias=bias, sinks_1N=sinks_N[None])
    arrays = q_BTNH, k_BSKH, v_BSKH, of_heads, segments
    attend_over_heads = functools.partial(over_heads, on_device)
    return declare_flops(_flops(operands, options), attend_over_heads, *arrays)


def _flops(operands: Operands, options: Options) -> int:
    batch, length, num_heads, head_dim = operands.q.shape
    num_keys = operands.k.shape[1]
    sizes = min(num_keys, options.chunk or num_keys), num_heads, head_dim
    masks = {"is_causal": options.mask.is_causal, "window": options.mask.window}
    return batch * length * attention_flops(*sizes, value_dim=operands.v.shape[3], **masks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithSinks:
    """Bias and sinks of heads that have sinks.

    Attributes:
        bias: bias, or None.
        sinks_1N: logit of the sink of each head.
    """

    bias: Any
    sinks_1N: jax.Array


def _attend_on_context(
    options: Options,
    split: SequenceSplit,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    of_heads: RelativeBias | _WithSinks | None,
    segments: Segments | None,
) -> jax.Array:
    """Attend to a sequence that is split: exchange heads within groups, then a ring of groups."""
    bias, sinks_1N = _bias_and_sinks(of_heads)
    if bias is not None and not isinstance(bias, RelativeBias):
        raise ValueError(
            f"mesh.context={split.num_devices} splits sequences, but attention has a bias for "
            "whole rows; set mesh.context=1, or pass a models.layers.relative_bias.RelativeBias"
        )
    if split.group_size > 1:
        q_BTNH, k_BSKH, v_BSKH = (tokens_for_heads(x, split) for x in (q_BTNH, k_BSKH, v_BSKH))
        bias, sinks_1N = jax.tree.map(lambda x: heads_of_device(x, split), (bias, sinks_1N))
        if segments is not None:
            queries, keys = segments
            group_keys = group_tokens(keys, split)
            segments = group_keys if queries is keys else group_tokens(queries, split), group_keys
    if split.ring_size == 1:
        bias_BNTS = None if bias is None else bias.whole(q_BTNH.shape[1])
        added = bias_BNTS if sinks_1N is None else _WithSinks(bias=bias_BNTS, sinks_1N=sinks_1N)
        y_BTNH = _attend_on_device(options, q_BTNH, k_BSKH, v_BSKH, added, segments)
    else:
        operands = Operands(q_BTNH, k_BSKH, v_BSKH, None, segments)
        ring_options = _ring_options(options, split, operands, bias)
        y_BTNH = attend_on_ring(ring_options, q_BTNH, k_BSKH, v_BSKH, segments, bias, sinks_1N)
    return heads_for_tokens(y_BTNH, split) if split.group_size > 1 else y_BTNH


def _ring_options(
    options: Options, split: SequenceSplit, operands: Operands, bias: RelativeBias | None
) -> RingOptions:
    """Select the kernel that attends to the blocks of a ring; only two can merge blocks."""
    _, length, num_heads, _ = operands.q.shape
    shape = (1, num_heads, length, operands.k.shape[1])
    block_bias: Any = None if bias is None else jax.ShapeDtypeStruct(shape, operands.q.dtype)
    with_bias = dataclasses.replace(operands, bias=block_bias)
    selected = select_kernel(with_bias, why_blocked=_why_blocked(options))
    if selected.kernel == "plain":
        where = "on a ring" if split.ring_size > 1 else "with sinks"
        selected = SelectedKernel(kernel="blocked", why=f"{where}, {selected.why}")
    if (kernels := _recorded.get()) is not None:
        kernels[selected] = None
    kernel = _CUDNN[_can_pack()] if selected.kernel == "cudnn" else _BLOCKED
    bias_of = None if bias is None else RelativeBias.between
    return RingOptions(split=split, attention=options, kernel=kernel, bias_of=bias_of)


def _bias_and_sinks(of_heads: Any) -> tuple[Any, jax.Array | None]:
    is_both = isinstance(of_heads, _WithSinks)
    return (of_heads.bias, of_heads.sinks_1N) if is_both else (of_heads, None)


def _attend_on_device(
    options: Options, q_BTNH, k_BSKH, v_BSKH, of_heads: Any, segments: Segments | None
) -> jax.Array:
    """Run the kernel for the heads of one device."""
    bias_BNTS, sinks_1N = _bias_and_sinks(of_heads)
    operands = Operands(q_BTNH, k_BSKH, v_BSKH, bias_BNTS, segments)
    if sinks_1N is not None:
        if bias_BNTS is not None:
            raise ValueError("attention cannot have both sinks and a bias of whole rows")
        # A ring of one device has the log-sum-exp, to which the sinks belong.
        alone = _ring_options(options, WHOLE, operands, None)
        return attend_on_ring(alone, q_BTNH, k_BSKH, v_BSKH, segments, None, sinks_1N)
    selected = select_kernel(operands, why_blocked=_why_blocked(options))
    if (kernels := _recorded.get()) is not None:
        kernels[selected] = None
    if selected.kernel == "blocked":
        return blocked_attention.attend_in_blocks(operands, options)
    if selected.kernel == "cudnn":
        return cudnn_attention.attend_with_cudnn(operands, options, can_pack=_can_pack())
    return _attend_plain(operands, options)


def _why_blocked(options: Options) -> str:
    """Return why only the blocked kernel can run, or "" if others can."""
    if options.softcap is not None:
        return "soft-capped scores"
    if options.mask.window is not None and not options.mask.is_causal:
        return "a window around each token"
    return ""


def select_kernel(operands: Operands, *, why_blocked: str = "") -> SelectedKernel:
    """Return the kernel that runs for these arrays, whose shapes are those on one device.

    Args:
        operands: arrays, or their ShapeDtypeStructs.
        why_blocked: why only the blocked kernel can run, or "".
    """
    device = hardware.current()
    dtype = operands.q.dtype.name
    batch, length, num_heads, head_dim = operands.q.shape
    num_keys = operands.k.shape[1]
    scores = batch * num_heads * length * num_keys
    itemsize = operands.q.dtype.itemsize
    wide = max(itemsize, 4)
    if dtype == "float64":
        return SelectedKernel(kernel="blocked", why="float64, which the others round to float32")
    if why_blocked:
        return SelectedKernel(kernel="blocked", why=why_blocked)
    if _setting.get() == "plain":
        return SelectedKernel(
            kernel="plain", why="model.attention=plain", scores_bytes=wide * scores
        )
    if device.runs_on_cpu:
        return SelectedKernel(kernel="blocked", why=f"platform {device.platform}")
    why_not = _why_not_cudnn(device, dtype, head_dim)
    if why_not:
        return SelectedKernel(kernel="plain", why=why_not, scores_bytes=wide * scores)
    why = f"{dtype}, head_dim {head_dim}, {device.device_kind}"
    scores_bytes = 0
    if operands.segments is not None and operands.bias is None:
        if _can_pack():
            why += ", packed documents"
        else:
            why += f", documents as a mask: compute capability {device.compute_capability} < 9.0"
            # The mask is broadcast over heads.
            scores_bytes = itemsize * scores // num_heads
    elif operands.bias is not None:
        why += ", bias"
        heads = num_heads if operands.bias.shape[1] > 1 else 1
        examples = batch if operands.segments is not None else operands.bias.shape[0]
        scores_bytes = itemsize * examples * heads * length * num_keys
    return SelectedKernel(kernel="cudnn", why=why, scores_bytes=scores_bytes)


def _why_not_cudnn(device: hardware.Hardware, dtype: str, head_dim: int) -> str:
    """Return why cuDNN's attention cannot run for these arrays, or "" if it can."""
    capability = device.compute_capability
    max_head_dim = 256 if capability >= 9 else 128
    if device.platform != "gpu" or not capability:
        return f"{device.device_kind} has no cuDNN"
    if capability < 8:
        return f"cuDNN's attention needs compute capability 8.0 or higher, not {capability}"
    if dtype not in ("bfloat16", "float16"):
        return f"cuDNN's attention does not support {dtype}"
    if head_dim > max_head_dim:
        return f"cuDNN's attention supports head_dim up to {max_head_dim}, not {head_dim}"
    return ""


def _can_pack() -> bool:
    """Return whether the hardware supports cuDNN's layout for packed documents."""
    return hardware.current().compute_capability >= 9


def _attend_plain(operands: Operands, options: Options) -> jax.Array:
    mask_B1TS = None
    if operands.segments is not None:
        q_ids_BT, k_ids_BS = operands.segments
        mask_B1TS = (q_ids_BT[:, :, None] == k_ids_BS[:, None, :])[:, None]
    window = options.mask.window
    return jax.nn.dot_product_attention(
        operands.q,
        operands.k,
        operands.v,
        bias=operands.bias,
        mask=mask_B1TS,
        scale=options.scale,
        is_causal=options.mask.is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
    )
