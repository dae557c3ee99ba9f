r"""Read and write token files of Megatron-LM and LiBai, and read token files of fairseq.

PREFIX.bin contains the tokens of all sequences, one after another, and is memory-mapped. PREFIX.idx
is little-endian and contains, in this order (N sequences, D document bounds):

    9 bytes   the magic number b'MMIDIDX\0\0'
    u64       version, 1
    u8        code of the dtype
    u64       N
    u64       D                                                     (not in fairseq)
    int32[N]  number of tokens of each sequence
    int64[N]  first byte of each sequence in PREFIX.bin
    int64[D]  first sequence of each document; the last entry is N  (not in fairseq)

A document consists of one or more sequences. In fairseq every sequence is a document.

Source: megatron/core/datasets/indexed_dataset.py; fairseq/data/indexed_dataset.py.
"""

import glob
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.checks import matches_of
from untrusted.files import open_new, open_regular

_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
_WRITTEN_DTYPES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}


@dataclass(frozen=True, kw_only=True)
class TokenFile(Sequence[np.ndarray]):
    """The documents of a token file: a sequence of arrays of token ids, read on access.

    Attributes:
        tokens: memory-mapped tokens of all documents, one after another.
        bounds: int64[number of documents + 1]: the first token of each document, then the end of
            the last one.
        num_sequences: number of sequences in the file; these are parts of documents, such as
            sentences.
        kind: 'Megatron' or 'fairseq'.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    num_sequences: int
    kind: str

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]


def find_token_files(patterns: Iterable[str]) -> list[str]:
    """Return the prefixes of token files that are named, or that match globs, in this order.

    Args:
        patterns: paths of token files, or globs of them, with or without the suffix .bin or .idx.

    Raises:
        FileNotFoundError: A glob matches no .bin file.
    """
    prefixes: list[str] = []
    for pattern in patterns:
        stem = pattern.removesuffix(".bin").removesuffix(".idx")
        if not glob.has_magic(stem):
            prefixes.append(stem)
            continue
        matches = sorted(matches_of(f"{stem}.bin"))
        if not matches:
            raise FileNotFoundError(
                f"data.paths: no token file matches {pattern!r} (in {Path.cwd()}); correct the glob"
            )
        prefixes += [match.removesuffix(".bin") for match in matches]
    return prefixes


def token_file_paths(prefix: str) -> tuple[Path, Path]:
    """Return the paths of the .bin and the .idx file.

    Args:
        prefix: path without suffix, or with either suffix.

    Raises:
        FileNotFoundError: One of the files does not exist.
    """
    stem = str(Path(prefix.removesuffix(".bin").removesuffix(".idx")).expanduser())
    paths = Path(stem + ".bin"), Path(stem + ".idx")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"data.paths: there is no file {path} (in {Path.cwd()}); use the path of a token "
                "file without its suffix, such as 'my_tokens' for my_tokens.bin and my_tokens.idx"
            )
    return paths


def open_token_file(prefix: str) -> TokenFile:
    """Open a token file, and check that its header, sizes and bounds are consistent.

    Args:
        prefix: path without suffix, or with the suffix .bin or .idx.

    Raises:
        FileNotFoundError: The .bin or the .idx file does not exist.
        ValueError: The file is damaged, or has another format.
    """
    bin_path, idx_path = token_file_paths(prefix)
    dtype, sizes, pointers, document_starts, kind = _read_index(idx_path)
    num_bytes = bin_path.stat().st_size
    # Before all sequences are read, so that a file full of zeros is refused at once.
    last_end = int(pointers[-1]) + int(sizes[-1]) * dtype.itemsize if len(sizes) else 0
    _require(
        last_end == num_bytes,
        bin_path,
        f"has {num_bytes} bytes, but in {idx_path.name} the last sequence ends at byte {last_end}",
    )
    ends = np.cumsum(sizes, dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    _require(
        num_bytes == num_tokens * dtype.itemsize,
        bin_path,
        f"has {num_bytes} bytes, but {idx_path.name} lists {num_tokens} tokens of "
        f"{dtype.itemsize} bytes",
    )
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    _require(
        len(sizes) == 0 or (sizes >= 0).all() and (pointers == starts[:-1] * dtype.itemsize).all(),
        idx_path,
        "has sequences that are not contiguous",
    )
    _require(
        len(document_starts) > 0
        and document_starts[0] == 0
        and document_starts[-1] == len(sizes)
        and (np.diff(document_starts) >= 0).all(),
        idx_path,
        f"has document bounds that do not increase from 0 to {len(sizes)}, its number of sequences",
    )
    # An empty file cannot be memory-mapped.
    tokens = np.memmap(bin_path, dtype, mode="r") if num_tokens else np.zeros(0, dtype)
    return TokenFile(
        tokens=tokens, bounds=starts[document_starts], num_sequences=len(sizes), kind=kind
    )


def write_token_file(prefix: str, documents: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Write documents to a token file, each as one sequence.

    Both files are written under temporary names and renamed at the end.

    Args:
        prefix: path of the file, without suffix.
        documents: token ids of each document, int[number of tokens], with the end-of-document
            token last.
        dtype: uint16 or int32, which all programs that read such files support.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    sizes = []
    with open_new(Path(f"{prefix}.bin.tmp")) as stream:
        for document in documents:
            stream.write(document.astype(dtype).tobytes())
            sizes.append(len(document))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    with open_new(Path(f"{prefix}.idx.tmp")) as stream:
        stream.write(_HEADER.pack(_MAGIC, _VERSION, _WRITTEN_DTYPES[dtype], len(sizes)))
        stream.write(struct.pack("<Q", len(sizes) + 1))
        stream.write(np.array(sizes, "<i4").tobytes())
        stream.write((starts[:-1] * dtype.itemsize).astype("<i8").tobytes())
        stream.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    for ending in ("bin", "idx"):
        os.replace(f"{prefix}.{ending}.tmp", f"{prefix}.{ending}")


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray, str]:
    """Read an .idx file: dtype, sizes, pointers, document bounds, and 'Megatron' or 'fairseq'."""
    with open_regular(path) as file:
        head = file.read(_HEADER.size + 8)
        num_bytes = os.fstat(file.fileno()).st_size
    _require(num_bytes >= _HEADER.size, path, f"ends within its header of {_HEADER.size} bytes")
    magic, version, code, num_sequences = _HEADER.unpack_from(head)
    _require(magic == _MAGIC, path, f"begins with {magic!r} instead of {_MAGIC!r}")
    _require(version == _VERSION, path, f"has version {version}, but only {_VERSION} can be read")
    _require(code in _DTYPES, path, f"has dtype code {code}, which must be one of {[*_DTYPES]}")
    # Each sequence takes 12 bytes, an int32 and an int64. Only a file of fairseq ends there.
    first = _HEADER.size
    remaining_bytes = num_bytes - _HEADER.size - 12 * num_sequences
    is_fairseq = remaining_bytes == 0
    num_bounds = 0
    if not is_fairseq:
        _require(
            remaining_bytes >= 8,
            path,
            f"has {num_bytes} bytes, too few for {num_sequences} sequences",
        )
        (num_bounds,) = struct.unpack_from("<Q", head, first)
        first += 8
        _require(
            remaining_bytes == 8 + 8 * num_bounds,
            path,
            f"has {num_bytes} bytes, which does not match {num_sequences} sequences and "
            f"{num_bounds} document bounds",
        )
    content = np.memmap(path, np.uint8, mode="r")
    sizes = np.frombuffer(content, "<i4", num_sequences, first)
    pointers = np.frombuffer(content, "<i8", num_sequences, first + 4 * num_sequences)
    bounds = np.frombuffer(content, "<i8", num_bounds, first + 12 * num_sequences)
    if is_fairseq:
        return np.dtype(_DTYPES[code]), sizes, pointers, np.arange(num_sequences + 1), "fairseq"
    return np.dtype(_DTYPES[code]), sizes, pointers, bounds, "Megatron"


def _require(holds: object, path: Path, what: str) -> None:
    if not holds:
        raise ValueError(
            f"data.paths: {path} {what}: it is not an intact token file of Megatron or fairseq; "
            "copy or write it again"
        )
