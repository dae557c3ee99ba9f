"""Copies of the files of a store, on fsspec's file system in memory."""

import contextlib

import pytest

from untrusted.local_copies import LocalCopy
from untrusted.stores import Store

URL = "memory://bucket/run"


pytestmark = pytest.mark.usefixtures("memory_store")


def marker_of(name: str) -> str | None:
    """Return the marker of the files in a folder."""
    folder, _, _ = name.rpartition("/")
    return f"{folder}/done" if folder else None


def make_copy(directory) -> LocalCopy:
    return LocalCopy(Store(URL), directory, marker_of=marker_of)


def everything(copy: LocalCopy) -> list[str]:
    paths = copy.directory.rglob("*")
    return [path.relative_to(copy.directory).as_posix() for path in paths if path.is_file()]


def push(copy: LocalCopy) -> None:
    copy.push(everything(copy), lambda name: True)


def write(copy: LocalCopy, **texts: str) -> None:
    for name, text in texts.items():
        path = copy.directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_two_copies_follow_each_other(tmp_path):
    a = make_copy(tmp_path / "a")
    b = make_copy(tmp_path / "b")
    write(a, log="1", old="2", folder__x="3", folder__done="")
    push(a)
    b.pull(b.store.list())
    assert sorted(everything(b)) == ["folder/done", "folder/x", "log", "old"]
    write(b, log="12", new="4")
    (b.directory / "old").unlink()
    push(b)
    a.pull(a.store.list())
    assert sorted(everything(a)) == ["folder/done", "folder/x", "log", "new"]
    assert (a.directory / "log").read_text() == "12"


def test_pull_keeps_a_file_that_is_newer_here(tmp_path):
    copy = make_copy(tmp_path)
    write(copy, log="1")
    push(copy)
    write(copy, log="1 and more")
    copy.pull(copy.store.list())
    assert (copy.directory / "log").read_text() == "1 and more"


def test_push_leaves_files_alone_that_it_does_not_know(tmp_path, memory_store):
    memory_store.pipe("/bucket/run/theirs", b"x")
    copy = make_copy(tmp_path)
    write(copy, mine="1")
    push(copy)
    assert sorted(copy.store.list()) == ["mine", "theirs"]


class Killed(BaseException):
    """The end of a process."""


class Recorder:
    """Records the names in the store after each change, and ends the process at one of them."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, last: int | None = None):
        self.states: list[set[str]] = []
        for method in ("upload", "delete"):
            monkeypatch.setattr(store, method, self._recorded(store, getattr(store, method), last))

    def _recorded(self, store, method, last):
        def call(*args):
            if len(self.states) == last:
                raise Killed
            method(*args)
            self.states.append({*store.list()})

        return call


@pytest.fixture
def one_at_a_time(monkeypatch):
    monkeypatch.setattr("untrusted.local_copies._NUM_TRANSFERS", 1)


@pytest.mark.usefixtures("one_at_a_time")
def test_marker_is_in_the_store_only_next_to_all_files(tmp_path, monkeypatch):
    """Also if the folder is replaced by one with other files, or deleted."""
    copy = make_copy(tmp_path)
    recorder = Recorder(copy.store, monkeypatch)
    write(copy, s__a="1", s__b="1", s__done="1")
    push(copy)
    write(copy, s__a="22", s__b="22", s__c="22", s__done="22")
    push(copy)
    for file in everything(copy):
        (copy.directory / file).unlink()
    push(copy)
    assert recorder.states[-1] == set() and len(recorder.states) > 10
    complete = [state for state in recorder.states if "s/done" in state]
    assert {frozenset(state) for state in complete} == {
        frozenset({"s/a", "s/b", "s/done"}),
        frozenset({"s/a", "s/b", "s/c", "s/done"}),
    }


@pytest.mark.usefixtures("one_at_a_time")
def test_push_that_ends_anywhere_is_completed_by_the_next(tmp_path, monkeypatch):
    for last in range(8):
        copy = make_copy(tmp_path / str(last))
        write(copy, s__a="1", s__b="1", s__done="1")
        push(copy)
        write(copy, s__a="22", s__done="22", t="3")
        (copy.directory / "s" / "b").unlink()
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            Recorder(copy.store, patch, last)
            push(copy)
        push(copy)
        assert sorted(copy.store.list()) == ["s/a", "s/done", "t"]
        assert copy.store.read("s/a") == b"22"
        for name in copy.store.list():
            copy.store.delete(name)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a//x", "."])
def test_object_that_would_leave_the_folder_is_refused(name, tmp_path, monkeypatch):
    store = Store(URL)
    monkeypatch.setattr(
        store._files, "find", lambda *_, **__: {f"/bucket/run/{name}": {"type": "file", "size": 1}}
    )
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        LocalCopy(store, tmp_path).store.list()


def test_truncated_download_is_not_used(tmp_path, memory_store, monkeypatch):
    memory_store.pipe("/bucket/run/a", b"whole")
    copy = make_copy(tmp_path)
    files = copy.store.list()
    memory_store.pipe("/bucket/run/a", b"wh")
    copy.store.patience_s = 0.0
    with pytest.raises(ConnectionError, match="2 of 5 bytes"):
        copy.pull(files)
    assert everything(copy) == []
