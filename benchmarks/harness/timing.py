"""Interleaved timing of contenders that are compared with each other.

Contenders take turns in every round, so a slow minute of the machine slows down all of them:

    round 1          round 2
    A a a  B b b     A a a  B b b      A, B: untimed steps; a, b: timed steps
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

#: Untimed steps after the first one. The first may compile; the others fill caches.
NUM_WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation of a training step that is timed.

    Attributes:
        step: runs one step, waits until it has finished, and returns its loss.
        compile_time_s: seconds of tracing and compiling; None if nothing is compiled.
        first_loss: loss of the initial weights.
    """

    step: Callable[[], float]
    compile_time_s: float | None
    first_loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Step times of one contender.

    Attributes:
        rounds: seconds of every timed step, one tuple per round.
    """

    rounds: tuple[tuple[float, ...], ...]

    @property
    def median_s(self) -> float:
        """Median of all timed steps, in seconds."""
        return statistics.median(time_s for steps in self.rounds for time_s in steps)

    @property
    def round_medians_s(self) -> list[float]:
        """Median of each round, in seconds."""
        return [statistics.median(steps) for steps in self.rounds]

    def summary(self) -> dict[str, float]:
        """Return the median, quartiles and extremes of all timed steps, in seconds."""
        times_s = sorted(time_s for steps in self.rounds for time_s in steps)
        low, _, high = statistics.quantiles(times_s, n=4) if len(times_s) > 1 else times_s * 3
        return {
            "median": self.median_s,
            "quartile_low": max(low, times_s[0]),
            "quartile_high": min(high, times_s[-1]),
            "min": times_s[0],
            "max": times_s[-1],
        }


def interleave(
    steps: Mapping[Name, Callable[[], object]], *, num_rounds: int, num_steps: int
) -> dict[Name, StepTimes]:
    """Time the steps of contenders in turns: A B C A B C ...

    Args:
        steps: function by name of contender, which runs one step and waits until it has finished;
            each must have warmed up.
        num_rounds: number of turns of each contender.
        num_steps: number of timed steps in a turn. They follow one untimed step, because caches
            and threads are still occupied by the previous contender.

    Returns:
        The times of every contender, by name.
    """
    rounds: dict[Name, list[tuple[float, ...]]] = {name: [] for name in steps}
    for _ in range(num_rounds):
        for name, step in steps.items():
            step()
            rounds[name].append(tuple(time_s(step) for _ in range(num_steps)))
    return {name: StepTimes(rounds=tuple(times)) for name, times in rounds.items()}


def ratios(ours: StepTimes, peer: StepTimes) -> dict[str, float | Sequence[float]]:
    """Return our speed divided by the peer's speed; above 1, ours is faster.

    The ratio is computed within each round. `median`, `min` and `max` are taken over the rounds.
    """
    rounds = [
        peer_s / ours_s
        for ours_s, peer_s in zip(ours.round_medians_s, peer.round_medians_s, strict=True)
    ]
    return {
        "median": statistics.median(rounds),
        "min": min(rounds),
        "max": max(rounds),
        "rounds": rounds,
    }


def time_s(step: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s
