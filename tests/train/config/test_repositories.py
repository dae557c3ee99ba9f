"""Values of a config that name repositories of the Hugging Face hub, and their commits."""

from typing import Any

import pytest
from ml_collections import ConfigDict

from train.config.repositories import may_name_repositories, pin_repositories, store_pinned

OLD = "0" * 40


def config(init_from: str = "", **data: Any) -> Any:
    return ConfigDict({"init_from": init_from, "data": data})


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (config("me/gpt"), True),
        (config(tokenizer="me/gpt@v1"), True),
        (config(paths=("a.txt", "hf://datasets/me/texts")), True),
        (config(validation_paths=("a=hf://datasets/me/texts",)), True),
        (config("runs/a/b", tokenizer="bpe", paths=("me/texts",)), False),
        (config(tokenizer="me/tokenizer.json"), False),
    ],
)
def test_may_name_repositories_reads_the_form_of_values(named, expected):
    assert may_name_repositories(named) is expected


def test_commits_of_a_saved_config_stand_for_names_without_a_revision(hub):
    new = hub.commit("me/gpt", {"config.json": b"{}"})
    texts = hub.commit("me/texts", {"a.txt": b"a", "b.txt": b"b"}, kind="datasets")
    saved = config(f"me/gpt@{OLD}", tokenizer="bpe")
    section = {"tokenizer": "me/gpt@main", "validation_paths": ("x=hf://datasets/me/texts/a.txt",)}
    run = config("me/gpt", **section, paths=("local.txt", "hf://datasets/me/texts"))
    store_pinned(run, pin_repositories(run, saved))
    assert run.init_from == f"me/gpt@{OLD}"
    assert run.data.tokenizer == f"me/gpt@{new}"
    assert run.data.paths == ("local.txt", f"hf://datasets/me/texts@{texts}")
    assert run.data.validation_paths == (f"x=hf://datasets/me/texts@{texts}/a.txt",)
    again = pin_repositories(run, {})
    assert all(text == pinned for text, pinned in again.items())


def test_folder_of_the_first_host_alone_is_refused(hub, tmp_path, monkeypatch):
    hub.commit("me/gpt", {"config.json": b"{}"})
    run = config("me/gpt")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "gpt").mkdir(parents=True)
    pinned = pin_repositories(run, {})
    assert pinned == {"me/gpt": "me/gpt"} and hub.requests == []
    store_pinned(run, pinned)
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match="is a path on the host of process 0, but not on this one"):
        store_pinned(run, pinned)
