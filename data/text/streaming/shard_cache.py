"""The tokens of shards on the local disk, of which only those needed soon are there.

A thread for each shard that is read now or soon fetches it, and a process with limits tokenizes it:

    shard                   3        4        5        6        7        8
    while 5 is read      deleted  deleted   tokens   tokens   being tokenized

All runs of a host share the directory, and its bound. Under a lock they

    - make room for a shard before they fetch it: they reserve an equal part of the bound for the
      file and its tokens, and delete the tokens that were used longest ago;
    - leave a shard to the process that has reserved room for it first.

    streams/5ae1….tokens         tokens
    streams/77c0…/               a shard that is being tokenized
    streams/77c0…/reservation    number of bytes; locked by the process, until it ends
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.examples import BrokenExample
from data.text.streaming.first_row import check_text_field
from data.text.streaming.shards import Shard
from data.text.streaming.tokenizing import TOO_LARGE, open_tokens, tokenize
from data.text.text_files import REVISION, TEXT_PART_BYTES
from data.text.token_store import token_dtype
from data.text.tokenization.tokenizer import Tokenizer
from fields.numbers import shown
from untrusted.cached import locked
from untrusted.files import make_private_directory, open_in_place, remove, try_lock
from untrusted.limited import LimitedProcesses
from untrusted.limited_process import Limits

_POLL_S = 0.1
# Seconds of waiting for other processes after which a message is logged.
_SILENT_S = 60.0
# The digest of the tokens, and the files around them.
_OTHER_BYTES = 2**10
# Text is tokenized at 1 MB/s and more, and compressed files expand to about ten times their size.
_BYTES_PER_S = 20_000
_MIN_CPU_S = 60.0
_MEMORY_PER_BYTE = 16
_MIN_MEMORY_BYTES = 2**31

_log = logging.getLogger(__name__)


class ShardCache:
    """The tokens of the shards of a corpus.

    Args:
        config: config section `data`.
        tokenizer: encodes the documents.

    Raises:
        ValueError: A shard is larger than its part of `data.cache_gb`, or its rows have no
            `data.text_field`.
    """

    def __init__(self, shards: Sequence[Shard], config: DataConfig, tokenizer: Tokenizer):
        self._shards = shards
        self._config = config
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._directory = config.cache_path / "streams"
        self._max_bytes = round(config.cache_gb * 1e9)
        # There is always room: for the shard that is read, for those that are tokenized, and for
        # the one that is used next.
        self._shard_bytes = self._max_bytes // (config.num_workers + 2)
        for shard in shards:
            if not shard.is_local and (shard.size or 0) > self._shard_bytes:
                raise ValueError(self._too_large(shard))
        sizes = [self._shard_bytes if shard.size is None else shard.size for shard in shards]
        largest = max(sizes)
        cpu_s = _MIN_CPU_S + largest / _BYTES_PER_S
        limits = Limits(
            cpu_s=cpu_s,
            wall_s=20 * cpu_s,  # The file system may be slow.
            memory_bytes=_MIN_MEMORY_BYTES + _MEMORY_PER_BYTE * largest,
            file_bytes=self._shard_bytes,
        )
        check_text_field(shards, config, limits)
        self._processes = LimitedProcesses(tokenize, limits, num_processes=config.num_workers)
        self._is_closed = threading.Event()
        # By number in the order of reading: the file of the tokens, and the tokens.
        self._wanted: dict[int, tuple[Path, Future[np.ndarray]]] = {}
        self._reservations: dict[Path, int] = {}  # bytes of the shards that this object makes

    def read(self, number: int, order: Callable[[int], int]) -> np.ndarray:
        """Return the tokens of a shard, while the next shards are fetched and tokenized.

        Call this in one thread.

        Args:
            number: number of the shard in the order of reading.
            order: maps such a number to the number of a shard.

        Returns:
            uint16 or uint32 [number of tokens]: every document, followed by its end.

        Raises:
            BrokenExample: The shard cannot be read or tokenized.
        """
        numbers = range(number, number + self._config.num_workers + 1)
        if self._wanted.keys() != {*numbers}:
            paths = {each: self._path(self._shards[order(each)]) for each in numbers}
            ready = {each: self._wanted.get(each, (path, Future())) for each, path in paths.items()}
            started = self._wanted.keys()
            self._wanted = ready  # before a thread makes room
            for each in ready.keys() - started:
                _in_thread(self._load, self._shards[order(each)], ready[each][1])
        future = self._wanted[number][1]
        while not future.done():
            self._check_open()
            wait([future], _POLL_S)
        try:
            return future.result()
        except OSError as error:
            raise BrokenExample(
                f"data.cache_dir={self._config.cache_dir!r}: {self._directory} cannot be used: "
                f"{error.strerror or error}"
            ) from error

    def close(self) -> None:
        """End the processes; threads that wait for a shard raise an error."""
        self._is_closed.set()
        self._processes.close()

    def _load(self, shard: Shard) -> np.ndarray:
        """Return the tokens of a shard, from the cache if it has them."""
        path = self._path(shard)
        silent_until_s = time.monotonic() + _SILENT_S
        while True:
            self._check_open()
            with contextlib.suppress(FileNotFoundError):
                tokens = open_tokens(path, self._dtype)
                if tokens is not None:
                    os.utime(path)  # it was used now
                    return tokens
                _log.warning("%s is damaged (its SHA-256 differs): tokenizing again", path)
                with locked(self._directory):
                    path.unlink()
            with self._reserved(path) as work:
                if work is not None:
                    self._make(shard, work, path)
                    continue
            if time.monotonic() > silent_until_s:
                _log.warning(
                    "%s: waiting for another process that tokenizes it or takes all of "
                    "data.cache_gb=%s",
                    shard.name,
                    shown(self._config.cache_gb),
                )
                silent_until_s = float("inf")
            time.sleep(_POLL_S)

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise BrokenExample("the run has ended")

    def _make(self, shard: Shard, work: Path, path: Path) -> None:
        """Fetch and tokenize a shard in the directory `work`."""
        try:
            self._tokenize(shard, work)
            shard.check()
        except FileNotFoundError as error:
            raise BrokenExample(
                f"data.paths: {shard.name} has been deleted since this run started; restore it, or "
                "start again in another workdir"
            ) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise BrokenExample(f"data.paths: {shard.name} cannot be read: {reason}") from error
        except ValueError as error:
            message = self._too_large(shard) if TOO_LARGE in str(error) else str(error)
            raise BrokenExample(message) from error
        os.replace(work / "tokens", path)

    def _tokenize(self, shard: Shard, work: Path) -> None:
        file = shard.fetch(work)
        num_fetched = 0 if shard.is_local else file.stat().st_size
        argument = {
            "file": str(file),
            "name": shard.name,
            "text_field": self._config.text_field,
            "tokenizer": self._tokenizer.content,
            "eos_id": self._tokenizer.eos_id,
            "dtype": str(self._dtype),
            "target": str(work / "tokens"),
            "max_bytes": self._shard_bytes - num_fetched - _OTHER_BYTES,
        }
        try:
            self._processes.call(argument, f"data.paths: {shard.name}")
        finally:
            if self._is_closed.is_set():  # The call may have started a process after `close`.
                self._processes.close()

    @contextlib.contextmanager
    def _reserved(self, path: Path) -> Iterator[Path | None]:
        """Reserve room for a shard in the block, and yield a directory to make it in.

        Yields:
            None if there is no room yet, or another thread or process makes the shard.
        """
        work = path.with_suffix("")
        reservation = work / "reservation"
        with contextlib.ExitStack() as stack:
            with locked(self._directory):
                make_private_directory(self._directory)
                is_mine = not path.exists() and self._make_room(work)
                if is_mine:
                    make_private_directory(work)
                    lock = os.fdopen(open_in_place(reservation, os.O_RDWR), "r+")
                    stack.enter_context(lock)
                    try_lock(lock, reservation)
                    lock.write(str(self._shard_bytes))
                    lock.flush()
                    self._reservations[work] = self._shard_bytes
            try:
                yield work if is_mine else None
            finally:
                if is_mine:
                    with locked(self._directory):
                        remove(work)
                        del self._reservations[work]

    def _make_room(self, work: Path) -> bool:
        """Delete tokens until there is room for a shard, and return whether there is."""
        entries = sorted(self._directory.iterdir(), key=lambda entry: entry.stat().st_mtime)
        reserved = [
            # A file system without locks cannot tell that this process is not done.
            self._reservations.get(entry) or _reservation_of(entry)
            for entry in entries
            if entry.is_dir()
        ]
        if work.exists():
            return False
        needed = {path for path, _ in self._wanted.values()}
        finished = [entry for entry in entries if entry.suffix == ".tokens"]
        num_bytes = sum(reserved) + sum(entry.stat().st_size for entry in finished)
        for entry in finished:
            if num_bytes + self._shard_bytes > self._max_bytes and entry not in needed:
                num_bytes -= entry.stat().st_size
                entry.unlink()
        return num_bytes + self._shard_bytes <= self._max_bytes

    def _path(self, shard: Shard) -> Path:
        """Return the file of the tokens of a shard."""
        keyed = (
            f"{REVISION} {TEXT_PART_BYTES} {self._config.text_field} {self._dtype} "
            f"{self._tokenizer.fingerprint} {shard.name} {shard.version}"
        )
        return self._directory / f"{hashlib.sha256(keyed.encode()).hexdigest()[:32]}.tokens"

    def _too_large(self, shard: Shard) -> str:
        config = self._config
        return (
            f"data.paths: {shard.name} and its tokens take more than {self._shard_bytes / 1e9:.3g} "
            f"GB, 1/{config.num_workers + 2} of data.cache_gb={shown(config.cache_gb)}; increase "
            f"it, divide the file, or reduce data.num_workers={config.num_workers}"
        )


def _reservation_of(work: Path) -> int:
    """Return the bytes that a process has reserved; remove the directory if it has ended."""
    reservation = work / "reservation"
    try:
        with open(reservation, "r+") as lock:
            if not try_lock(lock, reservation):
                return int(lock.read() or 0)
    except FileNotFoundError:
        pass
    remove(work)
    return 0


def _in_thread(
    function: Callable[[Shard], np.ndarray], shard: Shard, future: "Future[np.ndarray]"
) -> None:
    """Call a function in a thread that does not keep the program from ending."""

    def run() -> None:
        try:
            future.set_result(function(shard))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
