"""Counts the work of a compiled program's instructions: products, convolutions, attention."""

import dataclasses
import math
import re

import numpy as np

from predict.program.instruction import Array, Instruction, arrays_of, custom_call_target

#: Queries and keys of a tile of cuDNN's flash attention.
ATTENTION_TILE = 128
_LHS_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)')


def product_flops(instruction: Instruction) -> int | None:
    """Return the FLOPs of a matrix product or a convolution, or None for other instructions.

    A multiply-add is two FLOPs, so a dot has 2·M·N·K per batch element. Multiplications by the
    zeros that a convolution pads with or inserts between elements do not count. Calls of cuBLAS,
    of cuDNN's convolutions and of oneDNN's products count as the products that they compute; a
    library's fused attention does not count.
    """
    name = custom_call_target(instruction) or instruction.opcode
    operands = [next(arrays_of(t), Array("f32", ())) for t in instruction.operand_types[:2]]
    output = next(arrays_of(instruction.type), Array("f32", ()))
    if name == "dot" or name.startswith("__cublas$"):
        dims = _LHS_CONTRACTING.search(instruction.attributes)
        sizes = [operands[0].shape[int(d)] for d in re.findall(r"\d+", dims[1])] if dims else []
        return 2 * output.num_elements * math.prod(sizes)
    if name == "__onednn$matmul":
        # The left operand has M·K elements and the output M·N, whether transposed or not.
        return 2 * operands[0].num_elements * output.shape[-1]
    if name == "convolution" or name.startswith("__cudnn$convForward"):
        return _convolution_flops(instruction.attributes, operands[0], operands[1], output)
    # For a convolution's gradient, cuDNN's call has the attributes of the forward convolution.
    if name == "__cudnn$convBackwardInput":
        return _convolution_flops(instruction.attributes, output, operands[1], operands[0])
    if name == "__cudnn$convBackwardFilter":
        return _convolution_flops(instruction.attributes, operands[0], output, operands[1])
    return None


def _convolution_flops(attributes: str, image: Array, kernel: Array, output: Array) -> int:
    """Return the FLOPs of a convolution from its `dim_labels` and `window`.

    Args:
        attributes: text with e.g. `dim_labels=b01f_01io->b01f` and `window={size=3x3 stride=2x2}`.
        image: input of the forward convolution.
        kernel: its weights.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None
    window = re.search(r"window=\{([^}]*)\}", attributes)
    window_fields = dict(field.split("=") for field in window[1].split()) if window else {}
    products = output.shape[labels[3].index("b")] * output.shape[labels[3].index("f")]
    products *= kernel.shape[labels[2].index("i")]
    for i, label in enumerate(sorted(set(labels[2]) - {"i", "o"})):
        # Count the (output position, kernel position) pairs of this dim that read an input element
        # rather than padding or a zero inserted by dilation.
        size = image.shape[labels[1].index(label)]
        stride, image_dilation, kernel_dilation = (
            int(window_fields[name].split("x")[i]) if name in window_fields else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window_fields["pad"].split("x")[i].split("_")[0]) if "pad" in window_fields else 0
        starts = np.arange(output.shape[labels[3].index(label)])[:, None] * stride - low
        at = starts + np.arange(kernel.shape[labels[2].index(label)]) * kernel_dilation
        inside = (at >= 0) & (at <= (size - 1) * image_dilation) & (at % image_dilation == 0)
        products *= int(inside.sum())
    return 2 * products


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The work of a call of cuDNN's attention.

    Attributes:
        num_queries: queries, over all heads and examples.
        num_pairs: pairs of a query and a key that the kernel computes, over all heads and examples.
        head_dim: mean size of a query's and of a value's head.
    """

    num_queries: int
    num_pairs: int
    head_dim: float


def attention_work(instruction: Instruction) -> AttentionWork:
    """Return the work of a cuDNN attention call.

    The kernel computes tiles of `ATTENTION_TILE` queries and as many keys, and skips a tile whose
    pairs the mask hides in every example. Pairs that are hidden by packed segments or padding
    count, because the program does not contain that information.
    """
    query, _, value = (next(arrays_of(t)) for t in instruction.operand_types[:3])
    shape = re.search(
        r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', instruction.attributes
    )
    assert shape is not None, instruction.name
    batch, num_heads, num_queries, num_keys = map(int, re.findall(r"\d+", shape[1]))
    window_match = re.search(r'"sliding_window_length":\s*"?(\d+)', instruction.attributes)
    window = int(window_match[1]) if window_match else 0
    is_causal = re.search(r'"mask_type":\s*"\w*CAUSAL', instruction.attributes) is not None
    num_tiles = 0
    for first in range(0, num_queries, ATTENTION_TILE):
        last_key = min(num_keys, first + ATTENTION_TILE) if is_causal else num_keys
        first_key = max(0, first - window + 1) if is_causal and window else 0
        num_tiles += -(-last_key // ATTENTION_TILE) - first_key // ATTENTION_TILE
    return AttentionWork(
        num_queries=batch * num_heads * num_queries,
        num_pairs=batch * num_heads * num_tiles * ATTENTION_TILE**2,
        head_dim=(query.shape[-1] + value.shape[-1]) / 2,
    )
