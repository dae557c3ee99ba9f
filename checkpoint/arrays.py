"""Opens the arrays of a checkpoint, and compares them with its list of arrays.

Orbax stores arrays in three layers, all in `state/`:

    _METADATA           the list of arrays (JSON): the keys of each, and its shape and dtype
    manifest.ocdbt      a key-value store (OCDBT) over the files in d/ and ocdbt.process_*/
      <name>/zarr.json    shape, dtype and chunk grid of an array
      <name>/c/0/1        its chunks

Each process writes a store of its own, and Orbax merges them when the save is complete. If it finds
none, it only logs a warning. Checkpoints of older versions have a list without shapes and dtypes.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts

from checkpoint.errors import ReadError, is_file, read_patiently
from checkpoint.layout import MANIFEST, STATE, STRUCTURE
from checkpoint.paths import check_path
from untrusted.documents import read_json
from untrusted.messages import shortened
from untrusted.schema import check_fields

# TensorStore keeps this much of recently read chunks in memory.
_CACHE_BYTES = 64 * 2**20

#: Key of the shapes and dtypes by name in the custom metadata of `_METADATA`.
DESCRIPTIONS = "arrays"

_LEAF = dict[str, Any]
_CHUNK = re.compile(r"(.+)/c((?:/\d+)*)")


def find_damage_of_arrays(step: Path) -> str | None:
    """Return a sentence about the first array that cannot be read, or None; no contents are read.

    Raises:
        ValueError: no checkpoint can be stored in this directory; see `check_path`.
        ReadError: a file cannot be read.
    """
    check_path(step)
    try:
        open_arrays(step)
    except ValueError as error:
        return str(error)
    return None


def open_arrays(step: Path) -> dict[str, ts.TensorStore]:
    """Open the arrays of a checkpoint by name, such as `params.layers.norm.scale`, and check them.

    Raises:
        ValueError: the arrays are damaged; the message is one sentence.
        ReadError: a file cannot be read.
    """
    state = check_path(step / STATE)
    try:
        listed = read_patiently(step / STRUCTURE, lambda: _read_list(step))
    except FileNotFoundError:
        raise ValueError(f"{STRUCTURE} is missing, which lists the arrays") from None
    if not is_file(step / MANIFEST):
        raise ValueError(f"{MANIFEST} is missing, which merges the arrays of all processes")
    try:
        stored, chunks = read_patiently(state, lambda: _open(state, listed))
    except (ReadError, MemoryError):
        raise
    except Exception as error:  # TensorStore's, which has several lines
        raise ValueError(f"{STATE}/ does not have the listed arrays ({shortened(error)})") from None
    for name, array in stored.items():
        described = f"{array.dtype.name}{list(array.shape)}"
        if listed[name] not in (None, described):
            raise ValueError(
                f"{STATE}/: {name} is {described}, but {listed[name]} in the list of arrays"
            )
        grid: Any = array.chunk_layout.write_chunk.shape or ()
        sizes = zip(array.shape, grid, strict=True)
        num_chunks = math.prod(-(-size // chunk) for size, chunk in sizes)
        if chunks[name] != num_chunks:
            raise ValueError(f"{STATE}/: {name} has {chunks[name]} of {num_chunks} chunks")
    return stored


def _read_list(step: Path) -> dict[str, str | None]:
    """Return shape and dtype of each array by name, as in `float32[4, 8]`; None if not listed.

    Raises:
        ValueError: the list is damaged.
        OSError: it cannot be read.
    """
    file = step / STRUCTURE
    metadata = read_json(file, within=step)
    types = {"tree_metadata": dict[str, _LEAF], "custom_metadata": dict[str, Any] | None}
    check_fields(metadata, types, file)
    names = []
    for leaf in metadata["tree_metadata"].values():
        check_fields(leaf, {"key_metadata": list[_LEAF], "value_metadata": _LEAF}, file)
        if leaf["value_metadata"].get("skip_deserialize") is not True:  # else it is empty
            names.append(tuple(str(key.get("key")) for key in leaf["key_metadata"]))
    arrays: dict[str, str | None] = {".".join(keys): None for keys in sorted(names)}
    custom = metadata.get("custom_metadata") or {}
    check_fields(custom, {DESCRIPTIONS: dict[str, str] | None}, file)
    descriptions = custom.get(DESCRIPTIONS)
    if descriptions is None:
        return arrays
    if descriptions.keys() != arrays.keys():
        raise ValueError(f"{file} is damaged: its two lists of arrays have different names")
    return arrays | descriptions


def _open(
    state: Path, listed: Mapping[str, str | None]
) -> tuple[dict[str, ts.TensorStore], Counter[str]]:
    """Open arrays, and count the chunks of each array that is stored."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
    keys = ts.KvStore.open(base, context=context).result().list().result()
    matches = (_CHUNK.fullmatch(key.decode(errors="replace")) for key in keys)
    chunks = Counter(match[1] for match in matches if match)
    opening = {
        name: ts.open(
            {
                "driver": "zarr3",
                "kvstore": base | {"path": f"{name}/"},
                "fill_missing_data_reads": False,
            },
            open=True,
            read=True,
            context=context,
        )
        for name in listed
    }
    return {name: future.result() for name, future in opening.items()}, chunks
