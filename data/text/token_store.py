"""The cache of tokenized corpora: one memory-mapped array of token ids per split.

With E for the end-of-document token, a split with the documents "ab" and "cde" is stored as

    E a b E c d e E

The directory also contains a digest of all tokens, which is compared when the store is opened. If
the store is large, a thread does so while the run starts to train; if it finds damage, the run ends
and the next one tokenizes again.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.examples import BrokenExample
from data.text.documents import Documents
from data.text.tokenization.tokenizer import Tokenizer
from untrusted.cached import locked
from untrusted.documents import read_json
from untrusted.files import check_link, open_regular, remove, write_text
from untrusted.messages import shortened
from untrusted.schema import check_fields

logger = logging.getLogger(__name__)

# Increase this when the format of the files changes: every corpus is then tokenized again.
_REVISION = 1
# Maximum number of characters and of documents that are tokenized at once: enough to keep the
# threads of the tokenizer busy, and few enough to keep memory small.
_BATCH_CHARACTERS = 2**22
_BATCH_DOCUMENTS = 4096
# Larger stores are verified by a thread. About a second's work.
_VERIFIED_AT_ONCE = 2**30
_META_TYPES = {"dtype": str, "num_tokens": dict[str, int], "fingerprint": str}
_SPLITS = ("train", "validation")
# Number of tokens that `document_ends` searches at once.
_SEARCHED_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The token ids of each split.

    Attributes:
        splits: split -> uint16 or uint32 [number of tokens]: an end-of-document token, then every
            document followed by another one.
        fingerprint: hash of all tokens; the same on every machine that tokenized this corpus.
        damage: result of the thread that verifies the tokens; None once they are verified.
    """

    splits: dict[str, np.ndarray]
    fingerprint: str
    damage: "Damage | None" = None


class Damage:
    """The result so far of the verification of a store.

    Attributes:
        message: damage in one sentence; None if there is none so far.
    """

    def __init__(self):
        self.message: str | None = None

    def check(self) -> None:
        """Raise an error if damage was found.

        Raises:
            BrokenExample: The tokens differ from those that were written.
        """
        if self.message is not None:
            raise BrokenExample(self.message)


def load_tokens(corpus: Documents, tokenizer: Tokenizer, *, directory: Path) -> TokenStore:
    """Load the memory-mapped tokens of a corpus from the cache, or tokenize it first.

    If several processes start together, one of them tokenizes the corpus. No process reads
    half-written files, because they are written to a temporary directory, which is renamed when it
    is complete.

    Args:
        corpus: corpus; its documents are opened only if the tokens are not cached.
        tokenizer: encodes the documents, unless they are token ids already.

    Raises:
        ValueError: A document cannot be read, or has a token id that the tokenizer does not have.
    """
    keyed = f"{_REVISION}\0{corpus.key}\0{tokenizer.fingerprint}"
    final = directory / f"tokens-{hashlib.sha256(keyed.encode()).hexdigest()[:16]}"
    store = _open(final)
    if store is not None:
        return store
    directory.mkdir(parents=True, exist_ok=True)
    with locked(final):
        store = _open(final)
        if store is None:
            # If anything is there, a build was killed or the files are damaged.
            temporary = final.with_suffix(".tmp")
            remove(temporary)
            remove(final)
            temporary.mkdir()
            _build(corpus, tokenizer, temporary)
            os.rename(temporary, final)
            store = _open(final)
            assert store is not None, final
    return store


def document_ends(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Return int64[number of ends], the positions of the end-of-document tokens of a split.

    Args:
        tokens: uint16 or uint32 [number of tokens].
    """
    # In chunks, so that the comparison needs no array of the size of the whole split.
    chunk_ends = [
        np.flatnonzero(tokens[first : first + _SEARCHED_TOKENS] == eos_id) + first
        for first in range(0, len(tokens), _SEARCHED_TOKENS)
    ]
    return np.concatenate([np.zeros(0, np.int64), *chunk_ends])


def _build(corpus: Documents, tokenizer: Tokenizer, directory: Path) -> None:
    encode = tokenizer.encode_batch
    if corpus.is_encoded:
        encode = functools.partial(_checked_ids, tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    digest = hashlib.sha256(str(dtype).encode())
    num_tokens = {}
    for split, documents in corpus.open().items():
        logger.info("Tokenizing %d documents", len(documents))
        with open(directory / f"{split}.bin", "wb") as stream:
            # From the first end of document, the first token of the text is predicted.
            texts = (documents[index] for index in range(len(documents)))
            chunks = token_chunks(texts, encode, tokenizer.eos_id)
            for tokens in itertools.chain([np.array([tokenizer.eos_id])], chunks):
                content = tokens.astype(dtype).tobytes()
                stream.write(content)
                digest.update(content)
            num_tokens[split] = stream.tell() // dtype.itemsize
        digest.update(split.encode())
    meta = {"dtype": str(dtype), "num_tokens": num_tokens, "fingerprint": digest.hexdigest()}
    write_text(directory / "meta.json", json.dumps(meta))


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of stored token ids."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def token_chunks(
    documents: Iterable[Any], encode: Callable[[list], list[np.ndarray]], eos_id: int
) -> Iterator[np.ndarray]:
    """Yield the tokens of documents, each followed by an end of document, in several chunks."""
    end = np.array([eos_id], np.int32)
    batch = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document)
        if num_characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield np.concatenate([p for ids in encode(batch) for p in (ids, end)])
            batch = []
            num_characters = 0
    if batch:
        yield np.concatenate([p for ids in encode(batch) for p in (ids, end)])


def _checked_ids(tokenizer: Tokenizer, documents: list[np.ndarray]) -> list[np.ndarray]:
    """Check documents of token ids, and remove their end, which the store adds to every document.

    Raises:
        ValueError: A document has an id that the tokenizer does not have.
    """
    checked = []
    for ids in documents:
        ids = ids.astype(np.int64)
        unknown = unknown_ids(ids, tokenizer)
        if len(unknown):
            raise ValueError(
                f"data.name='megatron': the token id {unknown[0]} must be at least 0 and less "
                f"than the tokenizer's {tokenizer.vocab_size} tokens; set data.tokenizer to the "
                "one that the token files were written with"
            )
        checked.append(ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids)
    return checked


def unknown_ids(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token ids that a tokenizer does not have, in order; both are int[any number]."""
    return ids[(ids < 0) | (ids >= tokenizer.vocab_size)]


def _open(directory: Path) -> TokenStore | None:
    """Open the store in a directory; return None if it is absent or damaged."""
    try:
        check_link(directory, directory.parent)
        meta = read_json(directory / "meta.json")
        check_fields(meta, _META_TYPES, directory / "meta.json")
        if set(meta["num_tokens"]) != set(_SPLITS):
            raise ValueError(f"its splits are {shortened(sorted(meta['num_tokens']))}")
        splits = {}
        for split, num_tokens in meta["num_tokens"].items():
            path = directory / f"{split}.bin"
            open_regular(path, within=directory).close()
            tokens = np.memmap(path, np.dtype(meta["dtype"]), mode="r")
            if len(tokens) != num_tokens:
                logger.warning(
                    "%s has %d of %d tokens: tokenizing again", directory, len(tokens), num_tokens
                )
                return None
            splits[split] = tokens
        fingerprint = meta["fingerprint"]
        if sum(tokens.nbytes for tokens in splits.values()) > _VERIFIED_AT_ONCE:
            damage = Damage()
            arguments = (splits, meta["dtype"], fingerprint, directory, damage)
            threading.Thread(target=_verify_later, args=arguments, daemon=True).start()
            return TokenStore(splits=splits, fingerprint=fingerprint, damage=damage)
        if _fingerprint(splits, meta["dtype"]) != fingerprint:
            logger.warning("%s is damaged (its SHA-256 differs): tokenizing again", directory)
            return None
        return TokenStore(splits=splits, fingerprint=fingerprint)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as error:
        logger.warning("%s is damaged (%s): tokenizing again", directory, error)
        return None


def _fingerprint(splits: Mapping[str, np.ndarray], dtype: str) -> str:
    """Return the hash that `_build` computed for these tokens."""
    digest = hashlib.sha256(dtype.encode())
    for split, tokens in splits.items():
        # In chunks, so that other threads run in between.
        for first in range(0, len(tokens), _SEARCHED_TOKENS):
            digest.update(tokens[first : first + _SEARCHED_TOKENS].data)
        digest.update(split.encode())
    return digest.hexdigest()


def _verify_later(
    splits: Mapping[str, np.ndarray], dtype: str, fingerprint: str, directory: Path, damage: Damage
) -> None:
    """Compare the tokens with their digest; if they differ, let the next run tokenize again."""
    if _fingerprint(splits, dtype) == fingerprint:
        return
    (directory / "meta.json").unlink(missing_ok=True)
    damage.message = (
        f"the cached tokens in {directory} are damaged (their SHA-256 differs); start again to "
        "tokenize the corpus again"
    )
