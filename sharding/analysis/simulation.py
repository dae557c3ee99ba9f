"""A compiled program run by its estimated times, instruction by instruction.

The instructions are in the order in which they are issued. Kernels run one after another. A start
gives its work to a stream, which runs it when it is free; the matching done makes the kernels wait
until it has ended. Example, with an all-gather of 5 ms and two products of 2 ms:

    all-gather-start  |  product  |  product  |  all-gather-done  |  product
    kernels           [ product 2 ][ product 2 ][ wait 1 ]          [ product 2 ]    7 ms in all,
    all-gather        [ all-gather 5                     ]                           1 ms exposed

A computation is run once for each state in which it begins: which streams are still busy, and for
how long. An iteration of a loop therefore costs one run, however often it is repeated.

A pipeline's stages run one program, and differ by the conditionals of a tick: the forward runs
where a stage has one, the head on the last stage, and so on. All stages begin a tick together,
since they exchange activations in it, so a tick takes as long as the stage that does most in it.
Where an exchange holds up the kernels in the middle of a tick, forwards must all have ended before
any backward begins, so the tick takes as long as for a stage that does what any stage does.
What is reported is the busiest stage: its own operations, and in each tick the wait for the others,
the bubble.
"""

import collections
import dataclasses
import re

import numpy as np

from sharding.analysis import asynchrony, hlo
from sharding.analysis.kernel_time import Costs
from sharding.pipeline.runtime.buffers import ExecutionPlan
from sharding.pipeline.runtime.executor import TICKS, scope_of

#: The lane of kernels, and that of a pipeline's idle time.
COMPUTE = "compute"
BUBBLE = "bubble"
#: Those of copies to and from the host.
HOST_LANES = ("to host", "to device")
#: What one stage runs in one tick: "F", "B", "W", flags that hold for these, such as "B.is_last",
#: and names of `ExecutionPlan.shared`.
Operations = frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that runs once.

    Attributes:
      lane: `COMPUTE`, `BUBBLE`, the kind of a collective, "to host" or "to device".
      category: "matmul", "attention" or "other" of a kernel, else the lane.
      name: the instruction's.
      start_s: since the start of the run that it belongs to.
    """

    lane: str
    category: str
    name: str
    start_s: float
    duration_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """A run inside another, several times without a pause: a loop's iterations, or a branch.

    Attributes:
      label: of the loop; "" for what is no loop.
      start_s: since the start of the run that it belongs to.
    """

    label: str
    start_s: float
    count: int
    run: "Execution"


@dataclasses.dataclass
class CollectiveUse:
    """What one collective of the program adds up to.

    Attributes:
      executions: how often it runs.
      seconds: on its stream.
      exposed_s: for which kernels waited.
    """

    executions: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0


@dataclasses.dataclass
class Totals:
    """Seconds of a run, or of several.

    Attributes:
      by_category: of kernels ("matmul", "attention", "other"), of copies to and from the host on
        their streams ("to host", "to device"), and of the bubble.
      exposed_host_s: for which kernels waited for copies to or from the host.
      collectives: by the name of the instruction.
    """

    by_category: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    exposed_host_s: float = 0.0
    collectives: dict[str, CollectiveUse] = dataclasses.field(default_factory=dict)

    def add(self, other: "Totals", times: int = 1) -> None:
        """Adds other totals so many times."""
        for category, seconds in other.by_category.items():
            self.by_category[category] += times * seconds
        self.exposed_host_s += times * other.exposed_host_s
        for name, use in other.collectives.items():
            own = self.collectives.setdefault(name, CollectiveUse())
            own.executions += times * use.executions
            own.seconds += times * use.seconds
            own.exposed_s += times * use.exposed_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """A computation that ran.

    Attributes:
      duration_s: until its last kernel has ended and its last done has returned.
      busy: (stream, seconds) for which streams are busy after that.
      items: what ran, in the order of issue.
    """

    duration_s: float
    busy: "Busy"
    totals: Totals
    items: tuple[Event | Repeat, ...]


Busy = tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticks:
    """What the stages of a pipeline run in each tick.

    Attributes:
      stages: tick -> stage -> operations.
    """

    stages: tuple[tuple[Operations, ...], ...]

    @classmethod
    def of_plan(cls, plan: ExecutionPlan) -> "Ticks":
        """Returns those of a plan."""
        runs: dict[str, np.ndarray] = {}
        for kind in "FBW":
            runs[kind] = plan.tables[f"{kind}.microbatch"] >= 0
            for flag in ("is_first", "is_last"):
                runs[f"{kind}.{flag}"] = runs[kind] & (plan.tables[f"{kind}.{flag}"] > 0)
        num_ticks, num_stages = runs["F"].shape
        for name, row in plan.shared.items():  # all stages together
            runs[name] = np.repeat((row >= 0)[:, None], num_stages, axis=1)

        def cell(tick: int, stage: int) -> Operations:
            return frozenset(name for name, table in runs.items() if table[tick, stage])

        stages = range(num_stages)
        return cls(stages=tuple(tuple(cell(tick, s) for s in stages) for tick in range(num_ticks)))

    def __len__(self) -> int:
        return len(self.stages)


class Simulator:
    """Runs a program's computations, each once for each state in which it begins.

    Args:
      module: the scheduled program.
      costs: of its instructions.
      ticks: of its pipeline; None makes every conditional take the longer branch, always.
    """

    def __init__(self, module: hlo.Module, costs: Costs, ticks: Ticks | None):
        self.module, self.costs, self.ticks = module, costs, ticks
        self._runs: dict[tuple[str, Busy, Operations | None], Execution] = {}
        self._overlapped = asynchrony.overlapped(module)

    def step(self) -> Execution:
        """Returns the run of the whole program; what streams do after its last kernel counts."""
        run = self.run(self.module.entry, (), None)
        last = max((seconds for _, seconds in run.busy), default=0.0)
        return dataclasses.replace(run, duration_s=run.duration_s + last)

    def run(self, name: str, busy: Busy, operations: Operations | None) -> Execution:
        """Returns the run of a computation.

        Args:
          name: the computation's.
          busy: (stream, seconds) for which streams are busy when it begins.
          operations: what the stage runs in the tick; None outside a pipeline's ticks.
        """
        key = name, busy, operations
        if key not in self._runs:
            state = _SimulatorState(self, busy, operations)
            for instruction in self.module.computations.get(name, []):
                state.issue(instruction)
            self._runs[key] = state.finish()
        return self._runs[key]

    def tick_s(self, body: str, busy: Busy, stages: tuple[Operations, ...]) -> float:
        """Returns the time of a tick in which the stages run these operations."""
        if self._exchange_waits(body):
            return self.run(body, busy, frozenset().union(*stages)).duration_s
        return max(self.run(body, busy, operations).duration_s for operations in {*stages})

    def _exchange_waits(self, body: str) -> bool:
        """Returns whether kernels wait for a permutation where it is issued."""
        return any(
            asynchrony.collective_kind(instruction) == "collective-permute"
            and (
                instruction.name not in self._overlapped
                or asynchrony.is_marked_synchronous(instruction)
            )
            for instruction in self.module.computations.get(body, [])
        )

    def busiest(self, body: str, ticks: Ticks) -> tuple[Operations, ...]:
        """Returns what the stage with the most work runs in each tick."""

        def work_s(stage: tuple[Operations, ...]) -> float:
            return sum(self.run(body, (), operations).duration_s for operations in stage)

        return max(zip(*ticks.stages, strict=True), key=work_s)


class _SimulatorState:
    """A computation as it runs."""

    def __init__(self, simulator: Simulator, busy: Busy, operations: Operations | None):
        self.simulator, self.operations = simulator, operations
        self.now_s = 0.0
        self.totals = Totals()
        self.items: list[Event | Repeat] = []
        self._free_s: dict[str, float] = dict(busy)  # stream -> when it is free
        # stream -> (when it ends, what it is) of what it was given, in order.
        self._given: dict[str, list[tuple[float, str]]] = {
            stream: [(end_s, _INHERITED + stream)] for stream, end_s in busy
        }
        self._pending: dict[str, tuple[str, float]] = {}  # start -> its stream, and when it ends

    def issue(self, instruction: hlo.Instruction) -> None:
        """Runs an instruction."""
        if instruction.opcode == "while":
            self._loop(instruction)
        elif instruction.opcode == "conditional":
            self._include(self._branch(instruction), "")
        elif instruction.opcode == "call":
            for name in instruction.called:
                self._include(self._run(name), "")
        elif asynchrony.is_done(instruction):
            for name in instruction.operands:
                self._wait(name)
        elif instruction.opcode.endswith("-update"):
            for name in instruction.operands:
                if name in self._pending:
                    self._pending[instruction.name] = self._pending[name]
        else:
            self._work(instruction)

    def finish(self) -> Execution:
        """Returns what ran."""
        busy = {stream: free_s - self.now_s for stream, free_s in self._free_s.items()}
        return Execution(
            duration_s=self.now_s,
            busy=tuple(sorted((stream, left_s) for stream, left_s in busy.items() if left_s > 0)),
            totals=self.totals,
            items=tuple(self.items),
        )

    def _work(self, instruction: hlo.Instruction) -> None:
        """Runs an instruction with work of its own: on a stream, or as a kernel."""
        costs = self.simulator.costs
        collective = asynchrony.wrapped_collective(self.simulator.module, instruction)
        if collective is None and asynchrony.collective_kind(instruction) is not None:
            collective = instruction
        copy = None if collective is not None else asynchrony.host_copy(instruction)
        if collective is not None:
            transfer = costs.collective(collective)
            self._start(instruction, transfer.kind, transfer.seconds, collective.name)
            if asynchrony.is_marked_synchronous(collective):
                self._wait(instruction.name)
        elif copy is not None:
            self._start(instruction, copy.direction, costs.host_copy_s(copy), None)
        elif (kernel := costs.kernel(instruction)) is not None:
            self.totals.by_category[kernel.category] += kernel.seconds
            self._append(COMPUTE, kernel.category, instruction.name, self.now_s, kernel.seconds)
            self.now_s += kernel.seconds
            return
        if not asynchrony.is_start(instruction):
            self._wait(instruction.name)

    def _start(
        self, instruction: hlo.Instruction, lane: str, seconds: float, collective: str | None
    ) -> None:
        """Gives work to a stream."""
        stream = _stream_of(lane)
        start_s = max(self.now_s, self._free_s.get(stream, 0.0))
        self._free_s[stream] = start_s + seconds
        self._pending[instruction.name] = (stream, start_s + seconds)
        self._given.setdefault(stream, []).append((start_s + seconds, collective or ""))
        if collective is None:
            self.totals.by_category[lane] += seconds
        else:
            use = self.totals.collectives.setdefault(collective, CollectiveUse())
            use.executions += 1
            use.seconds += seconds
        self._append(lane, lane, instruction.name, start_s, seconds)

    def _wait(self, name: str) -> None:
        """Lets kernels wait for what was started, and for all that its stream does first."""
        if name not in self._pending:
            return
        stream, until_s = self._pending[name]
        for end_s, collective in self._given[stream]:
            if self.now_s < end_s <= until_s:
                self._expose(stream, collective, end_s - self.now_s)
                self.now_s = end_s

    def _expose(self, stream: str, collective: str, seconds: float) -> None:
        if stream in HOST_LANES:
            self.totals.exposed_host_s += seconds
        else:
            use = self.totals.collectives.setdefault(collective, CollectiveUse())
            use.exposed_s += seconds

    def _branch(self, conditional: hlo.Instruction) -> Execution:
        """Returns the run of the branch that is taken: the longer one, or in a tick, a stage's."""
        runs = [self._run(name) for name in conditional.called]
        operation = _OPERATION.search(conditional.op_name)
        is_idle = (
            self.operations is not None
            and operation is not None
            and operation[1] not in self.operations
        )
        return (min if is_idle else max)(runs, key=lambda run: run.duration_s)

    def _loop(self, loop: hlo.Instruction) -> None:
        """Runs a loop, once if XLA does not know how often it runs."""
        body, ticks = hlo.body_of(loop), self.simulator.ticks
        label, count = hlo.loop_label(loop), hlo.trip_count(loop) or 1
        if ticks is not None and label == TICKS and count == len(ticks):
            self._run_ticks(body, ticks)
            return
        while count:
            before, run = self._busy(), self._run(body)
            # Once the streams are at the end as they were at the start, nothing changes any more.
            times = count if run.busy == before else 1
            self._include(run, label or "loop", times)
            count -= times

    def _run_ticks(self, body: str, ticks: Ticks) -> None:
        """Runs a pipeline's ticks as the busiest stage does."""
        own = self.simulator.busiest(body, ticks)
        for operations, stages in zip(own, ticks.stages, strict=True):
            tick_s = self.simulator.tick_s(body, self._busy(), stages)
            run = self.simulator.run(body, self._busy(), operations)
            self._include(run, TICKS)
            idle_s = tick_s - run.duration_s
            if idle_s > 0:
                self.totals.by_category[BUBBLE] += idle_s
                self._append(BUBBLE, BUBBLE, "waits for other stages", self.now_s, idle_s)
                self.now_s += idle_s

    def _run(self, name: str) -> Execution:
        return self.simulator.run(name, self._busy(), self.operations)

    def _busy(self) -> Busy:
        busy = ((stream, free_s - self.now_s) for stream, free_s in self._free_s.items())
        return tuple(sorted((stream, left_s) for stream, left_s in busy if left_s > 0))

    def _include(self, run: Execution, label: str, times: int = 1) -> None:
        """Lets a run follow what ran so far."""
        if run.items:
            self.items.append(Repeat(label=label, start_s=self.now_s, count=times, run=run))
        self.totals.add(run.totals, times)
        for stream, given in self._given.items():
            # What the run waited for, but did not start, is the last that the stream was given.
            inherited = self.totals.collectives.pop(_INHERITED + stream, None)
            if inherited is not None:
                self._expose(stream, given[-1][1], inherited.exposed_s)
        self.now_s += times * run.duration_s
        for stream, left_s in run.busy:
            self._free_s[stream] = self.now_s + left_s

    def _append(self, lane: str, category: str, name: str, start_s: float, seconds: float) -> None:
        self.items.append(
            Event(lane=lane, category=category, name=name, start_s=start_s, duration_s=seconds)
        )


def _stream_of(lane: str) -> str:
    """Returns the stream of a lane.

    XLA runs collectives one after another on one stream, except permutations (sends and receives),
    which have their own. Copies in either direction have one each.
    """
    if lane == "collective-permute" or lane in HOST_LANES:
        return lane
    return "collectives"


# Stands for a collective that was started outside of a run, and delays what the run starts.
_INHERITED = "before: "
_OPERATION = re.compile(rf"\b{scope_of('')}([\w.]+)/cond$")
