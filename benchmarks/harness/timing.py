"""Interleaved timing: contenders take turns, so that a machine's slow minute slows all of them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

#: Steps that run untimed after the first, which may compile.
NUM_WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed.

    Attributes:
      step: runs one step, waits for it, and returns its loss.
      compile_time_s: of tracing and compiling; None where nothing is compiled.
      first_loss: the loss of the initial weights.
    """

    step: Callable[[], float]
    compile_time_s: float | None
    first_loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Step times of one contender.

    Attributes:
      rounds: seconds of every timed step, a tuple per round.
    """

    rounds: tuple[tuple[float, ...], ...]

    @property
    def median_s(self) -> float:
        return statistics.median(time_s for steps in self.rounds for time_s in steps)

    @property
    def round_medians_s(self) -> list[float]:
        return [statistics.median(steps) for steps in self.rounds]

    def summary(self) -> dict[str, float]:
        """Returns median, quartiles and extremes of all timed steps, in seconds."""
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
    contenders: Mapping[Name, Contender], *, num_rounds: int, num_steps: int
) -> dict[Name, Times]:
    """Returns the times of contenders that run in turns: A B C A B C ...

    Args:
      contenders: by name; each must have warmed up.
      num_rounds: turns of each.
      num_steps: timed steps in a turn. One more runs before them untimed, since caches and
        threads still belong to the contender before.
    """
    rounds: dict[Name, list[tuple[float, ...]]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, contender in contenders.items():
            contender.step()
            rounds[name].append(tuple(_time_s(contender.step) for _ in range(num_steps)))
    return {name: Times(rounds=tuple(times)) for name, times in rounds.items()}


def ratios(ours: Times, peer: Times) -> dict[str, float | Sequence[float]]:
    """Returns how many times the peer's speed ours has: above 1 is faster.

    The ratio is formed within each round, and `median`, `min` and `max` are over the rounds.
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


def _time_s(step: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s
