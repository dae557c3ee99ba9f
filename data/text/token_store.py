"""A corpus as one memory-mapped array of token ids per split, tokenised once and kept."""

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from data.text.documents import Documents
from data.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Raise this when the files' meaning changes: it makes every corpus be tokenised anew.
_REVISION = 1
# Characters and documents tokenised at once: enough to keep the tokenizer's threads busy, little
# enough that memory stays small.
_BATCH_CHARACTERS = 2**22
_BATCH_DOCUMENTS = 4096
# Tokens looked through at once.
_SEARCHED_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The token ids of each split.

    Attributes:
        splits: uint16 or uint32 [number of tokens] a split: one end of document, then every
            document followed by one.
        fingerprint: A hash of all of them; the same wherever the same corpus was tokenised.
    """

    splits: dict[str, np.ndarray]
    fingerprint: str


def load_tokens(corpus: Documents, tokenizer: Tokenizer, *, directory: Path) -> TokenStore:
    """Returns the corpus's tokens from the cache, tokenising it first if they are not there.

    Processes that start together tokenise once, and none sees half-written files: they are
    written under another name and renamed when complete.

    Args:
        corpus: Of the documents; opened only if the tokens are not cached.
        tokenizer: Turns a document into ids, unless it is ids already.
        directory: The cache directory.
    """
    keyed = f"{_REVISION}\0{corpus.key}\0{tokenizer.fingerprint}"
    final = directory / f"tokens-{hashlib.sha256(keyed.encode()).hexdigest()[:16]}"
    store = _open(final)
    if store is not None:
        return store
    directory.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{final}.lock"):
        store = _open(final)
        if store is None:
            # Whatever lies here was left by a build that was killed, or was damaged since.
            temporary = final.with_suffix(".tmp")
            for left_over in (temporary, final):
                shutil.rmtree(left_over, ignore_errors=True)
            temporary.mkdir()
            _build(corpus, tokenizer, temporary)
            os.rename(temporary, final)
            store = _open(final)
            assert store is not None, final
    return store


def document_ends(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Returns where ends of documents stand in a split, int64, without a copy of all tokens."""
    found = [
        np.flatnonzero(tokens[first : first + _SEARCHED_TOKENS] == eos_id) + first
        for first in range(0, len(tokens), _SEARCHED_TOKENS)
    ]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _build(corpus: Documents, tokenizer: Tokenizer, directory: Path) -> None:
    encode = tokenizer.encode_batch
    if corpus.is_encoded:
        encode = functools.partial(_checked_ids, tokenizer)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    digest = hashlib.sha256(str(dtype).encode())
    num_tokens = {}
    for split, documents in corpus.open().items():
        logger.info("Tokenising %d documents of the %s split", len(documents), split)
        with open(directory / f"{split}.bin", "wb") as stream:
            for tokens in _token_chunks(documents, encode, tokenizer.eos_id):
                content = tokens.astype(dtype).tobytes()
                stream.write(content)
                digest.update(content)
            num_tokens[split] = stream.tell() // dtype.itemsize
        digest.update(split.encode())
    meta = {"dtype": str(dtype), "num_tokens": num_tokens, "fingerprint": digest.hexdigest()}
    (directory / "meta.json").write_text(json.dumps(meta))


def _token_chunks(
    documents: Sequence[Any], encode: Callable[[list], list[np.ndarray]], eos_id: int
) -> Iterator[np.ndarray]:
    """Yields the split's tokens in order, a batch of documents at a time."""
    end = np.array([eos_id], np.int32)
    # With an end of document before the first token too, every token of the text is predicted.
    yield end
    batch, num_characters = [], 0
    for index in range(len(documents)):
        batch.append(documents[index])
        num_characters += len(batch[-1])
        full = num_characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS
        if full or index == len(documents) - 1:
            yield np.concatenate([p for ids in encode(batch) for p in (ids, end)])
            batch, num_characters = [], 0


def _checked_ids(tokenizer: Tokenizer, documents: list[np.ndarray]) -> list[np.ndarray]:
    """Returns documents of ids without their end, which the store adds to every document.

    Raises:
        ValueError: The tokenizer has no such id.
    """
    checked = []
    for ids in documents:
        ids = ids.astype(np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            bad = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
            raise ValueError(
                f"data.name='megatron': the token id {bad} must be at least 0 and less than the "
                f"tokenizer's {tokenizer.vocab_size} tokens; set data.tokenizer to the one that "
                "the token files were written with"
            )
        checked.append(ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids)
    return checked


def _open(directory: Path) -> TokenStore | None:
    """Returns the store in the directory, or None if it is absent or damaged."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        splits = {}
        for split, num_tokens in meta["num_tokens"].items():
            tokens = np.memmap(directory / f"{split}.bin", np.dtype(meta["dtype"]), mode="r")
            if len(tokens) != num_tokens:
                logger.warning("%s holds %d of %d tokens", directory, len(tokens), num_tokens)
                return None
            splits[split] = tokens
        return TokenStore(splits=splits, fingerprint=meta["fingerprint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        logger.warning("%s is damaged (%s): tokenising again", directory, error)
        return None
