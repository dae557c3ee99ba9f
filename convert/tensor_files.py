"""Read and write the tensor files of Hugging Face models, one tensor at a time.

A safetensors file consists of

    8 bytes   the length of the header (little-endian)
    header    JSON: name of a tensor -> dtype, shape, and first and last byte of its values
    values    the bytes of all tensors, without gaps

The package `safetensors` is not used here, because models may be larger than memory. Its
`safe_open` copies the tensors, and keeps one mapping of the file open, so every page that was read
counts as memory of this process. Its `save_file` needs all tensors of a file at once; here each
tensor is read and written before the next one.
"""

import dataclasses
import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from untrusted.documents import parse_json, read_json
from untrusted.files import open_new, open_regular, write_text
from untrusted.messages import shortened
from untrusted.schema import check_fields

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE_FILE = "pytorch_model.bin"
#: The first of these files that a directory has contains its weights, or lists their files. This is
#: the order of `transformers`, so an index that was left behind has no effect.
_WEIGHTS = (SINGLE_FILE, INDEX_FILE, _PICKLE_FILE, _PICKLE_INDEX)

#: Name of a dtype in a file -> dtype, for the dtypes of weights.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
#: The same for dtypes of quantized weights, which are only stored; see convert/quantized.py.
_STORED_DTYPES = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}
#: The largest header that is read; 200,000 tensors need about this much.
_MAX_HEADER_BYTES = 32 * 2**20
#: The largest size, and the most dimensions of an array; a product of more sizes takes minutes.
_MAX_SIZE = 2**63 - 1
_MAX_DIMS = 64
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file."""

    name: str
    file: Path
    dtype: np.dtype  # void if it is none of DTYPES
    shape: tuple[int, ...]
    map: Callable[[], np.ndarray]  # returns the memory-mapped values, which are read on access
    # the same for the values of a quantized tensor; None for any other
    stored: Callable[[], np.ndarray] | None = None
    stored_dtype: np.dtype | None = None
    # the same as `map` for some indices of the first dim, if decoding all of them takes long
    map_rows: Callable[[slice], np.ndarray] | None = None


def open_tensors(directory: Path, *, allow_pickle_weights: bool = False) -> dict[str, Tensor]:
    """Open the tensors of a model, by name.

    Args:
        allow_pickle_weights: whether to open pickle files if there are no safetensors files.

    Raises:
        ValueError: There are no tensor files, a file is damaged or missing, or the files are
            pickles, which are not allowed.
    """
    name = next((each for each in _WEIGHTS if (directory / each).is_file()), None)
    if name is None:
        raise ValueError(f"{directory} contains neither {SINGLE_FILE} nor {INDEX_FILE}")
    files = _files_in(directory / name) if name.endswith(".json") else [directory / name]
    is_pickle = name in (_PICKLE_FILE, _PICKLE_INDEX)
    if is_pickle and not allow_pickle_weights:
        raise ValueError(
            f"{files[0]} is a pickle, which can run code when it is opened; save the model as "
            "safetensors, or, if you trust it, add --allow_pickle_weights"
        )
    read = _open_pickle if is_pickle else open_safetensors
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in read(file):
            if tensor.name in tensors:
                first = tensors[tensor.name].file
                raise ValueError(f"{first} and {file} both contain a tensor {tensor.name}")
            tensors[tensor.name] = tensor
    return tensors


def same_values(a: Tensor, b: Tensor, block_rows: int = 1024) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (np.atleast_1d(tensor.map()).view(np.uint8) for tensor in (a, b))
    starts = range(0, len(left), block_rows)  # In blocks, to keep only a few rows in memory.
    return all((left[i : i + block_rows] == right[i : i + block_rows]).all() for i in starts)


class ShardWriter:
    """Writes tensors, in the given order, to numbered safetensors files with an index.

    If everything fits into one file, that file is the only one and there is no index.

    Args:
        tensors: (name, dtype, shape) of all tensors.
        max_shard_bytes: maximum number of bytes of values in a file, unless it contains a
            single tensor; None: everything is in one file.
        single: name of the file, if there is only one.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]],
        *,
        max_shard_bytes: int | None,
        single: str = SINGLE_FILE,
    ):
        self._directory = directory
        self._single = single
        most_bytes = math.inf if max_shard_bytes is None else max_shard_bytes
        self._shards: list[list[tuple[str, np.dtype, tuple[int, ...]]]] = [[]]
        self._total = filled = 0
        for tensor in tensors:
            num_bytes = _num_bytes(*tensor[1:])
            if self._shards[-1] and filled + num_bytes > most_bytes:
                self._shards.append([])
                filled = 0
            self._shards[-1].append(tensor)
            filled += num_bytes
            self._total += num_bytes

    def write(self, read: Callable[[str], np.ndarray]) -> None:
        """Write all tensors.

        Args:
            read: returns the values of a tensor by its name; called once per tensor, in order.
        """
        count = len(self._shards)
        weight_map = {}
        for number, shard in enumerate(self._shards, 1):
            file = self._single if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            weight_map |= {name: file for name, _, _ in shard}
            with open_new(self._directory / file) as stream:
                stream.write(_header(shard))
                for name, dtype, shape in shard:
                    values = read(name)
                    assert values.dtype == dtype and values.shape == shape, name
                    stream.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            write_text(self._directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _header(tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + _num_bytes(dtype, shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def files_in_index(index: Path) -> list[Path]:
    """Return the files that an index lists, which need not exist.

    Raises:
        ValueError: The index is damaged, or lists a file in another directory.
    """
    directory = index.parent
    content = read_json(index, within=directory)
    check_fields(content, {"weight_map": dict[str, str]}, index)
    names = set(content["weight_map"].values())
    if not names:
        raise ValueError(f"{index} is damaged: its 'weight_map' lists no tensors")
    for name in sorted(names):
        if Path(name).name != name:
            raise ValueError(
                f"{index} lists {name!r}, but every file must be a name in {directory}"
            )
    return [directory / name for name in sorted(names)]


def _files_in(index: Path) -> list[Path]:
    files = files_in_index(index)
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} is missing, but {index} lists it")
    return files


def open_safetensors(file: Path) -> Iterator[Tensor]:
    """Yield the tensors of a safetensors file.

    Raises:
        ValueError: The file is damaged.
    """
    header, start = _read_header(file)
    size = file.stat().st_size - start
    end = 0
    for name, dtype_name, shape, (begin, stop) in sorted(header, key=lambda entry: entry[3]):
        dtype = DTYPES.get(dtype_name) or _STORED_DTYPES.get(dtype_name)
        if begin != end or (dtype and stop - begin != _num_bytes(dtype, shape)):
            raise ValueError(f"{file} is damaged: the offsets of {name} are wrong")
        end = stop
        opaque = _opaque(file, name, dtype_name, shape)
        if dtype is None:
            yield opaque
            continue
        read = mapper_of(file, dtype, shape, start + begin)
        if dtype_name in _STORED_DTYPES:
            yield dataclasses.replace(opaque, stored=read, stored_dtype=dtype)
        else:
            yield Tensor(name=name, file=file, dtype=dtype, shape=shape, map=read)
    if end != size:
        raise ValueError(
            f"{file} is damaged: it has {size:,} bytes of tensors, but its header lists {end:,}"
        )


_Entry = tuple[str, str, tuple[int, ...], tuple[int, int]]


def _read_header(file: Path) -> tuple[list[_Entry], int]:
    """Return (name, dtype, shape, offsets) of each tensor, and the offset of the values."""
    with open_regular(file, within=file.parent) as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= file.stat().st_size - 8:
            raise ValueError(f"{file} is damaged: it ends before the end of its header")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(
                f"{file} has a header of {length:,} bytes, but at most {_MAX_HEADER_BYTES:,} can "
                "be read; save the model in several files"
            )
        text = stream.read(length)
    header = parse_json(text, f"the header of {file}")
    entries = [
        _entry(name, entry, file) for name, entry in header.items() if name != "__metadata__"
    ]
    return entries, 8 + length


def _entry(name: str, entry: object, file: Path) -> _Entry:
    """Check the entry of a tensor in a header; return its name, dtype, shape and offsets."""
    fields = entry if isinstance(entry, Mapping) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)) or (
        len(offsets) != 2 or offsets[0] > offsets[1]
    ):
        raise ValueError(
            f"{file} is damaged: its header describes the tensor {shortened(name)!r} as "
            f"{shortened(entry)}, which is not a dtype, a shape and two offsets"
        )
    return name, dtype, tuple(shape), (offsets[0], offsets[1])


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) <= _MAX_DIMS
        and all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)
    )


def mapper_of(
    file: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int
) -> Callable[[], np.ndarray]:
    """Return a function that memory-maps an array in a file.

    Args:
        offset: position of its first byte.
    """

    def map_values() -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype)
        # A new mapping per call, which is closed when its array is freed. A mapping kept open would
        # count every page that was ever read as memory of this process.
        return np.asarray(np.memmap(file, dtype, mode="r", offset=offset, shape=shape))

    return map_values


def _opaque(file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    def refuse() -> np.ndarray:
        raise ValueError(
            f"tensor {name} in {file} has the dtype {dtype}, but weights must be "
            f"{', '.join(DTYPES)}; save a quantized model without quantization"
        )

    return Tensor(name=name, file=file, dtype=np.dtype(np.void), shape=shape, map=refuse)


def load_pickle(
    file: Path, types: Sequence[tuple[type, str]] = (), *, content: bytes | None = None
) -> Any:
    """Load a file of PyTorch with `weights_only`, so that nothing in it can run code.

    Args:
        types: type to use for a name in the file, in addition to those that PyTorch allows.
        content: part of the file to load; None for all of it.

    Raises:
        ValueError: The file is damaged, is not a regular file, or has objects of other types.
    """
    import torch

    open_regular(file, within=file.parent).close()
    source: Any = file if content is None else io.BytesIO(content)
    try:
        # Files written before PyTorch 1.6 are not zip files, and cannot be memory-mapped.
        is_mapped = content is None and zipfile.is_zipfile(file)
        with torch.serialization.safe_globals(list(types)):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as a file of weights only: {shortened(error)}"
        ) from None


def _open_pickle(file: Path) -> Iterator[Tensor]:
    import torch

    state = load_pickle(file)
    is_named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not is_named or not all(isinstance(values, torch.Tensor) for values in state.values()):
        raise ValueError(
            f"{file} contains other objects than tensors with names; save only the weights of the "
            "model, torch.save(model.state_dict(), ...)"
        )
    for name, values in state.items():
        yield torch_tensor(name, values, file)


def torch_tensor(name: str, values: Any, file: Path) -> Tensor:
    """Return a tensor of PyTorch that was loaded from a file.

    Args:
        values: torch.Tensor.

    Raises:
        ValueError: It is sparse, or has no values.
    """
    import torch

    if values.layout is not torch.strided or values.device.type != "cpu":
        raise ValueError(
            f"{file} has the tensor {name}, which is {values.layout} on {values.device.type}; "
            "save dense tensors with their values"
        )
    values = values.detach().resolve_neg()
    if values.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return _opaque(file, name, str(values.dtype), tuple(values.shape))
    if values.dtype == torch.bfloat16:
        array = values.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = values.numpy()
    return Tensor(name=name, file=file, dtype=array.dtype, shape=array.shape, map=lambda: array)


def _num_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize
