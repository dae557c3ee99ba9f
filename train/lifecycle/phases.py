"""Where a process is, and what its time went into.

A program makes one `Phases` at its start, and says `with phases("data", step): ...` around its
parts. Durations are those of monotonic clocks: setting the time of day changes none.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: In the order in which a process comes to them; from "data" on, once a step.
NAMES = ("startup", "compile", "restore", "data", "step", "eval", "save", "other")
#: The key of the time that steps took which an earlier start of the run had done already.
RECOMPUTED = "recomputed"
#: What of a step is lost if it has to be done again.
_OF_A_STEP = ("data", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStatus:
    """Where a process is."""

    name: str  # of the phase, one of NAMES
    step: int  # the last one named; 0 before the first
    seconds: float  # since it entered this phase or came back to it
    changes: int  # grows whenever a phase is entered or left


class _PhaseState(NamedTuple):
    name: str
    step: int
    since_s: float
    changes: int
    totals_s: Mapping[str, float]  # without the time since `since_s`


class Phases:
    """The phases of one process, from its creation on.

    It begins in "startup". In nested blocks the inner one counts, and leaving it goes back to the
    outer one, so each second counts once. Once a "data" or "step" block was there, time outside of
    all blocks is "other".

    One thread enters and leaves; any thread, or a signal's handler, may read.
    """

    def __init__(
        self, *, age_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins in "startup".

        Args:
            age_s: seconds that were spent in it so far; by default since the process's creation.
            clock: returns seconds that never go back.
        """
        self._clock = clock
        self._recomputed = range(0)
        start_s = clock() - (process_age_s() if age_s is None else age_s)
        totals_s: dict[str, float] = dict.fromkeys((*NAMES, RECOMPUTED), 0.0)
        # Replaced as a whole at each change: whoever reads needs no lock.
        self._state = _PhaseState("startup", 0, start_s, 0, totals_s)

    @contextlib.contextmanager
    def __call__(self, name: str, step: int | None = None) -> Iterator[None]:
        """Is in phase `name` within the block.

        Args:
            name: one of NAMES.
            step: that it belongs to; by default the last one named.

        Raises:
            ValueError: `name` is no phase.
        """
        if name not in NAMES:
            raise ValueError(f"phase {name!r} is unknown; choose {', '.join(NAMES)}")
        outer = self._state.name
        if outer == "startup" and name in _OF_A_STEP:
            outer = "other"
        self._enter(name, self._state.step if step is None else step)
        try:
            yield
        finally:
            self._enter(outer, self._state.step)

    @property
    def current(self) -> PhaseStatus:
        """Where the process is now."""
        state = self._state
        seconds = self._clock() - state.since_s
        return PhaseStatus(name=state.name, step=state.step, seconds=seconds, changes=state.changes)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by name: all of NAMES, and RECOMPUTED; their sum is the process's age."""
        return self._totals_s(self._state, self._clock())

    def count_as_recomputed(self, steps: range) -> None:
        """Counts the time of "data" and "step" at `steps` under RECOMPUTED, from now on."""
        self._recomputed = steps

    def _enter(self, name: str, step: int) -> None:
        state, now_s = self._state, self._clock()
        totals_s = self._totals_s(state, now_s)
        self._state = _PhaseState(name, step, now_s, state.changes + 1, totals_s)

    def _totals_s(self, state: _PhaseState, now_s: float) -> dict[str, float]:
        is_again = state.name in _OF_A_STEP and state.step in self._recomputed
        totals_s = dict(state.totals_s)
        totals_s[RECOMPUTED if is_again else state.name] += now_s - state.since_s
        return totals_s


def process_age_s() -> float:
    """Returns the seconds since this process was created; 0 where the system does not say.

    A shell that gave way to Python with `exec` was the same process already.
    """
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        # proc(5): starttime is field 22; field 3 follows the name, which may hold anything.
        ticks = int(stat.rpartition(")")[2].split()[19])
        # The clock that /proc/uptime shows; that file may be a container's own.
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, now_s - ticks / os.sysconf("SC_CLK_TCK")) if ticks > 0 else 0.0
