"""Waiting for the locks of cached files."""

import errno
import os
import threading

import pytest

from untrusted import cached
from untrusted.cached import locked


def test_waiting_for_a_lock_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(cached, "_SILENT_S", 0.1)
    has_lock = threading.Event()
    may_end = threading.Event()

    def hold():
        with locked(tmp_path / "tokens"):
            has_lock.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    has_lock.wait(60)
    threading.Timer(0.5, may_end.set).start()
    with locked(tmp_path / "tokens"):
        pass
    holder.join()
    assert f"waiting for another process, which is making {tmp_path / 'tokens'}" in caplog.text


@pytest.mark.parametrize(
    "kind, problem",
    [
        ("link", "is a symbolic link, which is not followed; delete it"),
        ("hard link", r"is one of 2 names \(hard links\) of a file"),
        ("folder", "is not a regular file"),
        ("pipe", "is not a regular file"),
    ],
)
def test_anything_but_a_file_at_the_place_of_a_lock_is_refused(kind, problem, tmp_path):
    lock = tmp_path / "tokens.lock"
    (tmp_path / "victim").write_text("private")
    match kind:
        case "link":
            lock.symlink_to(tmp_path / "victim")
        case "hard link":
            lock.hardlink_to(tmp_path / "victim")
        case "folder":
            lock.mkdir()
        case "pipe":
            os.mkfifo(lock)
    with pytest.raises(ValueError, match=rf"tokens\.lock {problem}"):
        with locked(tmp_path / "tokens"):
            pass
    assert (tmp_path / "victim").read_text() == "private"


def test_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path / "tokens"):
        pass
    assert "tokens.lock cannot be locked" in caplog.text
