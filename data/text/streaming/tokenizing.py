"""Tokenizes a shard, in a process with limits: the file may come from a stranger.

The tokens of a shard, `a b E c d e E` for the documents "ab" and "cde", are written to a file that
ends with their SHA-256.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from data.text.tables import open_lines
from data.text.text_files import read_documents
from data.text.token_store import token_chunks
from data.text.tokenization.file_tokenizer import encode_exactly, encode_texts
from untrusted.files import open_new, open_regular

_DIGEST_BYTES = 32


def tokenize(argument: dict[str, Any]) -> None:
    """Tokenize a shard.

    Args:
        argument: "file" to read, its "name" for messages, and its "text_field"; "tokenizer", the
            content of a tokenizer.json, "eos_id" and "dtype" of the tokens; "target", the file to
            write, and "max_bytes", the largest number of bytes of tokens.

    Raises:
        ValueError: The file is damaged or has no texts, or its tokens take more bytes.
    """
    file = Path(argument["file"])
    encode = functools.partial(encode_texts, _load(argument["tokenizer"]))
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with open_lines(file) as lines, open_new(Path(argument["target"])) as target:
            documents = read_documents(lines, file, argument["text_field"])
            for tokens in token_chunks(documents, encode, argument["eos_id"]):
                content = tokens.astype(argument["dtype"]).tobytes()
                num_bytes += len(content)
                if num_bytes > argument["max_bytes"]:
                    raise ValueError(f"data.paths: {file} {TOO_LARGE}")
                digest.update(content)
                target.write(content)
            target.write(digest.digest())
    except OSError as error:
        raise ValueError(
            f"data.paths: {argument['name']} cannot be tokenized: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ValueError(str(error).replace(str(file), argument["name"])) from error


#: Part of the message about a shard whose tokens take too many bytes.
TOO_LARGE = "takes more than its part of data.cache_gb"


def open_tokens(path: Path, dtype: np.dtype) -> np.ndarray | None:
    """Return the memory-mapped tokens that `tokenize` has written; None if they are damaged.

    Raises:
        FileNotFoundError: There is no such file.
    """
    open_regular(path).close()
    if path.stat().st_size < _DIGEST_BYTES:
        return None
    content = np.memmap(path, np.uint8, mode="r")
    tokens = content[:-_DIGEST_BYTES]
    digest = content[-_DIGEST_BYTES:].tobytes()
    if len(tokens) % dtype.itemsize or hashlib.sha256(tokens.data).digest() != digest:
        return None
    return tokens.view(dtype)


@functools.lru_cache(maxsize=1)
def _load(content: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(content)
    encode_exactly(tokenizer)
    return tokenizer
