"""A thread that continues the prompts of all requests together, and hands out their tokens.

    submit ──> waiting ──> slots (one thread runs the device) ──> on_tokens of each request
                   ^                                                   │
                   └──────────── a slot is free ────── the row has ended, or nobody waits for it

Whenever a row ends, its slot goes to the next row that waits, while the others are continued.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from generate.sampling import Sampling
from generate.serve.slots import Row, Slots

_log = logging.getLogger(__name__)

#: Why a row has ended: a token that ends texts, enough tokens, or an error of the device.
STOP, LENGTH, ERROR = "stop", "length", "error"


class Busy(Exception):
    """Raised when too many rows are waiting."""

    status = 429


class Unavailable(Exception):
    """Raised when no rows are taken any more."""

    status = 503


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """One continuation that somebody waits for."""

    tokens: Sequence[int]  # prompt
    sampling: Sampling  # how tokens are chosen
    row: int  # number of this continuation in its request
    max_new_tokens: int  # most tokens of the continuation
    # called in the engine's thread with new tokens and, at the end, the reason
    on_tokens: Callable[[list[int], str | None], None]
    is_cancelled: bool = False  # set by whoever no longer waits; no tokens follow
    num_new: int = 0


class Engine:
    """Continues prompts in a thread of its own; close it in the end.

    Args:
        open_slots: opens the slots; called in the thread, which alone uses the device.
        stop: ids of tokens that end a text.
        max_waiting: most rows that wait for a slot.

    Attributes:
        failure: error that has ended the thread; None if there is none.
    """

    def __init__(
        self,
        open_slots: Callable[[], AbstractContextManager[Slots]],
        *,
        num_slots: int,
        stop: Sequence[int],
        max_waiting: int,
    ):
        self._open_slots = open_slots
        self._stop = frozenset(stop)
        self._max_waiting = max_waiting
        self._waiting: collections.deque[Job] = collections.deque()
        self._num_slots = num_slots
        self._jobs: dict[int, Job] = {}  # slot in use -> its job
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_ready = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Number of slots in use."""
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Number of rows that wait for a slot."""
        return len(self._waiting)

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ValueError: the model cannot be served.
        """
        self._is_ready.wait()
        if self.failure is not None:
            raise ValueError(str(self.failure)) from self.failure

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add the rows of a request.

        Raises:
            Busy: too many rows are waiting; none of these was added.
            Unavailable: the model has failed, or the engine is closing.
        """
        with self._changed:
            if self.failure is not None:
                raise Unavailable("the model has failed; see the server's log, and start it again")
            if self._is_closing:
                raise Unavailable("the server is closing")
            if len(self._waiting) + len(jobs) > self._max_waiting:
                raise Busy(
                    f"{len(self._waiting)} continuations are waiting already, of at most "
                    f"{self._max_waiting}; try again later"
                )
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Give up rows: those that wait are removed, others end within a few tokens."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
                if job in self._waiting:
                    self._waiting.remove(job)

    def close(self) -> None:
        """End the thread; rows that are not complete get the reason ERROR."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._open_slots() as slots:
                self._is_ready.set()
                while self._wait():
                    self._begin(slots)
                    self._advance(slots)
        except BaseException as error:
            if self._is_ready.is_set():
                _log.exception("the engine has failed")
            self.failure = error
        finally:
            with self._changed:
                left = [*self._jobs.values(), *self._waiting]
                self._waiting.clear()
                self._jobs.clear()
            for job in left:
                job.on_tokens([], ERROR)
            self._is_ready.set()

    def _wait(self) -> bool:
        """Wait until there are rows; return False if the engine is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._waiting or self._jobs)
            return not self._is_closing

    def _begin(self, slots: Slots) -> None:
        """Put waiting rows into free slots."""
        while True:
            with self._changed:
                free = [slot for slot in range(self._num_slots) if slot not in self._jobs]
                taken = free[: min(slots.rows_per_prefill, len(self._waiting))]
                started = {slot: self._waiting.popleft() for slot in taken}
                self._jobs |= started
            if not started:
                return
            rows = [
                Row(slot=slot, tokens=job.tokens, sampling=job.sampling, number=job.row)
                for slot, job in started.items()
            ]
            try:
                firsts = slots.begin(rows)
            except (TypeError, ValueError, OverflowError):  # missed by the checks of requests
                _log.exception("%d rows cannot be continued", len(rows))
                for slot, job in started.items():
                    del self._jobs[slot]
                    job.on_tokens([], ERROR)
                continue
            for slot, token in zip(taken, firsts, strict=True):
                self._deliver(slot, [token])

    def _advance(self, slots: Slots) -> None:
        """Continue all rows by a few tokens."""
        if not self._jobs:
            return
        is_active_B = np.array([slot in self._jobs for slot in range(self._num_slots)])
        new_BM = slots.advance(is_active_B).tolist()
        for slot in [*self._jobs]:
            self._deliver(slot, new_BM[slot])

    def _deliver(self, slot: int, tokens: list[int]) -> None:
        """Hand new tokens to the job of a slot, and free the slot if it has ended."""
        job = self._jobs[slot]
        reason = None
        new_tokens = []
        for token in tokens[: job.max_new_tokens - job.num_new]:
            new_tokens.append(token)
            if token in self._stop:
                reason = STOP
                break
        job.num_new += len(new_tokens)
        if reason is None and job.num_new == job.max_new_tokens:
            reason = LENGTH
        if reason is not None or job.is_cancelled:
            del self._jobs[slot]
        if not job.is_cancelled:
            job.on_tokens(new_tokens, reason)
