"""Weights that files store in formats of few bits, which are read as bfloat16.

float8 ("fp8"): a matrix in float8_e4m3fn, and a factor for each block of 128 x 128 weights:

    x.weight             float8[rows, columns]
    x.weight_scale_inv   float32[ceil(rows / 128), ceil(columns / 128)]

Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3.2.
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


def can_read(config: Any) -> bool:
    """Return whether weights with this `quantization_config` can be read."""
    return isinstance(config, Mapping) and _block_size(config) is not None


def dequantized(hf: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with bfloat16 ones instead of those that are quantized.

    Args:
        hf: config.json.
        tensors: name -> tensor, as in the files.

    Raises:
        ValueError: The factors of a tensor do not match it.
    """
    block_size = _block_size(hf.get("quantization_config") or {})
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
    values = tensor.stored().astype(np.float32)
    of_blocks = factors.map().astype(np.float32)
    for axis, block in enumerate(block_size):
        of_blocks = np.repeat(of_blocks, block, axis)
    values *= of_blocks[: values.shape[0], : values.shape[1]]
    return values.astype(_BFLOAT16)
