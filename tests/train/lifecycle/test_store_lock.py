"""The lock of a run in a store, on fsspec's file system in memory."""

import threading

import pytest

from train.lifecycle import store_lock
from train.lifecycle.store_lock import LockLost, StoreLock

URL = "memory://bucket/run"

pytestmark = pytest.mark.usefixtures("memory_store")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(store_lock, "_POLL_S", 0.01)
    monkeypatch.setattr(store_lock, "_BEAT_S", 0.02)


@pytest.fixture
def make_lock():
    """A function that makes a lock, which is released at the end."""
    locks = []

    def make(copy_id: str) -> StoreLock:
        locks.append(StoreLock(URL, copy_id))
        return locks[-1]

    yield make
    for lock in locks:
        lock.release()


def stop_beating(lock: StoreLock) -> None:
    """Stop renewing a lock, as if its process was suspended or killed."""
    lock._stop.set()
    lock._thread.join()


def test_second_run_waits_and_then_names_the_first(make_lock):
    first = make_lock("a")
    first.acquire(1)
    with pytest.raises(
        TimeoutError, match=r"is in use by process \d+ on .*, and still was after 0 s"
    ):
        make_lock("b").acquire(0.1)
    first.check()
    first.release()
    make_lock("b").acquire(0.1)


def test_lock_that_is_renewed_does_not_become_stale(make_lock, monkeypatch):
    monkeypatch.setattr(store_lock, "STALE_S", 0.3)
    make_lock("a").acquire(1)
    with pytest.raises(TimeoutError):
        make_lock("b").acquire(0.9)


def test_stale_lock_is_taken_and_its_holder_uploads_nothing_more(make_lock, monkeypatch):
    monkeypatch.setattr(store_lock, "STALE_S", 0.2)
    first = make_lock("a")
    first.acquire(1)
    stop_beating(first)
    second = make_lock("b")
    second.acquire(10)
    second.check()
    with pytest.raises(LockLost, match="another run has taken"):
        first.check()
    first.release()
    second.check()  # the first has not deleted the lock of the second
    second.release()
    with pytest.raises(LockLost):
        first.check()


def test_lock_of_the_same_copy_is_taken_at_once(make_lock):
    """The caller holds the copy's own lock, so the previous holder is dead."""
    first = make_lock("a")
    first.acquire(1)
    stop_beating(first)
    make_lock("a").acquire(0.0)


def test_one_of_many_runs_gets_a_stale_lock(make_lock, monkeypatch):
    monkeypatch.setattr(store_lock, "STALE_S", 0.2)
    dead = make_lock("dead")
    dead.acquire(1)
    stop_beating(dead)
    holders = []

    def acquire(lock: StoreLock) -> None:
        try:
            lock.acquire(0.8)
            holders.append(lock)
        except TimeoutError:
            pass

    threads = [threading.Thread(target=acquire, args=[make_lock(str(i))]) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = holders
    holder.check()


def test_server_without_conditional_writes_is_reported(make_lock, monkeypatch, caplog):
    lock = make_lock("a")
    monkeypatch.setattr(
        lock.store, "create", lambda name, content: not lock.store.write(name, content)
    )
    lock.acquire(1)
    assert "ignores conditions of writes" in caplog.text
