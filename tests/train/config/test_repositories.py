"""Values of a config that name repositories of the Hugging Face hub, and their commits."""

import json
from typing import Any

import pytest
from ml_collections import ConfigDict

from convert.hub_commits import base_commits
from train.config.repositories import may_name_repositories, pin_repositories, store_pinned


def config(init_from: str = "", **data: Any) -> Any:
    return ConfigDict({"init_from": init_from, "data": data, "train": {"hub_commits": ()}})


def pinned(init_from: str, saved: Any = None, **data: Any) -> Any:
    """Return a config with pinned repositories, like the config of a run that continues."""
    run = config(init_from, **data)
    store_pinned(run, pin_repositories(run, saved or {}))
    return run


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (config("me/gpt"), True),
        (config(tokenizer="me/gpt@v1"), True),
        (config(paths=("a.txt", "hf://datasets/me/texts")), True),
        (config(validation_paths=("a=hf://datasets/me/texts",)), True),
        (config("runs/a/b"), True),  # maybe an adapter whose base is on the hub
        (config(tokenizer="bpe", paths=("me/texts",)), False),
        (config(tokenizer="me/tokenizer.json"), False),
    ],
)
def test_may_name_repositories_reads_the_form_of_values(named, expected):
    assert may_name_repositories(named) is expected


def test_commits_of_a_saved_config_stand_for_names_without_a_revision(hub):
    old = hub.commit("me/gpt", {"config.json": b"{}"})
    new = hub.commit("me/gpt", {"config.json": b"{}"})
    texts = hub.commit("me/texts", {"a.txt": b"a", "b.txt": b"b"}, kind="datasets")
    saved = config(f"me/gpt@{old}", tokenizer="bpe")
    section = {"tokenizer": "me/gpt@main", "validation_paths": ("x=hf://datasets/me/texts/a.txt",)}
    run = config("me/gpt", **section, paths=("local.txt", "hf://datasets/me/texts"))
    store_pinned(run, pin_repositories(run, saved))
    assert run.init_from == f"me/gpt@{old}"
    assert run.data.tokenizer == f"me/gpt@{new}"
    assert run.data.paths == ("local.txt", f"hf://datasets/me/texts@{texts}")
    assert run.data.validation_paths == (f"x=hf://datasets/me/texts@{texts}/a.txt",)
    again = pin_repositories(run, {})
    assert not again["hub_commits"]
    assert all(old == new for texts in again["texts"].values() for old, new in texts.items())


def test_same_command_continues_with_its_commits(hub):
    """A branch has moved since the start; another revision is resolved newly."""
    first = hub.commit("me/gpt", {"config.json": b"{}"})
    command = {"tokenizer": "me/gpt@main", "paths": ("hf://datasets/me/texts@main/a.txt",)}
    texts = hub.commit("me/texts", {"a.txt": b"a"}, kind="datasets")
    run = pinned("me/gpt@main", **command)
    second = hub.commit("me/gpt", {"config.json": b"{}"}, revision="v2")
    hub.repositories["models", "me/gpt"].revisions["main"] = second
    hub.commit("me/texts", {"a.txt": b"b"}, kind="datasets")
    for _ in range(2):
        run = pinned("me/gpt@main", run, **command)
        assert run.init_from == run.data.tokenizer == f"me/gpt@{first}"
        assert run.data.paths == (f"hf://datasets/me/texts@{texts}/a.txt",)
    other = pinned("me/gpt@v2", run, **command)
    assert other.init_from == f"me/gpt@{second}"
    # The other keys keep their commits, and so do commands that were used before.
    assert other.data.tokenizer == f"me/gpt@{first}"
    assert pinned("me/gpt@main", other, **command).init_from == f"me/gpt@{first}"


def test_repository_may_have_different_commits_in_two_keys(hub):
    first = hub.commit("me/gpt", {"config.json": b"{}"})
    second = hub.commit("me/gpt", {"config.json": b"{}"})
    saved = config(f"me/gpt@{first}", tokenizer=f"me/gpt@{second}")
    run = pinned("me/gpt", saved, tokenizer="me/gpt")
    assert (run.init_from, run.data.tokenizer) == (f"me/gpt@{first}", f"me/gpt@{second}")


@pytest.mark.parametrize("is_local", [True, False])
def test_base_of_an_adapter_is_resolved_once(is_local, hub, tmp_path):
    first = hub.commit("me/base", {"config.json": b"{}"})
    description = {"base_model_name_or_path": "me/base", "revision": "main"}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(description))
    hub.commit("me/adapter", tmp_path)
    init_from = str(tmp_path) if is_local else "me/adapter"
    run = pinned(init_from)
    assert base_commits(run) == {"me/base@main": first}
    hub.commit("me/base", {"config.json": b"{}"})
    assert base_commits(pinned(init_from, run)) == {"me/base@main": first}


def test_process_with_another_command_is_refused(hub):
    hub.commit("me/gpt", {"config.json": b"{}"})
    of_first = pin_repositories(config("me/gpt"), {})
    with pytest.raises(ValueError, match="^init_from='me/other' differs from process 0; start all"):
        store_pinned(config("me/other"), of_first)


def test_folder_of_the_first_host_alone_is_refused(hub, tmp_path, monkeypatch):
    hub.commit("me/gpt", {"config.json": b"{}"})
    run = config("me/gpt")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "gpt").mkdir(parents=True)
    of_first = pin_repositories(run, {})
    assert of_first["texts"] == {"init_from": {"me/gpt": "me/gpt"}} and hub.requests == []
    store_pinned(run, of_first)
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match="is a path on the host of process 0, but not on this one"):
        store_pinned(run, of_first)
