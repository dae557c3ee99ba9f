"""The engine's bookkeeping, with slots whose tokens are known."""

import contextlib
import threading

import numpy as np
import pytest

from generate.sampling import Sampling
from generate.serve.engine import ERROR, LENGTH, STOP, Busy, Engine, Job, Unavailable

_STOP = 99
_WAIT_S = 20


class CountingSlots:
    """Slots whose rows count on from the first token of their prompts; M = 2."""

    rows_per_prefill = 1

    def __init__(self, num_slots: int):
        self.newest = [0] * num_slots
        self.most_active = 0
        self.fails = False
        self.may_advance = threading.Event()
        self.may_advance.set()

    def begin(self, rows):
        for row in rows:
            self.newest[row.slot] = row.tokens[0] + 1
        return [self.newest[row.slot] for row in rows]

    def advance(self, is_active_B):
        assert self.may_advance.wait(_WAIT_S)
        if self.fails:
            raise RuntimeError("the device is gone")
        self.most_active = max(self.most_active, int(is_active_B.sum()))
        found = np.array([[newest + 1, newest + 2] for newest in self.newest])
        self.newest = found[:, 1].tolist()
        return found


class Collected:
    """A job, and the tokens that it has received."""

    def __init__(self, first: int, most: int):
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.has_ended = threading.Event()
        self.job = Job(
            tokens=[first],
            sampling=Sampling(),
            row=0,
            max_new_tokens=most,
            on_tokens=self._receive,
        )

    def _receive(self, tokens, reason):
        self.tokens += tokens
        self.reason = reason
        if reason is not None:
            self.has_ended.set()

    def wait(self) -> tuple[list[int], str | None]:
        assert self.has_ended.wait(_WAIT_S)
        return self.tokens, self.reason


@pytest.fixture
def slots() -> CountingSlots:
    return CountingSlots(2)


@pytest.fixture
def engine(slots):
    found = Engine(lambda: contextlib.nullcontext(slots), num_slots=2, stop=[_STOP], max_waiting=6)
    found.wait_until_ready()
    yield found
    slots.may_advance.set()
    found.close()


def test_rows_get_their_own_tokens_and_use_all_slots(engine, slots):
    all_jobs = [Collected(10 * number, 5 + number) for number in range(5)]
    engine.submit([one.job for one in all_jobs])
    for number, one in enumerate(all_jobs):
        first = 10 * number + 1
        assert one.wait() == ([*range(first, first + 5 + number)], LENGTH)
    assert slots.most_active == 2
    assert engine.num_running == engine.num_waiting == 0


def test_stop_token_ends_a_row(engine):
    one = Collected(_STOP - 4, 50)
    engine.submit([one.job])
    assert one.wait() == ([96, 97, 98, 99], STOP)


def test_too_many_rows_are_refused_together(engine, slots):
    slots.may_advance.clear()
    running = [Collected(0, 10) for _ in range(2)]
    engine.submit([one.job for one in running])
    waiting = [Collected(0, 10) for _ in range(6)]
    while engine.num_waiting:
        pass
    engine.submit([one.job for one in waiting])
    with pytest.raises(Busy, match="6 continuations are waiting already, of at most 6"):
        engine.submit([Collected(0, 1).job])
    engine.cancel([one.job for one in waiting[1:]])
    assert engine.num_waiting == 1
    slots.may_advance.set()
    assert waiting[0].wait()[1] == LENGTH


def test_cancelled_row_gets_no_tokens_and_frees_its_slot(engine, slots):
    slots.may_advance.clear()
    left = Collected(0, 1000)
    other = Collected(50, 5)
    engine.submit([left.job, other.job])
    while engine.num_running < 2:
        pass
    engine.cancel([left.job])
    seen = len(left.tokens)
    slots.may_advance.set()
    assert other.wait()[1] == LENGTH
    assert len(left.tokens) <= seen + 1 and left.reason is None
    deadline = threading.Event()
    for _ in range(200):
        if not engine.num_running:
            break
        deadline.wait(0.05)
    assert engine.num_running == 0


def test_failure_ends_all_rows_and_refuses_others(engine, slots, caplog):
    slots.fails = True
    all_jobs = [Collected(0, 10) for _ in range(4)]
    engine.submit([one.job for one in all_jobs])
    assert {one.wait()[1] for one in all_jobs} == {ERROR}
    assert isinstance(engine.failure, RuntimeError)
    assert "the engine has failed" in caplog.text
    with pytest.raises(Unavailable, match="the model has failed"):
        engine.submit([Collected(0, 1).job])


def test_closing_ends_all_rows(slots):
    engine = Engine(lambda: contextlib.nullcontext(slots), num_slots=2, stop=[], max_waiting=6)
    one = Collected(0, 10**9)
    engine.submit([one.job])
    engine.close()
    assert one.wait()[1] == ERROR
