"""Waiting for the locks of cached files."""

import os
import threading

import pytest

from data import locks
from data.locks import locked


def test_waiting_for_a_lock_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(locks, "_SILENT_S", 0.1)
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


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_anything_but_a_file_at_the_place_of_a_lock_is_refused(kind, tmp_path):
    lock = tmp_path / "tokens.lock"
    if kind == "link":
        lock.symlink_to(tmp_path / "victim")
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(ValueError, match=r"tokens\.lock is not a regular file.*delete it"):
        with locked(tmp_path / "tokens"):
            pass
    assert not (tmp_path / "victim").exists()
