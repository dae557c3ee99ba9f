"""Pins the repositories of the Hugging Face hub that a config names to commits.

    init_from=org/name                    ->  init_from=org/name@8e1f…
    data.paths=hf://datasets/org/texts    ->  data.paths=hf://datasets/org/texts@02bc…

The commit is a part of the value, so the config of a run says which files it used, and starting the
run again with this config reads the same files. A run that continues takes the commits from its
saved config, unless its command line names a revision.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from data.hub_files import files_of_entry
from data.named_paths import split_name
from untrusted.hub import (
    DATASETS,
    Repository,
    check_access,
    dataset_of,
    has_form_of_model,
    model_of,
    pin,
)

#: Keys that may name a model, and keys that may name files of datasets.
_MODELS = ("init_from", "data.tokenizer")
_DATASETS = ("data.paths", "data.validation_paths")

_log = logging.getLogger(__name__)


def may_name_repositories(config: Mapping[str, Any]) -> bool:
    """Return whether a value of a config has the form of the name of a repository.

    It does not depend on which paths exist on this machine, so it is the same on all hosts.
    """
    return any(
        has_form_of_model(text) if key in _MODELS else DATASETS in text
        for key, text in _texts(config)
    )


def pin_repositories(config: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a config that name repositories, each with its value with a commit.

    Args:
        saved: config of the run that continues; empty for a new run.

    Raises:
        ValueError: the hub has no such repository, revision or file, or does not let this user
            read it.
        ConnectionError: the hub cannot be reached, and the cache does not have the revision.
    """
    commits = _commits(saved)
    return {text: _pinned(key, text, commits) for key, text in _texts(config)}


def store_pinned(config: Any, pinned: Mapping[str, str]) -> None:
    """Store the values that `pin_repositories` has returned on the first process in a ConfigDict.

    Raises:
        ValueError: a value is a path on the host of the first process, but not on this one.
    """
    for key, text in _texts(config):
        repository = model_of(text) if key in _MODELS else None
        if repository is not None and not repository.is_pinned and pinned[text] == text:
            raise ValueError(
                f"{key}={text!r} is a path on the host of process 0, but not on this one; put it "
                "in a directory that all hosts share, or remove it to use the model of the hub"
            )
    with config.unlocked(), config.ignore_type():
        for key in (*_MODELS, *_DATASETS):
            section, name = _place(config, key)
            value = section.get(name)
            if isinstance(value, list | tuple):
                section[name] = tuple(pinned.get(part, part) for part in value)
            elif isinstance(value, str):
                section[name] = pinned.get(value, value)


def _place(config: Any, key: str) -> tuple[Any, str]:
    """Return the section of a key, and the key's name in it."""
    section, _, name = key.rpartition(".")
    return (config.get(section) or {}) if section else config, name


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of all values that may name a repository; other values have wrong types."""
    for key in (*_MODELS, *_DATASETS):
        section, name = _place(config, key)
        value = section.get(name)
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str):
                yield key, text


def _repository_of(key: str, text: str) -> tuple[str, Repository, str] | None:
    """Return the name of a validation set, the repository and the path in it that a text names."""
    if key in _MODELS:
        repository = model_of(text)
        return None if repository is None else ("", repository, "")
    set_name, path = split_name(text) if key == "data.validation_paths" else ("", text)
    reference = dataset_of(path)
    return None if reference is None else (set_name, *reference)


def _commits(saved: Mapping[str, Any]) -> dict[Repository, str]:
    """Return repository without a revision -> the commit in a saved config."""
    commits = {}
    for key, text in _texts(saved):
        reference = _repository_of(key, text)
        if reference is not None and reference[1].is_pinned:
            commits[replace(reference[1], revision=None)] = str(reference[1].revision)
    return commits


def _pinned(key: str, text: str, commits: Mapping[Repository, str]) -> str:
    reference = _repository_of(key, text)
    if reference is None:
        return text
    set_name, repository, path = reference
    pinned = pin(replace(repository, revision=commits.get(repository, repository.revision)))
    if pinned != repository:
        _log.info("%s: %s is at the commit %s", key, repository, pinned.revision)
    if key in _MODELS:
        return str(pinned)
    # Its files are downloaded much later, but an error should appear now.
    check_access(pinned, files_of_entry(key, text, pinned, path))
    return (f"{set_name}=" if set_name else "") + str(pinned) + (f"/{path}" if path else "")
