"""Pins the repositories of the Hugging Face hub that a config names to commits.

    init_from=org/name                    ->  init_from=org/name@8e1f…
    data.paths=hf://datasets/org/texts    ->  data.paths=hf://datasets/org/texts@02bc…

The commit is a part of the value, so the config of a run says which files it used, and starting the
run again with this config reads the same files. `train.hub_commits` says which name and revision it
was resolved from, such as `init_from org/name@main 8e1f…`: a run that continues with the same
command uses the same commits, even if a branch has moved, and another revision is resolved newly.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from convert.hub_commits import ADAPTER_BASE, recorded_commits
from convert.hub_models import base_on_hub
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
    """Return whether a config may name repositories, or an adapter whose base is on the hub.

    It does not depend on which paths exist on this machine, so it is the same on all hosts.
    """
    return bool(config.get("init_from")) or any(
        has_form_of_model(text) if key in _MODELS else DATASETS in text
        for key, text in _texts(config)
    )


class PinnedValues(TypedDict):
    """The values of a config that may name repositories, with commits; it can be sent as JSON.

    Attributes:
        texts: key -> text in the config -> text with a commit, or the same text.
        hub_commits: value of `train.hub_commits`.
    """

    texts: dict[str, dict[str, str]]
    hub_commits: list[str]


def pin_repositories(config: Mapping[str, Any], saved: Mapping[str, Any]) -> PinnedValues:
    """Resolve the repositories that a config names to commits.

    Args:
        saved: config of the run that continues; empty for a new run.

    Raises:
        ValueError: the hub has no such repository, revision or file, or does not let this user
            read it.
        ConnectionError: the hub cannot be reached, and the cache does not have the revision.
    """
    recorded = recorded_commits(saved)
    commits = _commits_in_values(saved) | recorded
    texts: dict[str, dict[str, str]] = {}
    for key, text in _texts(config):
        reference = _repository_of(key, text)
        if reference is None:
            texts.setdefault(key, {})[text] = text
            continue
        name, repository, path = reference
        commit = commits.get((key, str(repository)))
        pinned = pin(replace(repository, revision=commit or repository.revision))
        if pinned != repository:
            _log.info("%s: %s is at the commit %s", key, repository, pinned.revision)
            recorded[key, str(repository)] = str(pinned.revision)
        if key in _DATASETS:
            # Its files are downloaded much later, but an error should appear now.
            check_access(pinned, files_of_entry(key, text, pinned, path))
        texts.setdefault(key, {})[text] = (
            (f"{name}=" if name else "") + str(pinned) + (f"/{path}" if path else "")
        )
    base = base_on_hub(next(iter(texts.get("init_from", {}).values()), ""))
    if base is not None and not base.is_pinned:
        place = (ADAPTER_BASE, str(base))
        recorded[place] = recorded.get(place) or str(pin(base).revision)
    entries = [f"{key} {repository} {commit}" for (key, repository), commit in recorded.items()]
    return {"texts": texts, "hub_commits": entries}


def store_pinned(config: Any, pinned: PinnedValues) -> None:
    """Store the values that `pin_repositories` has returned on the first process in a ConfigDict.

    Raises:
        ValueError: a value is a path on the host of the first process, but not on this one; or this
            process has other values than the first.
    """
    texts = pinned["texts"]
    for key, text in _texts(config):
        if text not in texts.get(key, {}):
            raise ValueError(
                f"{key}={text!r} differs from process 0; start all processes with the same "
                "command, software and files"
            )
        repository = model_of(text) if key in _MODELS else None
        if repository is not None and not repository.is_pinned and texts[key][text] == text:
            raise ValueError(
                f"{key}={text!r} is a path on the host of process 0, but not on this one; put it "
                "in a directory that all hosts share, or remove it to use the model of the hub"
            )
    with config.unlocked(), config.ignore_type():
        for key, pinned_texts in texts.items():
            section, name = _place(config, key)
            value = section.get(name)
            if isinstance(value, list | tuple):
                section[name] = tuple(pinned_texts.get(part, part) for part in value)
            elif isinstance(value, str):
                section[name] = pinned_texts[value]
        config.train.hub_commits = tuple(pinned["hub_commits"])


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


def _commits_in_values(saved: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return (key, repository without a revision) -> the commit in a value of a saved config."""
    commits = {}
    for key, text in _texts(saved):
        reference = _repository_of(key, text)
        if reference is not None and reference[1].is_pinned:
            commits[key, str(replace(reference[1], revision=None))] = str(reference[1].revision)
    return commits
