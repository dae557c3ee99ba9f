"""Phases of a process: names, nesting, durations, and recomputed steps."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from train.lifecycle.phases import NAMES, RECOMPUTED, Phases

ROOT = Path(__file__).parents[3]


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def pass_(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    return Phases(age_s=3, clock=clock)


def spent(phases):
    return {name: seconds for name, seconds in phases.seconds.items() if seconds}


def test_phases_begin_in_startup_at_the_age_of_the_process(phases, clock):
    clock.pass_(2)
    assert (phases.current.name, phases.current.step, phases.current.seconds) == ("startup", 0, 5)
    assert spent(phases) == {"startup": 5}


def test_nested_blocks_count_no_second_twice(phases, clock):
    with phases("step", 7):
        clock.pass_(1)
        with phases("data", 7):
            clock.pass_(10)
            with phases("save"):
                clock.pass_(100)
            clock.pass_(20)
        clock.pass_(2)
    assert spent(phases) == {"startup": 3, "step": 3, "data": 30, "save": 100}


def test_current_follows_nested_blocks(phases, clock):
    seen = []

    def look():
        clock.pass_(1)
        place = phases.current
        seen.append((place.name, place.step, place.seconds))
        return place.changes

    changes = [look()]
    with phases("compile"):
        changes.append(look())
    changes.append(look())
    with phases("step", 5):
        changes.append(look())
        with phases("eval"):
            changes.append(look())
        changes.append(look())
    assert seen == [
        ("startup", 0, 4),
        ("compile", 0, 1),
        ("startup", 0, 1),
        ("step", 5, 1),
        ("eval", 5, 1),
        ("step", 5, 1),
    ]
    assert changes == sorted(set(changes))


def test_time_between_steps_does_not_count_as_startup(phases, clock):
    with phases("data", 1):
        clock.pass_(1)
    clock.pass_(10)
    assert (phases.current.name, phases.current.step) == ("other", 1)
    with phases("step", 1):
        pass
    clock.pass_(10)
    assert spent(phases) == {"startup": 3, "data": 1, "other": 20}


def test_an_exception_leaves_the_phase(phases, clock):
    with phases("step", 1):
        with pytest.raises(KeyError), phases("data", 1):
            raise KeyError
        clock.pass_(5)
    assert spent(phases) == {"startup": 3, "step": 5}


def test_repeated_steps_count_as_recomputed(phases, clock):
    phases.count_as_recomputed(range(3, 5))
    for step in (3, 4, 5):
        with phases("step", step):
            clock.pass_(1)
            with phases("data", step):
                clock.pass_(10)
            with phases("save", step):
                clock.pass_(100)
    assert spent(phases) == {"startup": 3, RECOMPUTED: 22, "save": 300, "step": 1, "data": 10}


def test_unknown_phase_is_rejected_by_name(phases):
    with pytest.raises(ValueError, match="phase 'steps' is unknown; choose startup, compile"):
        with phases("steps"):
            pass


def test_every_name_is_a_phase_and_is_counted(phases):
    for name in NAMES:
        with phases(name):
            assert phases.current.name == name
    assert set(phases.seconds) == {*NAMES, RECOMPUTED}


def test_startup_counts_from_the_creation_of_the_process():
    code = """
import time
time.sleep(1)
from train.lifecycle.phases import Phases
print(Phases().current.seconds)
"""
    begin_s = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    # The kernel stores the creation time in ticks of 10 ms.
    assert 1 <= float(process.stdout) <= time.monotonic() - begin_s + 0.02


def test_another_thread_reads_a_consistent_state():
    phases = Phases(age_s=0)
    wrong = []
    is_done = threading.Event()

    def read():
        # Each reading is consistent: the sum of all phases is the elapsed time, which only grows.
        last_s = 0.0
        while not is_done.is_set():
            before_s = time.monotonic() - begin_s
            total_s = sum(phases.seconds.values())
            if not max(before_s, last_s) - 1e-3 <= total_s <= time.monotonic() - begin_s + 1e-3:
                wrong.append(total_s)
            last_s = total_s

    begin_s = time.monotonic() - sum(phases.seconds.values())
    thread = threading.Thread(target=read)
    thread.start()
    for step in range(20_000):
        with phases("step", step), phases("data", step):
            pass
    is_done.set()
    thread.join()
    assert wrong == []
