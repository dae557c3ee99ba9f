"""Waiting for the locks of cached files."""

import threading

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
