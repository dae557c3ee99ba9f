"""Tracks which phase a process is in, and how much time it spent in each.

A program creates one `Phases` when it starts, and wraps its parts in
`with phases("data", step): ...`. The watchdog and the goodput record read it. Durations are
measured with monotonic clocks, so that changes of the time of day do not affect them.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Phases in the order in which a process reaches them; from "data" on, they repeat every step.
NAMES = ("startup", "compile", "restore", "data", "step", "eval", "save", "other")
#: Key for the time of steps that an earlier start of the run had already done.
RECOMPUTED = "recomputed"
#: Phases whose time is lost if a step has to be repeated.
_OF_A_STEP = ("data", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStatus:
    """The current phase of a process."""

    name: str  # one of NAMES
    step: int  # the last step that was named; 0 before the first
    seconds: float  # since the process entered this phase or returned to it
    changes: int  # increases whenever a phase is entered or left


class _PhaseState(NamedTuple):
    name: str
    step: int
    since_s: float
    changes: int
    totals_s: Mapping[str, float]  # seconds by phase, without the time since `since_s`


class Phases:
    """The phases of one process, from its creation on.

    The first phase is "startup". Blocks may be nested: time counts for the innermost block, and
    leaving it returns to the outer one, so that every second counts once. After the first "data" or
    "step" block, time outside of all blocks counts as "other".

    Only one thread may enter and leave phases; any thread or signal handler may read them.
    """

    def __init__(
        self, *, age_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start in the phase "startup".

        Args:
            age_s: seconds already spent in it; by default the age of the process.
            clock: monotonic clock, in seconds.
        """
        self._clock = clock
        self._recomputed = range(0)
        start_s = clock() - (process_age_s() if age_s is None else age_s)
        totals_s: dict[str, float] = dict.fromkeys((*NAMES, RECOMPUTED), 0.0)
        # Immutable, and replaced as a whole at each change, so that readers need no lock.
        self._state = _PhaseState("startup", 0, start_s, 0, totals_s)

    @contextlib.contextmanager
    def __call__(self, name: str, step: int | None = None) -> Iterator[None]:
        """Enter phase `name` for the duration of the block.

        Args:
            name: one of NAMES.
            step: step it belongs to; by default the last step that was named.

        Raises:
            ValueError: `name` is unknown.
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
        """The current phase."""
        state = self._state
        seconds = self._clock() - state.since_s
        return PhaseStatus(name=state.name, step=state.step, seconds=seconds, changes=state.changes)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent so far in each of NAMES and in RECOMPUTED; their sum is the process age."""
        return self._totals_s(self._state, self._clock())

    def count_as_recomputed(self, steps: range) -> None:
        """Count the "data" and "step" time of these steps as RECOMPUTED from now on."""
        self._recomputed = steps

    def _enter(self, name: str, step: int) -> None:
        state = self._state
        now_s = self._clock()
        totals_s = self._totals_s(state, now_s)
        self._state = _PhaseState(name, step, now_s, state.changes + 1, totals_s)

    def _totals_s(self, state: _PhaseState, now_s: float) -> dict[str, float]:
        is_again = state.name in _OF_A_STEP and state.step in self._recomputed
        totals_s = dict(state.totals_s)
        totals_s[RECOMPUTED if is_again else state.name] += now_s - state.since_s
        return totals_s


def process_age_s() -> float:
    """Return the seconds since this process was created; 0 if the system does not tell.

    A shell that runs Python with `exec` is the same process, so its time is included.
    """
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        # proc(5): starttime is field 22. Field 2 is the name in parentheses, which may contain
        # spaces, so the fields are counted from the last parenthesis.
        ticks = int(stat.rpartition(")")[2].split()[19])
        # The same clock as /proc/uptime, which may be virtualized in a container.
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, now_s - ticks / os.sysconf("SC_CLK_TCK")) if ticks > 0 else 0.0
