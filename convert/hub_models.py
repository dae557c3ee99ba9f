"""Downloads the files that a model on the Hugging Face hub needs.

The files that describe a model are downloaded first, and a model that is not supported is refused
before its weights are downloaded.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from convert.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from convert.adapters.peft_format import TENSORS_FILE as ADAPTER_FILE
from convert.adapters.peft_format import name_of_base
from convert.keys import read
from convert.model_on_disk import read_config
from convert.options import DEFAULTS, ReadOptions
from convert.registry import find
from convert.tensor_files import INDEX_FILE, SINGLE_FILE, files_in_index
from data.text.hub_tokenizer import description_files
from untrusted.documents import read_json
from untrusted.hub import Repository, cached_files, fetch, list_files, model_of, pin


class _MissingFile(ValueError):
    """A repository has no file that a model needs."""


def pinned_model(path: str) -> str:
    """Return `org/name@commit` for a model of the hub; any other path is returned as it is.

    Raises:
        ValueError: The hub has no such model or revision, or does not let this user read it.
        ConnectionError: The hub cannot be reached, and the cache does not have the revision.
    """
    repository = model_of(path)
    return path if repository is None else str(pin(repository))


def _known_files(repository: Repository) -> list[str]:
    """Return the files of a pinned repository, or those in the cache if it cannot be asked."""
    try:
        return list_files(repository)
    except ConnectionError:
        files = cached_files(repository)
        if not files:
            raise
        return files


def base_on_hub(path: str) -> Repository | None:
    """Return the base of an adapter as adapter_config.json names it, if it is on the hub.

    Args:
        path: directory, or `org/name@revision`; it may be something else than an adapter.

    Raises:
        ValueError: adapter_config.json is broken, or the hub has no such model or revision.
        ConnectionError: The hub cannot be reached, and the cache lacks a file.
    """
    repository = model_of(path)
    directory = Path(path)
    if repository is not None:
        repository = pin(repository)
        files = _known_files(repository)
        if "config.json" in files or ADAPTER_CONFIG_FILE not in files:
            return None
        directory = fetch(repository, [ADAPTER_CONFIG_FILE])
    file = directory / ADAPTER_CONFIG_FILE
    if (directory / "config.json").is_file() or not file.is_file():
        return None
    name = name_of_base(read_json(file, within=directory))
    return model_of(name) if name else None


def download_model(repository: Repository, options: ReadOptions = DEFAULTS) -> Path:
    """Download the files of a model that the cache lacks, and return their directory.

    Args:
        repository: pinned repository of a model, or of an adapter of PEFT.

    Raises:
        ValueError: The model is not supported, or has no weights as safetensors; or see
            `pinned_model`.
        ConnectionError: The hub cannot be reached, and the cache lacks a file.
    """
    try:
        files = list_files(repository)
    except ConnectionError:
        with contextlib.suppress(_MissingFile):  # it may only be missing in the cache
            return _download(repository, cached_files(repository), options)
        raise
    return _download(repository, files, options)


def _download(repository: Repository, files: Sequence[str], options: ReadOptions) -> Path:
    """Download a model from a repository, of which some files are known."""
    is_adapter = "config.json" not in files and ADAPTER_CONFIG_FILE in files
    weights = [name for name in (ADAPTER_FILE if is_adapter else SINGLE_FILE,) if name in files]
    if not ("config.json" in files or is_adapter):
        raise _MissingFile(
            f"{repository} has no config.json, so it is not a model of transformers; name another "
            "model"
        )
    if not (weights or INDEX_FILE in files):
        raise _MissingFile(
            f"{repository} has neither {SINGLE_FILE} nor {INDEX_FILE}, and other weights are not "
            "downloaded, because pickles can run code; save the model as safetensors"
        )
    directory = fetch(repository, description_files(files))
    if not is_adapter:
        hf = read_config(directory / "config.json", within=directory)
        architecture = find(hf)
        read(hf, architecture.keys, harmless=architecture.harmless, options=options)
    if not weights:
        weights = [file.name for file in files_in_index(directory / INDEX_FILE)]
        missing = sorted({*weights} - {*files})
        if missing:
            raise _MissingFile(
                f"{repository} lacks {missing[0]}, which {INDEX_FILE} lists; name another model"
            )
    return fetch(repository, weights)
