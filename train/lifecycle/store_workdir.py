"""A workdir in an object store: `--workdir=s3://bucket/run`.

The run works on a copy of the workdir on this machine; see checkpoint/run_copies.py. The first
process downloads at the start, and uploads

    every 30 s            files outside `checkpoints/` that have changed
    after each save       these files, then the checkpoint
    at the end            the rest

A run that is killed between two uploads continues from the newest checkpoint in the store, as if it
had been killed right after that save.
"""

import contextlib
import logging
import threading
from pathlib import Path

from checkpoint.run_copies import (
    copy_of_run,
    download_run,
    open_run_copy,
    upload_checkpoints,
    upload_records,
)
from distributed.messages import LONGEST_START_S, Exchange
from train.lifecycle.store_lock import LockLost, StoreLock
from train.lifecycle.workdir_lock import lock
from untrusted.files import make_private_directory
from untrusted.messages import sentence_of

# Seconds for which an upload is repeated while the server cannot be reached.
_PATIENCE_S = 90.0
_UPLOAD_EVERY_S = 30.0

_log = logging.getLogger(__name__)


class StoreWorkdir:
    """A workdir in a store, and its copy, which all processes of the run share.

    Attributes:
        url: URL of the workdir.
        directory: copy of the workdir.
        start_id: identifies this start, once the workdir is open; see `workdir_lock.lock`.
    """

    def __init__(self, url: str):
        """Describe a workdir; nothing is transferred.

        Raises:
            ValueError: the package for the store is missing.
        """
        self._copy = copy_of_run(url)
        self.url = self._copy.store.url
        self.directory: Path = self._copy.directory
        self._locks = contextlib.ExitStack()
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._uploader = threading.Thread(target=self._keep_uploading, name="uploads", daemon=True)
        self._lock: StoreLock | None = None
        self.start_id = ""
        self._is_open = False

    def __str__(self) -> str:
        return f"{self.url} (its copy on this machine is {self.directory})"

    def download(self) -> None:
        """Download the newest checkpoint and the other files, to evaluate.

        Raises:
            ValueError: the store has no such run, or refuses access.
            ConnectionError: the store cannot be reached.
        """
        download_run(self._copy, lambda complete: complete[-1:])

    def open(self, timeout_s: float) -> None:
        """Lock the workdir, and download changed files; all processes call it.

        Args:
            timeout_s: seconds to wait for another run to end.

        Raises:
            ValueError: the store has no such bucket, or refuses access, or processes do not share
                the copy.
            OSError: another run keeps the lock for longer, or the store cannot be reached.
        """
        make_private_directory(self.directory.parent)
        workdir_lock = lock(self.directory, timeout_s=timeout_s)
        self.start_id = self._locks.enter_context(workdir_lock)
        Exchange(LONGEST_START_S).on_first(lambda: self._open(timeout_s))

    def _open(self, timeout_s: float) -> None:
        self._lock = StoreLock(self.url, self._copy.id)
        self._lock.acquire(timeout_s)
        open_run_copy(self._copy)
        self._is_open = True
        self._set_patience(_PATIENCE_S)
        self._uploader.start()

    def publish(self) -> None:
        """Upload everything that has changed; only the first process calls it.

        Raises:
            OSError: the store cannot be reached, or refuses the files, or another run has taken the
                lock. The files stay on this machine, and the next call uploads them.
        """
        with self._mutex:
            assert self._lock is not None
            self._lock.check()
            upload_records(self._copy)
            upload_checkpoints(self._copy)

    def finish(self) -> bool:
        """Upload the last files, and return whether the store has all; all processes call it."""
        return Exchange(LONGEST_START_S).on_first(self._finish)

    def _finish(self) -> bool:
        try:
            self.publish()
        except (ValueError, OSError) as error:
            _log.error(
                "%s does not have all files of %s: %s; start the run again on this machine to "
                "upload them",
                self.url,
                self.directory,
                sentence_of(error),
            )
            return False
        return True

    def close(self) -> None:
        """Upload the files outside `checkpoints/`, if possible, and release the locks."""
        self._stop.set()
        if self._uploader.is_alive():
            self._uploader.join()
        if self._is_open:
            self._set_patience(0.0)  # `finish` has had patience
            self._upload_records()
        if self._lock is not None:
            self._lock.release()
        self._locks.close()

    def _set_patience(self, seconds: float) -> None:
        assert self._lock is not None
        self._copy.store.patience_s = seconds
        self._lock.store.patience_s = seconds

    def _keep_uploading(self) -> None:
        while not self._stop.wait(_UPLOAD_EVERY_S):
            self._upload_records()

    def _upload_records(self) -> None:
        with self._mutex:
            assert self._lock is not None
            try:
                self._lock.check()
                upload_records(self._copy)
            except LockLost:
                self._stop.set()  # the lock has logged it
            except (ValueError, OSError) as error:
                _log.warning("files of the run are not uploaded yet: %s", sentence_of(error))
