"""The lock of a run in an object store, which works between machines.

A store has no locks, but it can create an object only if there is none of this name: S3 by
`If-None-Match: *`, Google Cloud Storage by `ifGenerationMatch=0`. So the lock is a series of
numbered objects, and the holder is the process that has created the highest one:

    s3://bucket/run/lock/000001     {"holder": "process 71 on a", "copy": "9c0f…", "beat": 6, …}
    s3://bucket/run/lock/000002     created when the one above had stopped to change

The holder rewrites its object every few seconds. A process that has seen no change for `STALE_S`
creates the next number, and if several do, one of them succeeds. No clocks of different machines
are compared. A holder that was suspended for so long finds the higher number before its next
upload, and uploads nothing any more. Only an upload that was under way at that moment may still
end.

If the holder is a killed process of the same machine, nobody has to wait: its copy of the workdir
has a lock of the file system, which the kernel has released.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

from untrusted.documents import parse_json
from untrusted.messages import shortened
from untrusted.stores import Store

#: Seconds without a change after which the holder of a lock counts as dead.
STALE_S = 45.0
_BEAT_S = 8.0
_POLL_S = 1.0

_log = logging.getLogger(__name__)


class LockLost(OSError):
    """Another run has taken the lock."""


class StoreLock:
    """The lock of a run; only the first process uses it.

    Attributes:
        store: folder of the lock's objects.
    """

    def __init__(self, url: str, copy_id: str):
        """Describe a lock.

        Args:
            copy_id: identifies the copy of the workdir, whose lock in the file system the caller
                holds.
        """
        self._url = url
        self.store = Store(f"{url}/lock")
        self._copy_id = copy_id
        self._token = secrets.token_hex(16)  # differs at each start
        self._name = ""
        self._beat = 0
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="store-lock", daemon=True)

    def acquire(self, timeout_s: float) -> None:
        """Wait for the lock, and hold it until `release`.

        Raises:
            TimeoutError: another run has it for longer.
            ValueError: see `Store`; for example, the bucket cannot be written.
            ConnectionError: the store cannot be reached.
        """
        deadline_s = time.monotonic() + timeout_s
        watched = b""
        changed_s = time.monotonic()
        has_warned = False
        while True:
            name = max(self._numbers(), default="000000")
            content = self.store.read(name) or b""
            if content != watched:
                watched = content
                changed_s = time.monotonic()
            is_dead = time.monotonic() - changed_s > STALE_S
            fields = _parse(content)
            if not fields or fields.get("copy") == self._copy_id or is_dead:
                if self._create(f"{int(name) + 1:06d}"):
                    return
                continue
            holder = shortened(fields.get("holder", "another process"))
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"--workdir={self._url} is in use by {holder}, and still was after "
                    f"{timeout_s:.0f} s; wait until that run ends, or choose another --workdir"
                )
            if not has_warned:
                _log.warning("--workdir=%s is in use by %s: waiting", self._url, holder)
                has_warned = True
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Check that this process still holds the lock; call it before files are uploaded.

        Raises:
            LockLost: another run has taken it.
            ConnectionError: the store cannot be reached.
        """
        with self._mutex:
            newest = max(self._numbers(), default="")
            content = self.store.read(newest) if newest == self._name else None
            if _parse(content or b"").get("token") != self._token:
                raise LockLost(
                    f"another run has taken --workdir={self._url}, since this one did not respond "
                    f"for {STALE_S:.0f} s; nothing is uploaded any more"
                )

    def release(self) -> None:
        """Release the lock, if it is held."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._name:
            with contextlib.suppress(ValueError, OSError):  # It is stale soon.
                self.check()
                self.store.delete(self._name)

    def _create(self, name: str) -> bool:
        """Create the object of a number; return whether no other process was faster."""
        self._name = name
        if not self.store.create(name, self._content()):
            return False
        if self.store.create(name, self._content()):
            _log.warning(
                "the server of %s ignores conditions of writes: do not start two runs there at the "
                "same time",
                self._url,
            )
        for older in self._numbers():
            if older < name:
                self.store.delete(older)
        self._thread.start()
        return True

    def _keep(self) -> None:
        """Rewrite the object until `release`, or until another run has the lock."""
        while not self._stop.wait(_BEAT_S):
            try:
                self.check()
                with self._mutex:
                    self._beat += 1
                    self.store.write(self._name, self._content())
            except LockLost as error:
                _log.error("%s", error)
                return
            except (ValueError, OSError) as error:
                _log.warning("the lock of %s cannot be renewed: %s", self._url, error)

    def _numbers(self) -> list[str]:
        return [name for name in self.store.list() if name.isdecimal()]

    def _content(self) -> bytes:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        fields = {"copy": self._copy_id, "token": self._token, "beat": self._beat}
        return json.dumps({"holder": holder, **fields}).encode()


def _parse(content: bytes) -> dict[str, Any]:
    """Return the fields of a lock; empty if there is none, or something else."""
    try:
        return parse_json(content, "lock", dict)
    except ValueError:
        return {}
