"""Weights that files store in formats of few bits, which are read as bfloat16.

float8 ("fp8"): a matrix in float8_e4m3fn, and a factor for each block of 128 x 128 weights:

    x.weight             float8[rows, columns]
    x.weight_scale_inv   float32[ceil(rows / 128), ceil(columns / 128)]

float4 ("mxfp4"): of each output of an expert, 32 inputs share a power of two, and a byte has two
of them, the first one in its low half. The files store the outputs before the inputs, the
parameters of a model the other way around:

    x_blocks   uint8[experts, outputs, inputs / 32, 16]
    x_scales   uint8[experts, outputs, inputs / 32], exponents + 127
    x          bfloat16[experts, inputs, outputs]

Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3.2; Rouhani et al. 2023 (arXiv:2310.10537),
section 5.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from convert.tensor_files import Tensor

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FACTORS = "_scale_inv"
_BLOCKS = "_blocks"
_SCALES = "_scales"
#: Value of each of the 16 numbers of 4 bits: sign, 2 bits of exponent, 1 bit of mantissa.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
#: The same for each byte: two float32, as one complex number, which one lookup gives.
_PAIRS = np.stack((np.tile(_FLOAT4, 16), np.repeat(_FLOAT4, 16)), axis=-1).view(np.complex64)[:, 0]


def can_read(config: Any) -> bool:
    """Return whether weights with this `quantization_config` can be read."""
    if not isinstance(config, Mapping):
        return False
    return config.get("quant_method") == "mxfp4" or _block_size(config) is not None


def dequantized(hf: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with bfloat16 ones instead of those that are quantized.

    Args:
        hf: config.json.
        tensors: name -> tensor, as in the files.

    Raises:
        ValueError: The factors of a tensor do not match it.
    """
    config = hf.get("quantization_config") or {}
    if config.get("quant_method") == "mxfp4":
        return _with_float4(tensors)
    block_size = _block_size(config)
    if block_size is None:
        return dict(tensors)
    decoded = {}
    for name, tensor in tensors.items():
        factors = tensors.get(name + _FACTORS)
        if factors is not None:
            decoded[name] = _float8(tensor, factors, block_size)
        elif name.removesuffix(_FACTORS) not in tensors or not name.endswith(_FACTORS):
            decoded[name] = tensor
    return decoded


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block in float8; None for another format."""
    sizes = config.get("weight_block_size")
    is_float8 = config.get("quant_method") == "fp8" and config.get("fmt", "e4m3") == "e4m3"
    if not is_float8 or not isinstance(sizes, list) or len(sizes) != 2:
        return None
    return (sizes[0], sizes[1]) if all(type(x) is int and x > 0 for x in sizes) else None


def _float8(tensor: Tensor, factors: Tensor, block_size: tuple[int, int]) -> Tensor:
    grid = tuple(-(-size // block) for size, block in zip(tensor.shape, block_size, strict=False))
    if tensor.stored_dtype != _FLOAT8 or len(tensor.shape) != 2 or factors.shape != grid:
        raise ValueError(
            f"tensor {tensor.name} in {tensor.file} has the shape {list(tensor.shape)} and "
            f"{factors.name} {list(factors.shape)}; with weight_block_size={list(block_size)}, the "
            f"first must be a matrix in float8_e4m3, and the second one {list(grid)}"
        )
    decode = partial(_decode_float8, tensor, factors, block_size)
    return dataclasses.replace(tensor, dtype=_BFLOAT16, map=decode)


def _decode_float8(tensor: Tensor, factors: Tensor, block_size: tuple[int, int]) -> np.ndarray:
    assert tensor.stored is not None
    values = tensor.stored().astype(np.float32)
    of_blocks = factors.map().astype(np.float32)
    for axis, block in enumerate(block_size):
        of_blocks = np.repeat(of_blocks, block, axis)
    values *= of_blocks[: values.shape[0], : values.shape[1]]
    return values.astype(_BFLOAT16)


def _with_float4(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    decoded = {}
    for name, tensor in tensors.items():
        whole = name.removesuffix(_BLOCKS)
        scales = tensors.get(whole + _SCALES)
        if name.endswith(_BLOCKS) and scales is not None:
            decoded[whole] = _float4(whole, tensor, scales)
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
            decoded[name] = tensor
    return decoded


def _float4(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    dtypes = {blocks.stored_dtype, scales.stored_dtype}
    if (
        dtypes != {np.dtype(np.uint8)}
        or blocks.shape != (*scales.shape, 16)
        or (len(scales.shape) != 3)
    ):
        raise ValueError(
            f"tensor {blocks.name} in {blocks.file} has the shape {list(blocks.shape)} and "
            f"{scales.name} {list(scales.shape)}; they must be bytes [experts, outputs, inputs / "
            "32, 16] and [experts, outputs, inputs / 32]"
        )
    experts, outputs, groups = scales.shape
    decode = partial(_decode_float4, blocks, scales)
    return Tensor(
        name=name,
        file=blocks.file,
        dtype=_BFLOAT16,
        shape=(experts, 32 * groups, outputs),
        map=lambda: decode(slice(None)),
        map_rows=decode,
    )


def _decode_float4(blocks: Tensor, scales: Tensor, rows: slice) -> np.ndarray:
    """Return the values of some experts."""
    assert blocks.stored is not None and scales.stored is not None
    stored = blocks.stored()[rows]
    factors = np.ldexp(np.float32(1), scales.stored()[rows].astype(np.int32) - 127)
    experts, outputs, groups = factors.shape
    bits = np.empty((experts, 32 * groups, outputs), np.uint16)  # NumPy transposes these faster.
    for number in range(experts):  # One at a time, because float32 needs twice the memory.
        decoded = _PAIRS[stored[number]].view(np.float32) * factors[number, :, :, None]
        bits[number] = decoded.astype(_BFLOAT16).view(np.uint16).reshape(outputs, -1).T
    return bits.view(_BFLOAT16)
