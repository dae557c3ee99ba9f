"""The cache of tokenized corpora: one memory-mapped array of token ids per split.

With E for the end-of-document token, a split with the documents "ab" and "cde" is stored as

    E a b E c d e E
"""

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

# Increase this when the format of the files changes: every corpus is then tokenized again.
_REVISION = 1
# Maximum number of characters and of documents that are tokenized at once: enough to keep the
# threads of the tokenizer busy, and few enough to keep memory small.
_BATCH_CHARACTERS = 2**22
_BATCH_DOCUMENTS = 4096
# Number of tokens that `document_ends` searches at once.
_SEARCHED_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The token ids of each split.

    Attributes:
        splits: Split -> uint16 or uint32 [number of tokens]: an end-of-document token, then every
            document followed by another one.
        fingerprint: A hash of all tokens; the same on every machine that tokenized this corpus.
    """

    splits: dict[str, np.ndarray]
    fingerprint: str


def load_tokens(corpus: Documents, tokenizer: Tokenizer, *, directory: Path) -> TokenStore:
    """Load the tokens of a corpus from the cache, or tokenize it if they are not there.

    If several processes start together, one of them tokenizes the corpus. No process reads
    half-written files, because they are written to a temporary directory, which is renamed when it
    is complete.

    Args:
        corpus: The corpus; its documents are opened only if the tokens are not cached.
        tokenizer: Encodes the documents, unless they are token ids already.
        directory: The cache directory.

    Returns:
        The tokens, memory-mapped.

    Raises:
        ValueError: A document cannot be read, or has a token id that the tokenizer does not have.
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
            # If these directories exist, a build was killed or the files are damaged.
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
    """Find the end-of-document tokens of a split.

    Args:
        tokens: uint16 or uint32 [number of tokens].
        eos_id: The id of the end-of-document token.

    Returns:
        int64[number of ends], the positions of these tokens in ascending order.
    """
    # In chunks, so that the comparison needs no array of the size of the whole split.
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
        logger.info("Tokenizing %d documents of the %s split", len(documents), split)
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
    """Yield the tokens of a split in order, one batch of documents at a time."""
    end = np.array([eos_id], np.int32)
    # The split begins with an end of document, from which the first token of the text is predicted.
    yield end
    batch = []
    num_characters = 0
    for index in range(len(documents)):
        batch.append(documents[index])
        num_characters += len(batch[-1])
        full = num_characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS
        if full or index == len(documents) - 1:
            yield np.concatenate([p for ids in encode(batch) for p in (ids, end)])
            batch = []
            num_characters = 0


def _checked_ids(tokenizer: Tokenizer, documents: list[np.ndarray]) -> list[np.ndarray]:
    """Check documents of token ids, and remove their end, which the store adds to every document.

    Raises:
        ValueError: A document has an id that the tokenizer does not have.
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
    """Open the store in a directory; return None if it is absent or damaged."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        splits = {}
        for split, num_tokens in meta["num_tokens"].items():
            tokens = np.memmap(directory / f"{split}.bin", np.dtype(meta["dtype"]), mode="r")
            if len(tokens) != num_tokens:
                logger.warning(
                    "%s has %d of %d tokens: tokenizing again", directory, len(tokens), num_tokens
                )
                return None
            splits[split] = tokens
        return TokenStore(splits=splits, fingerprint=meta["fingerprint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        logger.warning("%s is damaged (%s): tokenizing again", directory, error)
        return None
