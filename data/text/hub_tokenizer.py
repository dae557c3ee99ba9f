"""Tokenizers of models on the Hugging Face hub."""

from collections.abc import Iterable

from data.text.chat.template import TEMPLATES
from untrusted.hub import cached_files, fetch, list_files, model_of, pin

#: Ends of the names of files that describe a model or its tokenizer.
_DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")

#: Files of which a tokenizer has one.
_TOKENIZERS = {"tokenizer.json", "vocab.json", "vocab.txt"}


def description_files(files: Iterable[str]) -> list[str]:
    """Return the files of a model's repository that describe it or its tokenizer.

    Args:
        files: all files of the repository.
    """
    return [
        file
        for file in files
        if file.endswith(_DESCRIPTIONS) and file.rpartition("/")[0] in ("", TEMPLATES)
    ]


def local_tokenizer(tokenizer: str) -> str:
    """Return the path of a tokenizer, whose files are downloaded if a model of the hub is named.

    Args:
        tokenizer: path of a file or a directory, or `org/name@revision`.

    Raises:
        ValueError: The hub has no such model, or the model has no tokenizer.
        ConnectionError: The hub cannot be reached, and the cache does not have the tokenizer.
    """
    repository = model_of(tokenizer)
    if repository is None:
        return tokenizer
    repository = pin(repository)
    try:
        files = description_files(list_files(repository))
    except ConnectionError:
        files = description_files(cached_files(repository))
        if not _TOKENIZERS.intersection(files):
            raise
    if not _TOKENIZERS.intersection(files):
        raise ValueError(
            f"data.tokenizer={tokenizer!r} has neither a tokenizer.json nor a vocab.json with "
            "merges.txt; name a model that has one, or set data.tokenizer to 'bpe' or 'bytes'"
        )
    return str(fetch(repository, files))
