"""Shows how much of a run's time was productive: `python -m train.goodput WORKDIR`.

Goodput is the time in steps that were done for the first time, divided by the total time over all
starts of the run. Each start writes one file, `workdir/goodput/<number>.json`. Durations in it are
measured with a monotonic clock; only the time between two starts is computed from the time of day.
docs/many_hosts.md explains the output.
"""

import dataclasses
import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from checkpoint.run_copies import records_path
from train.lifecycle.phases import NAMES, RECOMPUTED, Phases
from untrusted.commands import command_parser, refuses_bad_input, run_command
from untrusted.documents import read_json
from untrusted.files import write_text

GOODPUT_DIRECTORY = "goodput"
#: How a start can end; None if it was killed or is still running.
ENDS = ("finished", "stopped", "failed", None)
#: Causes of time that is not productive, in the order of the table.
CAUSES = ("startup", "compile", "restore", "data", "eval", "save", RECOMPUTED, "down", "other")

_FILE_NAME = re.compile(r"(\d{4,})\.json")
_LATEST_TIME = datetime(9999, 1, 1).timestamp()

_log = logging.getLogger("train")  # not __name__, which is "__main__" on the command line


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run: the contents of its file."""

    number: int  # 1, 2, ...: the name of the file
    started_at: float  # time of day when the process was created, in seconds since 1970
    written_at: float  # time of day of the last write
    seconds: Mapping[str, float]  # by phase, without recomputed steps
    first_step: int  # the step that it resumed from; 0 at the beginning
    last_step: int  # the last step that it did
    recomputed_steps: int  # how many of its steps an earlier start had done already
    recomputed_s: float  # seconds that these took
    num_devices: int
    num_processes: int
    ended: str | None  # one of ENDS

    def __post_init__(self):
        times = (self.started_at, self.written_at)
        lengths = (self.recomputed_s, *self.seconds.values())
        counts = (self.first_step, self.last_step, self.recomputed_steps)
        counts = (*counts, self.num_devices, self.num_processes)
        if not all(isinstance(value, int | float) for value in (*times, *lengths)):
            raise ValueError("a time is not a number")
        if not all(0 <= value < _LATEST_TIME for value in (*times, *lengths)):
            raise ValueError("a time is out of range")
        if not all(type(value) is int and value >= 0 for value in counts):
            raise ValueError("a count is not an integer of 0 or more")
        if self.ended not in ENDS:
            raise ValueError(f"ended={self.ended!r} is unknown")

    @property
    def wall_s(self) -> float:
        """Seconds from the creation of the process to the last write."""
        return math.fsum(self.seconds.values()) + self.recomputed_s


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Productive and lost time of a run, in seconds over all its starts."""

    starts: tuple[Attempt, ...]
    total_s: float  # productive_s plus the sum of lost_s
    productive_s: float  # in steps that were done for the first time
    lost_s: Mapping[str, float]  # by cause, all of CAUSES

    @property
    def fraction(self) -> float:
        """The fraction of the time that was productive, from 0 to 1."""
        return self.productive_s / self.total_s if self.total_s else 0.0


class GoodputRecord:
    """Writes the file of this start. Only the first process writes."""

    def __init__(
        self,
        workdir: str | Path,
        phases: Phases,
        *,
        first_step: int,
        num_devices: int,
        num_processes: int,
        is_writer: bool = True,
        time_of_day: Callable[[], float] = time.time,
    ):
        """Take the next free number, and make `phases` count repeated steps as recomputed.

        Args:
            workdir: run's directory; it is created if necessary.
            first_step: step that this start resumes from; 0 at the beginning.
            is_writer: False on all processes except the first.

        Raises:
            OSError: `workdir/goodput` cannot be created or read.
        """
        self._directory = Path(workdir) / GOODPUT_DIRECTORY
        self._phases = phases
        self._is_writer = is_writer
        self._time_of_day = time_of_day
        self._earlier: list[Attempt] = []
        number = 1
        if is_writer:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._earlier = _read_starts(self._directory)
            number = 1 + max(_numbers(self._directory), default=0)
        self._done_before = max((start.last_step for start in self._earlier), default=0)
        phases.count_as_recomputed(range(first_step + 1, self._done_before + 1))
        now = time_of_day()
        self._start = Attempt(
            number=number,
            started_at=max(0.0, now - math.fsum(phases.seconds.values())),
            written_at=now,
            seconds={},
            first_step=first_step,
            last_step=first_step,
            recomputed_steps=0,
            recomputed_s=0.0,
            num_devices=num_devices,
            num_processes=num_processes,
            ended=None,
        )
        self._has_warned = False

    def write(self, last_step: int, ended: str | None = None) -> None:
        """Replace the file atomically. If it cannot be written, log one warning.

        Args:
            ended: one of ENDS; None while the run continues.

        Raises:
            ValueError: `ended` is not one of ENDS.
        """
        seconds = self._phases.seconds
        self._start = dataclasses.replace(
            self._start,
            written_at=self._time_of_day(),
            recomputed_s=seconds.pop(RECOMPUTED),
            seconds=seconds,
            last_step=last_step,
            recomputed_steps=max(0, min(last_step, self._done_before) - self._start.first_step),
            ended=ended,
        )
        if not self._is_writer:
            return
        entry = dataclasses.asdict(self._start)
        path = self._directory / f"{entry.pop('number'):04d}.json"
        try:
            write_text(path, json.dumps(entry, indent=2) + "\n")
        except OSError as error:
            if not self._has_warned:
                _log.warning("%s cannot be written; the run continues without it: %s", path, error)
            self._has_warned = True

    def summary(self) -> Goodput:
        """Return the goodput of the run up to the last `write`.

        Call this on the first process only; the others do not know about earlier starts.
        """
        return _sum([*self._earlier, self._start])


def summarize(workdir: str | Path, on_damaged: Callable[[str], None] = _log.warning) -> Goodput:
    """Return the goodput of the run in `workdir`, over all its starts.

    The time between the last write of a start and the next start counts as "down", unless the run
    had finished. If a start was killed, that includes its time after the last write.

    Args:
        on_damaged: called with a sentence about each record that cannot be read.

    Raises:
        ValueError: `workdir` has no record of a start.
        OSError: it cannot be read.
    """
    directory = Path(workdir) / GOODPUT_DIRECTORY
    starts = _read_starts(directory, on_damaged) if directory.is_dir() else []
    if not starts:
        raise ValueError(
            f"{directory} has no record of a start; give the --workdir of a run that has started"
        )
    return _sum(starts)


def table(goodput: Goodput) -> str:
    """Format a goodput: seconds and percent by cause, then one line per start."""
    lines = [f"goodput {goodput.fraction:.1%} of {goodput.total_s:,.1f} s"]
    lines += ["", f"{'':12}{'seconds':>14}{'percent':>9}"]
    parts_s = {"productive": goodput.productive_s, **goodput.lost_s, "total": goodput.total_s}
    for name, seconds in parts_s.items():
        percent = 100 * seconds / goodput.total_s if goodput.total_s else 0.0
        lines.append(f"{name:12}{seconds:>14,.1f}{percent:>9.1f}")
    lines += ["", f"{'start':7}{'began':21}{'seconds':>12}  {'steps':17}{'again':>6}  on, ended"]
    return "\n".join(lines + [_line(start, goodput.starts[-1]) for start in goodput.starts])


def _line(start: Attempt, last: Attempt) -> str:
    began = datetime.fromtimestamp(start.started_at).strftime("%Y-%m-%d %H:%M:%S")
    steps = f"{start.first_step} to {start.last_step}"
    on = f"{start.num_devices} device(s) of {start.num_processes} process(es)"
    ended = start.ended or ("killed, or running" if start is last else "killed")
    return (
        f"{start.number:04d}   {began:21}{start.wall_s:>12,.1f}  {steps:17}"
        f"{start.recomputed_steps:>6}  {on}, {ended}"
    )


def _sum(starts: Sequence[Attempt]) -> Goodput:
    lost_s: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    for start in starts:
        for name, seconds in start.seconds.items():
            if name != "step":
                lost_s[name if name in NAMES else "other"] += seconds
        lost_s[RECOMPUTED] += start.recomputed_s
    for start, after in zip(starts, starts[1:], strict=False):
        lost_s["down"] += down_s(start, after)
    productive_s = math.fsum(start.seconds.get("step", 0.0) for start in starts)
    total_s = productive_s + math.fsum(lost_s.values())
    return Goodput(starts=tuple(starts), total_s=total_s, productive_s=productive_s, lost_s=lost_s)


def down_s(start: Attempt, after: Attempt) -> float:
    """Return the seconds between two starts in which a run that had not finished did not run."""
    return 0.0 if start.ended == "finished" else max(0.0, after.started_at - start.written_at)


def _numbers(directory: Path) -> list[int]:
    matches = (_FILE_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [int(match[1]) for match in matches if match]


def _read_starts(
    directory: Path, on_damaged: Callable[[str], None] = _log.warning
) -> list[Attempt]:
    """Return the starts ordered by number, without files that cannot be parsed."""
    starts = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):  # left by an interrupted write
            continue
        try:
            match = _FILE_NAME.fullmatch(path.name)
            if match is None:
                raise ValueError("its name is not a number")
            starts.append(Attempt(number=int(match[1]), **read_json(path)))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            on_damaged(f"{path} is ignored, it is not a record of a start: {error}")
    return sorted(starts, key=lambda start: start.number)


@refuses_bad_input()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after printing an error."""
    parser = command_parser("train.goodput")
    parser.add_argument("workdir", type=records_path, help="a run's directory")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", force=True)
    goodput = summarize(args.workdir)
    print(table(goodput))
    return 0


if __name__ == "__main__":
    run_command(main)
