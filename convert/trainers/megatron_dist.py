"""Read Megatron-LM's GPT checkpoints, in the format `torch_dist`, its default.

This is the format of `torch.distributed.checkpoint` (DCP):

    iter_0000010/.metadata         a pickle: the tensors, their parts, and where these are stored
    iter_0000010/__0_0.distcp      parts of tensors, each as a file of PyTorch inside of this one
    iter_0000010/common.pt         a file of PyTorch with the arguments of the run

The classes in `.metadata` are not imported: it is read as plain data (untrusted/pickles.py). A part
is a box of a tensor: it has an offset and a size along each dimension. Megatron-LM stores a tensor
of all layers together, with a leading dimension for layers, or each layer under its number.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.tensor_files import Tensor, load_pickle, torch_tensor
from convert.trainers.gpt import Name, parse_name, split_gates
from convert.trainers.megatron import METADATA
from convert.trainers.megatron_args import is_gated, weights_of
from convert.trainers.megatron_state import load_state
from convert.trainers.weights import Weights
from untrusted.files import open_regular, read_bytes
from untrusted.messages import shortened
from untrusted.pickles import Record, read_pickle

_COMMON = "common.pt"
#: Name of the arguments in the metadata, in versions that have no common.pt.
_COMMON_STATE = "common_state/"
#: Types that the metadata may name: DCP's, PyTorch's dtypes and layouts, and Megatron-LM's.
_KNOWN = ("torch.", "megatron.", "pathlib.")
_MAX_METADATA_BYTES = 64 * 2**20
_DTYPES = {
    "torch.float64": np.dtype(np.float64),
    "torch.float32": np.dtype(np.float32),
    "torch.float16": np.dtype(np.float16),
    "torch.bfloat16": np.dtype(ml_dtypes.bfloat16),
}
#: Beginnings of names that do not belong to the model.
_TRAINING = ("optimizer", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")
#: Names of tensors with all layers, and ends of names if both parts of a gated MLP have one.
_OF_ALL_LAYERS = re.compile(r"^((?:model\.|module\.)*decoder\.layers\.)(?!\d)(.+)")
_GATE_PARTS = {".linear_fc1.weight_w": "gate", ".linear_fc1.weight_v": "up"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int  # position of its first byte in the file
    num_bytes: int

    def read(self) -> np.ndarray:
        """Read the values.

        Raises:
            ValueError: The file is damaged.
        """
        values = load_pickle(self.file, content=_slice(self.file, self.start, self.num_bytes))
        array = torch_tensor("a part", values, self.file).map()
        if array.shape != self.shape:
            raise ValueError(
                f"{self.file} has a part of the shape {list(array.shape)} at byte {self.start:,}, "
                f"but {METADATA} says {list(self.shape)}; the checkpoint is damaged"
            )
        return array


def read_parts(folder: Path) -> Weights:
    """Read the checkpoint of an iteration.

    Args:
        folder: folder with `.metadata`.

    Raises:
        ValueError: A file is damaged or missing, or the model is not supported.
    """
    file = folder / METADATA
    content = read_bytes(file, within=folder, max_bytes=_MAX_METADATA_BYTES)
    metadata = read_pickle(content, file, lambda name: name.startswith(_KNOWN))
    try:
        parts = _parts_by_name(metadata, folder)
        tensors = _tensors_of(metadata, parts, file)
    except (AttributeError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {shortened(error)}); it does not describe "
            "the tensors of a checkpoint"
        ) from None
    args = _args_of(folder, parts)
    if is_gated(args):
        # Versions that give both parts names of their own have no tensor with both.
        is_split = any(name.module == "gate" for name in tensors)
        tensors = tensors if is_split else split_gates(tensors)
    return weights_of(args, tensors, file)


def _parts_by_name(metadata: Record, folder: Path) -> dict[str, list[_Part]]:
    """Return the parts of each tensor and object, by its name."""
    described = metadata.get("state_dict_metadata")
    parts: dict[str, list[_Part]] = {}
    for index, place in metadata.get("storage_data").items():
        name = index.get("fqn")
        file = folder / place.get("relative_path")
        if file.parent != folder:
            raise ValueError(f"{folder / METADATA} names {file}, which must be in {folder}")
        offsets = _sizes(index.get("offset"))
        chunks = described[name].get("chunks") or ()
        chunk = next((x for x in chunks if _sizes(x.get("offsets")) == offsets), None)
        part = _Part(
            offsets=offsets,
            shape=() if chunk is None else _sizes(chunk.get("sizes")),
            file=file,
            start=int(place.get("offset")),
            num_bytes=int(place.get("length")),
        )
        parts.setdefault(name, []).append(part)
    return parts


def _sizes(value: Record | None) -> tuple[int, ...]:
    """Return the sizes in a torch.Size."""
    sizes = () if value is None else tuple(value.args[0])
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise TypeError(f"{sizes} are not sizes")
    return sizes


def _tensors_of(
    metadata: Record, parts: Mapping[str, Sequence[_Part]], file: Path
) -> dict[Name, Tensor]:
    tensors: dict[Name, Tensor] = {}
    for name, record in metadata.get("state_dict_metadata").items():
        is_tensor = record.name.endswith(".TensorStorageMetadata")
        if not is_tensor or name.startswith(_TRAINING) or name.endswith("_extra_state"):
            continue
        dtype = record.get("properties").state[0].name
        shape = _sizes(record.get("size"))
        _check_parts(name, shape, dtype, parts[name], file)
        tensors |= _named(name, shape, _DTYPES[dtype], parts[name])
    return tensors


def _check_parts(
    name: str, shape: tuple[int, ...], dtype: str, parts: Sequence[_Part], file: Path
) -> None:
    """Check that the parts cover a tensor, and are stored."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"{file}: tensor {name} has the dtype {shortened(dtype)}, but weights must be "
            f"{', '.join(_DTYPES)}"
        )
    sizes = {part.offsets: math.prod(part.shape) for part in parts}
    is_short = any(
        math.prod(part.shape) * _DTYPES[dtype].itemsize > part.num_bytes for part in parts
    )
    if is_short or sum(sizes.values()) != math.prod(shape):
        raise ValueError(
            f"{file}: the parts of tensor {name} do not make up its shape {list(shape)}; the "
            "checkpoint is damaged"
        )
    missing = next((part.file for part in parts if not part.file.is_file()), None)
    if missing is not None:
        raise ValueError(f"{missing} is missing, but {file} lists a part of {name} in it")


def _named(
    name: str, shape: tuple[int, ...], dtype: np.dtype, parts: Sequence[_Part]
) -> dict[Name, Tensor]:
    """Return the tensor by its name, or the tensors of all layers by their names."""
    of_all = _OF_ALL_LAYERS.match(name)
    if of_all is None:
        boxes = {name: tuple(slice(0, size) for size in shape)}
    else:
        inner = tuple(slice(0, size) for size in shape[1:])
        boxes = {
            f"{of_all[1]}{layer}.{of_all[2]}": (slice(layer, layer + 1), *inner)
            for layer in range(shape[0])
        }
    tensors = {}
    for theirs, box in boxes.items():
        file = parts[0].file
        suffix = next((suffix for suffix in _GATE_PARTS if theirs.endswith(suffix)), None)
        if suffix is None:
            parsed = parse_name(theirs, file)
        else:
            whole = parse_name(theirs.removesuffix(suffix[-2:]), file)
            parsed = dataclasses.replace(whole, module=_GATE_PARTS[suffix])
        tensors[parsed] = Tensor(
            name=theirs,
            file=file,
            dtype=dtype,
            shape=shape if of_all is None else shape[1:],
            map=_reader(box, dtype, parts, is_layer=of_all is not None),
        )
    return tensors


def _reader(box: tuple[slice, ...], dtype: np.dtype, parts: Iterable[_Part], *, is_layer: bool):
    """Return a function that reads a box of a tensor from the parts that overlap it."""
    overlapping = []
    for part in parts:
        bounds = [
            (max(wanted.start, start), min(wanted.stop, start + size))
            for wanted, start, size in zip(box, part.offsets, part.shape, strict=True)
        ]
        if all(start < stop for start, stop in bounds):
            overlapping.append((part, bounds))

    def read() -> np.ndarray:
        values = np.empty([wanted.stop - wanted.start for wanted in box], dtype)
        for part, bounds in overlapping:
            source = tuple(
                slice(start - offset, stop - offset)
                for (start, stop), offset in zip(bounds, part.offsets, strict=True)
            )
            target = tuple(
                slice(start - wanted.start, stop - wanted.start)
                for (start, stop), wanted in zip(bounds, box, strict=True)
            )
            values[target] = part.read()[source]
        return values[0] if is_layer else values

    return read


def _args_of(folder: Path, parts: Mapping[str, Sequence[_Part]]) -> dict[str, Any]:
    """Return the arguments of the run."""
    if (folder / _COMMON).is_file():
        return load_state(folder / _COMMON)["args"]
    common = [*itertools.chain(*(p for name, p in parts.items() if name.startswith(_COMMON_STATE)))]
    if not common:
        raise ValueError(
            f"{folder} has neither {_COMMON} nor {_COMMON_STATE} in {METADATA}, where Megatron-LM "
            "stores the arguments of a run; only its own checkpoints can be read"
        )
    part = common[0]
    content = _slice(part.file, part.start, part.num_bytes)
    return load_state(part.file, content)["args"]


def _slice(file: Path, start: int, num_bytes: int) -> bytes:
    """Read a part of a file."""
    with open_regular(file, within=file.parent) as stream:
        if not 0 <= start <= start + num_bytes <= file.stat().st_size:
            raise ValueError(
                f"{file} ends before byte {start + num_bytes:,}, where {METADATA} says that a part "
                "ends; the checkpoint is damaged"
            )
        stream.seek(start)
        return stream.read(num_bytes)
