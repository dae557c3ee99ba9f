"""Find the documents of any text corpus, by split, and a key that identifies the corpus.

Finding a corpus is cheap and reads no text. The key decides whether its tokens are already cached.
Documents are opened only if their tokens are not cached.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data import tfds_sets
from data.checks import files_key
from data.config import DataConfig
from data.own import SPLITS, call_own
from data.sequences import LazySequence, hold_out_last
from data.text import text_files, tfds_text, token_files
from data.text.tables import as_lines
from untrusted.imports import is_import_path
from untrusted.messages import without_surrogates


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a corpus that has been found, but not yet read.

    Attributes:
        key: string that changes whenever a document, or its split, changes.
        open: returns the documents of each split; may read the whole corpus once.
        is_encoded: whether documents are arrays of token ids rather than str.
    """

    key: str
    open: Callable[[], dict[str, Sequence[Any]]]
    is_encoded: bool = False


def open_documents(config: DataConfig) -> dict[str, Sequence[Any]]:
    """Return the train and validation documents of a corpus, read on access.

    Raises:
        ValueError: The corpus is unknown, unreadable or empty.
        FileNotFoundError: A glob of `data.paths` matches nothing.
    """
    return find_corpus(config).open()


def find_corpus(config: DataConfig) -> Documents:
    """Find the corpus `data.name`, and prepare it without reading it.

    Returns:
        The corpus; its `open` raises a ValueError if the train split is empty.

    Raises:
        ValueError: The name is unknown, or the corpus could not be prepared.
        FileNotFoundError: A glob of `data.paths` matches nothing.
    """
    if config.name == "text":
        corpus = _find_text_files(config)
    elif config.name == "megatron":
        corpus = _find_token_files(config)
    elif is_import_path(config.name):
        corpus = _find_user_corpus(config)
    else:
        corpus = _find_tfds(config)

    def open_checked() -> dict[str, Sequence[Any]]:
        documents = corpus.open()
        if len(documents["train"]) == 0:
            raise ValueError(
                f"data.name={config.name!r} must have at least one document in its train split, "
                "but has none; choose another corpus or add text"
            )
        return documents

    return replace(corpus, open=open_checked)


def _find_text_files(config: DataConfig) -> Documents:
    files = text_files.find_files(config.paths)
    key = (
        f"text {text_files.REVISION} {text_files.TEXT_PART_BYTES} {config.text_field} "
        f"{config.held_out_fraction} {files_key(files, config.verify)}"
    )

    def open_files() -> dict[str, Sequence[Any]]:
        lines = as_lines(files, config.cache_path, config.verify)
        splits = text_files.split_files(
            lines, config.held_out_fraction, config.sequence_length, files
        )
        return {
            split: text_files.lazy_documents(spans, config.text_field)
            for split, spans in splits.items()
        }

    return Documents(key=key, open=open_files)


def _find_token_files(config: DataConfig) -> Documents:
    prefixes = token_files.find_token_files(config.paths)
    files = [path for prefix in prefixes for path in token_files.token_file_paths(prefix)]

    def open_files() -> dict[str, Sequence[Any]]:
        parts = [token_files.open_token_file(prefix) for prefix in prefixes]
        return hold_out_last(parts, config.held_out_fraction)  # as in Megatron

    key = f"megatron {config.held_out_fraction} {files_key(files, config.verify)}"
    return Documents(key=key, open=open_files, is_encoded=True)


def _find_tfds(config: DataConfig) -> Documents:
    def feature_of(builder: Any) -> str:
        return tfds_text.find_text_feature(builder, config.text_field)

    builder = tfds_sets.open_builder(config.name, config.cache_path, feature_of)
    splits = tfds_sets.splits_of(builder, config)
    split = config.split
    # None: all of the split, and nothing else.
    fraction = None if config.names_validation else config.validation_fraction
    keyed = "" if fraction is not None and "validation" in splits else fraction
    of_split = "" if split == "train" else f"{split} "
    return Documents(
        key=f"tfds {config.text_field} {keyed} {of_split}{tfds_sets.builder_key(builder)}",
        open=lambda: tfds_text.open_tfds_documents(builder, feature_of(builder), split, fraction),
    )


def _find_user_corpus(config: DataConfig) -> Documents:
    name = config.name
    returned = call_own(name, "str")
    documents = {split: _checked_documents(returned[split], name, split) for split in SPLITS}
    kind = "user"
    if config.validation_paths:
        kind = "user's train split"
        documents["validation"] = ()
    # The function may return a fingerprint of its own, so that not all documents are read here.
    fingerprint = returned.get("fingerprint") or _hash_documents(documents)
    return Documents(key=f"{kind} {name} {fingerprint}", open=lambda: documents)


def _checked_documents(values: Sequence[object], name: str, split: str) -> Sequence[str]:
    """Return the documents returned by a user's function, each checked when it is read."""

    def read(index: int) -> str:
        document = values[index]
        if not isinstance(document, str):
            raise ValueError(
                f"data.name={name!r}: document {index} of {split!r} is a "
                f"{type(document).__name__}, but must be a str; return decoded text"
            )
        # A lone surrogate is legal in a str, but no tokenizer accepts it.
        return without_surrogates(document)

    return LazySequence(len(values), read)


def _hash_documents(documents: Mapping[str, Sequence[str]]) -> str:
    digest = hashlib.sha256()
    for split, values in documents.items():
        digest.update(f"{split} {len(values)}\0".encode())
        for document in values:
            digest.update(f"{len(document)}\0{document}".encode())
    return digest.hexdigest()
