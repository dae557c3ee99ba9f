"""The lock of a workdir, so that two runs do not overwrite each other's files.

The file contains the holder's process id and host, for the error message and for the check that all
processes see the same workdir.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from checkpoint.run_copies import LOCK_FILE
from distributed.messages import Exchange
from untrusted.files import naming, open_in_place, try_lock

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def lock(workdir: Path, *, timeout_s: float, is_shared: bool = True) -> Iterator[str]:
    """Lock `workdir` for the duration of the block, so that two runs do not overwrite each other.

    The first process of a run that was killed or requeued may live a little longer than the run, so
    this waits for it. If the holder of a lock is killed, the lock is released.

    Args:
        workdir: run's directory; it is created if necessary.
        timeout_s: seconds to wait for another run to end.
        is_shared: False if each process has a workdir of its own.

    Yields:
        A string that identifies this start: the same on all processes, different at each start.

    Raises:
        ValueError: on all processes, if one of them does not see the first process's `workdir`.
        OSError: on all processes, if another run keeps the lock for longer, or the directory
            cannot be written.
    """
    exchange = Exchange()
    path = workdir / LOCK_FILE
    with contextlib.ExitStack() as stack:
        start_id = exchange.on_first(lambda: stack.enter_context(_lock_file(path, timeout_s)))
        if is_shared:
            problem = exchange.agree(None if _can_read(path, start_id) else "it is not there")
            if problem is not None:
                raise ValueError(
                    f"--workdir={workdir} is not the same directory on all processes ({problem}); "
                    "choose a directory on a file system that all hosts share (in containers, one "
                    "that is mounted)"
                )
        yield start_id


@contextlib.contextmanager
def _lock_file(path: Path, timeout_s: float) -> Iterator[str]:
    """Hold a lock file for the duration of the block; yield its content, which names the holder.

    The file is deleted at the end, so a process that opened it earlier may lock a deleted file. It
    then tries again with the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = f"process {os.getpid()} on {socket.gethostname()} {secrets.token_hex(8)}"
    deadline_s = time.monotonic() + timeout_s
    has_warned = False
    while True:
        descriptor = open_in_place(path, os.O_RDWR | os.O_APPEND)
        with os.fdopen(descriptor, "a+", encoding="utf-8") as file:
            holder = ""
            if not try_lock(file, path):
                file.seek(0)
                holder = file.read().rpartition(" ")[0] or "another process"
            # The previous holder may have deleted the file, and another process may have created a
            # new one in the meantime.
            if not holder and _is_same_file(file, path):
                with naming(path):
                    file.truncate(0)
                    file.write(content)
                    file.flush()
                try:
                    yield content
                finally:
                    path.unlink(missing_ok=True)
                return
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"--workdir={path.parent} is in use by {holder or 'many'}, and still was after "
                f"{timeout_s:.0f} s; wait until that run ends, or choose another --workdir"
            )
        if holder and not has_warned:
            _log.warning("--workdir=%s is in use by %s: waiting", path.parent, holder)
            has_warned = True
        time.sleep(0.2)


def _is_same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _can_read(path: Path, content: str) -> bool:
    deadline_s = time.monotonic() + 10  # network file systems may show new files late
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, ValueError):
            if path.read_text(encoding="utf-8") == content:
                return True
        time.sleep(0.2)
    return False
