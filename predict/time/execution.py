"""Data types of a simulated step: events in time, repeated executions, and total times.

A simulated step is a tree: a loop stores one iteration and a count, and the iteration may contain
further loops.
"""

import collections
import dataclasses
import math

#: The lane of kernels, and the category of a pipeline's idle time.
COMPUTE = "compute"
BUBBLE = "bubble"
#: The lanes of copies to and from the host.
HOST_LANES = ("to host", "to device")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A piece of work that runs once.

    Attributes:
        lane: `COMPUTE`, `BUBBLE`, the kind of a collective, "to host" or "to device".
        category: "matmul", "attention" or "other" for kernels; equal to the lane otherwise.
        name: name of the instruction.
        start_s: start, relative to the start of the execution that contains it.
        duration_s: time that it takes.
    """

    lane: str
    category: str
    name: str
    start_s: float
    duration_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """An execution inside another one, repeated without a pause: iterations of a loop, or a branch.

    Attributes:
        label: label of the loop; "" if it is not a loop.
        name: name of the loop's instruction; "" if it is not a loop.
        start_s: start, relative to the start of the execution that contains it.
        count: number of repetitions.
        run: one repetition.
    """

    label: str
    name: str
    start_s: float
    count: int
    run: "Execution"


@dataclasses.dataclass
class CollectiveUse:
    """Total time of one collective of the program.

    Attributes:
        executions: number of executions.
        seconds: time on its stream.
        exposed_s: time for which kernels waited for it.
    """

    executions: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0


@dataclasses.dataclass
class Totals:
    """Total times of one execution or several.

    Attributes:
        by_category: seconds of kernels ("matmul", "attention", "other"), of copies to and from the
            host on their streams ("to host", "to device"), and of the bubble.
        exposed_host_s: time for which kernels waited for copies to or from the host.
        collectives: collectives by the name of their instruction.
    """

    by_category: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    exposed_host_s: float = 0.0
    collectives: dict[str, CollectiveUse] = dataclasses.field(default_factory=dict)

    def add(self, other: "Totals", times: float = 1) -> None:
        """Add `times` times the totals of `other` to these."""
        for category, seconds in other.by_category.items():
            self.by_category[category] += times * seconds
        self.exposed_host_s += times * other.exposed_host_s
        for name, use in other.collectives.items():
            total_use = self.collectives.setdefault(name, CollectiveUse())
            total_use.executions += math.ceil(times * use.executions)
            total_use.seconds += times * use.seconds
            total_use.exposed_s += times * use.exposed_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The simulated execution of a computation.

    Attributes:
        duration_s: time until its last kernel has finished and its last done has returned.
        busy: (stream, seconds) for each stream that stays busy after that.
        totals: times summed over everything that it contains.
        items: its contents, in the order of issue.
    """

    duration_s: float
    busy: "Busy"
    totals: Totals
    items: tuple[Event | Repeat, ...]


Busy = tuple[tuple[str, float], ...]
#: (stream, seconds until it is free) of the streams that are busy, sorted by stream.


def loops_s(run: Execution, label: str) -> list[float]:
    """Return the seconds of each loop with this label, in the order in which the loops begin."""
    seconds_by_name: dict[str, float] = {}

    def add(run: Execution, times: int) -> None:
        for item in run.items:
            if isinstance(item, Repeat) and item.label == label:
                seconds = times * item.count * item.run.duration_s
                seconds_by_name[item.name] = seconds_by_name.get(item.name, 0.0) + seconds
            elif isinstance(item, Repeat):
                add(item.run, times * item.count)

    add(run, 1)
    return [*seconds_by_name.values()]
