"""Every kind of corpus behind one door: documents by split, and a key that tells corpora apart."""

import difflib
import hashlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data import text_files, tfds_text, token_files
from data.chained import Chained
from data.config import DataConfig

SPLITS = ("train", "validation")
# A TFDS version after a colon begins with a digit, so it is not taken for an attribute.
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that has been found, but not yet read.

    Attributes:
        key: Changes when a document, or the split of the documents, does.
        open: Returns the documents of each split; may read the whole corpus once.
        is_encoded: Documents are arrays of token ids, not str.
    """

    key: str
    open: Callable[[], dict[str, Sequence[Any]]]
    is_encoded: bool = False


def open_documents(config: DataConfig) -> dict[str, Sequence[Any]]:
    """Returns the corpus's documents as {'train': ..., 'validation': ...}, read on access.

    Raises:
        ValueError: The corpus is unknown, unreadable or empty.
        FileNotFoundError: A glob of `data.paths` matches nothing.
    """
    return find_corpus(config).open()


def find_corpus(config: DataConfig) -> Corpus:
    """Returns the corpus that `data.name` names, prepared but not read.

    Raises:
        ValueError: The name is unknown, or the corpus could not be prepared.
        FileNotFoundError: A glob of `data.paths` matches nothing.
    """
    if config.name == "text":
        found = _find_text_files(config)
    elif config.name == "megatron":
        found = _find_token_files(config)
    elif _IMPORT_PATH.fullmatch(config.name):
        found = _find_user_corpus(config.name)
    else:
        found = _find_tfds(config)

    def open_checked() -> dict[str, Sequence[Any]]:
        documents = found.open()
        if len(documents["train"]) == 0:
            raise ValueError(
                f"data.name={config.name!r} has no documents in its train split, and needs at "
                "least one; choose another corpus or add text"
            )
        return documents

    return replace(found, open=open_checked)


def _find_text_files(config: DataConfig) -> Corpus:
    files = text_files.find_files(config.paths)
    key = (
        f"text {text_files.TEXT_PART_BYTES} {config.text_field} {config.validation_fraction} "
        f"{text_files.files_key(files)}"
    )
    return Corpus(
        key=key,
        open=lambda: text_files.open_text_files(
            files, config.text_field, config.validation_fraction
        ),
    )


def _find_token_files(config: DataConfig) -> Corpus:
    files = [path for prefix in config.paths for path in token_files.token_file_paths(prefix)]

    def open_files() -> dict[str, Sequence[Any]]:
        parts = [token_files.open_token_file(prefix) for prefix in config.paths]
        positions = range(sum(map(len, parts)))
        # The last ones, as Megatron does; at least one where any is asked for.
        num_held = max(round(len(positions) * config.validation_fraction), 1)
        num_train = len(positions) - (num_held if config.validation_fraction else 0)
        return {
            "train": Chained(parts, positions[: max(num_train, 0)]),
            "validation": Chained(parts, positions[max(num_train, 0) :]),
        }

    key = f"megatron {config.validation_fraction} {text_files.files_key(files)}"
    return Corpus(key=key, open=open_files, is_encoded=True)


def _find_tfds(config: DataConfig) -> Corpus:
    builder = tfds_text.open_builder(config.name, config.text_field, config.cache_path)
    fraction = "" if "validation" in builder.info.splits else config.validation_fraction
    return Corpus(
        key=f"tfds {config.text_field} {fraction} {tfds_text.builder_key(builder)}",
        open=lambda: tfds_text.open_builder_documents(
            builder, config.text_field, config.validation_fraction
        ),
    )


def _find_user_corpus(name: str) -> Corpus:
    function = _import_callable(name)
    try:
        returned = function()
    except Exception as error:
        raise ValueError(
            f"data.name={name!r} failed: {type(error).__name__}: {error}; mend the function"
        ) from error
    if not isinstance(returned, Mapping) or not set(SPLITS) <= set(returned):
        what = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned)
        raise ValueError(
            f"data.name={name!r} returned {what}, but must return a dict with the keys "
            "'train' and 'validation', each a sequence of str"
        )
    documents = {}
    for split in SPLITS:
        values = returned[split]
        if not (hasattr(values, "__len__") and hasattr(values, "__getitem__")) or isinstance(
            values, str
        ):
            raise ValueError(
                f"data.name={name!r} returned a {type(values).__name__} for {split!r}, but must "
                "return a sequence of str; return a list, or a class with __len__ and __getitem__"
            )
        documents[split] = _UserDocuments(values, f"data.name={name!r}: document {{}} of {split!r}")
    # A corpus may name its own state, to spare a reading of all of it at every start.
    fingerprint = returned.get("fingerprint") or _hash_documents(documents)
    return Corpus(key=f"user {name} {fingerprint}", open=lambda: documents)


def _import_callable(name: str) -> Callable[[], object]:
    module_name, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"data.name={name!r}: there is no module {error.name!r}; correct the name, or "
                "start Python where the module lies or set PYTHONPATH to that directory"
            ) from error
        raise ValueError(f"data.name={name!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ValueError(
            f"data.name={name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            raise ValueError(
                f"data.name={name!r}: {found.__name__} has no {part!r}; "
                + (f"the nearest names are {near}" if near else "correct the name")
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"data.name={name!r} is of type {type(found).__name__}, but must be a function without "
            "arguments that returns {'train': documents, 'validation': documents}"
        )
    return found


def _hash_documents(documents: Mapping[str, Sequence[str]]) -> str:
    digest = hashlib.sha256()
    for split, values in documents.items():
        digest.update(f"{split} {len(values)}\0".encode())
        for document in values:
            digest.update(f"{len(document)}\0{document}".encode())
    return digest.hexdigest()


class _UserDocuments(Sequence[str]):
    """A user's documents, each checked when read.

    Args:
        values: What the user's function returned for a split.
        description: Names a document in messages, with {} for its index.
    """

    def __init__(self, values: Sequence[object], description: str):
        self._values, self._description = values, description

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        document = self._values[index]
        if not isinstance(document, str):
            raise ValueError(
                f"{self._description.format(index)} is a {type(document).__name__}, but must be "
                "a str; return decoded text"
            )
        # Half a surrogate pair is a legal str, but no tokenizer takes it.
        return document.encode("utf-8", "replace").decode("utf-8")
