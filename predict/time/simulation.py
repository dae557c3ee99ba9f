"""Simulates a compiled program, instruction by instruction, with estimated times.

Instructions are issued in program order. Kernels run one after another on the compute stream. A
start instruction hands its work to another stream, which runs it as soon as it is free; the
matching done makes the compute stream wait until that work has finished. For example, with an
all-gather of 5 ms and matrix products of 2 ms:

    issued      all-gather-start, product, product, all-gather-done, product

    compute     [ product 2 ][ product 2 ][ wait 1 ][ product 2 ]      7 ms in total,
    all-gather  [ all-gather 5                     ]                   1 ms exposed

A computation is simulated once for each state in which it begins: which streams are still busy, and
for how long. So an iteration of a loop is simulated once, no matter how often it is repeated.

The stages of a pipeline run the same program. They differ only in which branches of a tick they
take: a forward runs on stages that have one in this tick, the head on the last stage, and so on.
Each branch is a loop that runs at most once; ticks.py decides which loops a stage skips. All stages
begin a tick together, because they exchange activations in it, so a tick lasts until its slowest
stage has finished:

    stage 0     [ F ][ idle ]
    stage 1     [ F ][ head ]     the slowest stage of this tick

If kernels wait for an exchange in the middle of a tick, all forwards must have finished before any
backward begins. Forwards then take as long as on the slowest stage, and so do backwards. The
result describes the busiest stage: its own operations, plus the time in each tick that it waits for
the other stages, which is the bubble.
"""

import dataclasses
import math

from pipeline.runtime.layers import LAYERS
from pipeline.runtime.tick_table import TICKS
from predict.program import asynchrony
from predict.program.instruction import (
    Instruction,
    body_of,
    loop_label,
    repeats,
    trip_count,
)
from predict.time.execution import (
    BUBBLE,
    COMPUTE,
    HOST_LANES,
    Busy,
    CollectiveUse,
    Event,
    Execution,
    Repeat,
    Totals,
)
from predict.time.kernel_time import Costs
from predict.time.ticks import (
    PADDING,
    Operations,
    Ticks,
    is_idle,
    kind_of,
    num_layers,
    of_kind,
)


class Simulator:
    """Simulates the computations of a program, each once per state in which it begins.

    Args:
        costs: estimated times of the instructions of a scheduled program.
        ticks: operations of its pipeline stages. If None, every loop that may run once runs.
        expert_load: as for `predict`.
    """

    def __init__(self, costs: Costs, ticks: Ticks | None, expert_load: float = 1.0):
        self.module = costs.module
        self.costs = costs
        self.ticks = ticks
        self.expert_load = expert_load
        self._runs: dict[tuple[str, Busy, Operations | None], Execution] = {}
        self._overlapped = asynchrony.overlapped_starts(self.module)

    def step(self) -> Execution:
        """Simulate the whole program, including work left on streams after the last kernel."""
        run = self.run(self.module.entry, (), None)
        last = max((seconds for _, seconds in run.busy), default=0.0)
        return dataclasses.replace(run, duration_s=run.duration_s + last)

    def run(self, name: str, busy: Busy, operations: Operations | None) -> Execution:
        """Simulate a computation.

        Args:
            name: name of the computation.
            busy: (stream, seconds) for each stream that is busy when it begins.
            operations: operations that the stage runs in this tick; None outside the ticks of a
                pipeline.

        Returns:
            The execution, which is cached.
        """
        key = name, busy, operations
        if key not in self._runs:
            state = _SimulatorState(self, busy, operations)
            for instruction in self.module.computations.get(name, []):
                state.issue(instruction)
            self._runs[key] = state.finish()
        return self._runs[key]

    def tick_s(self, body: str, busy: Busy, stages: tuple[Operations, ...]) -> float:
        """Return the time of a tick in which the stages run these operations."""

        def seconds(operations: Operations) -> float:
            return self.run(body, busy, operations).duration_s

        if not self._exchange_waits(body):
            return max(map(seconds, {*stages}))
        # All forwards, then all backwards: each as long as on the stage with the most layers.
        rest_s = seconds(frozenset())
        kinds = {kind_of(operation) for operations in stages for operation in operations}
        return rest_s + sum(
            max(seconds(of_kind(operations, kind)) for operations in {*stages}) - rest_s
            for kind in kinds
        )

    def _exchange_waits(self, body: str) -> bool:
        """Return whether kernels wait for a permutation at the point where it is issued."""
        return any(
            asynchrony.collective_kind(instruction) == "collective-permute"
            and (
                instruction.name not in self._overlapped
                or asynchrony.is_marked_synchronous(instruction)
            )
            for instruction in self.module.computations.get(body, [])
        )

    def busiest(self, body: str, ticks: Ticks) -> tuple[Operations, ...]:
        """Return the operations in each tick of the stage that has the most work."""

        def work_s(stage: tuple[Operations, ...]) -> float:
            return sum(self.run(body, (), operations).duration_s for operations in stage)

        return max(zip(*ticks.stages, strict=True), key=work_s)


class _SimulatorState:
    """The state of the simulation of one computation."""

    def __init__(self, simulator: Simulator, busy: Busy, operations: Operations | None):
        self.simulator = simulator
        self.operations = operations
        self.now_s = 0.0
        self.totals = Totals()
        self.items: list[Event | Repeat] = []
        self._free_s: dict[str, float] = dict(busy)  # stream -> time at which it is free
        # stream -> (end time, name of the collective or "") of its work, in the order of issue.
        self._given: dict[str, list[tuple[float, str]]] = {
            stream: [(end_s, _INHERITED + stream)] for stream, end_s in busy
        }
        self._pending: dict[str, tuple[str, float]] = {}  # start -> its stream and end time

    def issue(self, instruction: Instruction) -> None:
        """Simulate an instruction."""
        if repeats(instruction):
            self._loop(instruction)
        elif instruction.opcode == "while":
            self._branch(instruction)
        elif instruction.opcode == "conditional":
            runs = [self._run(name) for name in instruction.called]
            self._include(max(runs, key=lambda run: run.duration_s), "")
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
        """Return the execution of the instructions issued so far."""
        return Execution(
            duration_s=self.now_s,
            busy=self._busy(),
            totals=self.totals,
            items=tuple(self.items),
        )

    def _work(self, instruction: Instruction) -> None:
        """Simulate an instruction that does work of its own, as a kernel or on another stream."""
        costs = self.simulator.costs
        collective = asynchrony.wrapped_collective(self.simulator.module, instruction)
        if collective is None and asynchrony.collective_kind(instruction) is not None:
            collective = instruction
        copy = None if collective is not None else asynchrony.host_copy(instruction)
        if collective is not None:
            kind = asynchrony.collective_kind(collective) or ""
            self._start(instruction, kind, costs.collective_s(collective), collective.name)
            if asynchrony.is_marked_synchronous(collective):
                self._wait(instruction.name)
        elif copy is not None:
            self._start(instruction, copy.direction, costs.machine.host_copy_s(copy.bytes), None)
        elif (kernel := costs.kernel(instruction)) is not None:
            self.totals.by_category[kernel.category] += kernel.seconds
            self._append(COMPUTE, kernel.category, instruction.name, self.now_s, kernel.seconds)
            self.now_s += kernel.seconds
            return
        if not asynchrony.is_start(instruction):
            self._wait(instruction.name)

    def _start(
        self, instruction: Instruction, lane: str, seconds: float, collective: str | None
    ) -> None:
        """Hand work to a stream."""
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
        """Make kernels wait for started work, and for everything before it on its stream."""
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

    def _branch(self, loop: Instruction) -> None:
        """Simulate a loop that runs at most once, unless the stage skips it in this tick."""
        if self.operations is None or not is_idle(loop.op_name, self.operations):
            self._include(self._run(body_of(loop)), "")

    def _loop(self, loop: Instruction) -> None:
        """Simulate a loop, with a single iteration if its trip count is unknown."""
        ticks = self.simulator.ticks
        label = loop_label(loop)
        known = trip_count(loop, self.simulator.expert_load)
        count = 1 if known is None else known
        if ticks is not None and label == TICKS and count == len(ticks):
            self._run_ticks(body_of(loop), ticks)
            return
        operations = self.operations
        if label == LAYERS and operations is not None:
            present = num_layers(loop.op_name, operations)
            if present is not None and present < count:
                self._iterate(loop, count - present, operations | {PADDING})
                count = present
        self._iterate(loop, count, operations)

    def _iterate(self, loop: Instruction, count: float, operations: Operations | None) -> None:
        """Simulate iterations of a loop that all run the same operations.

        Args:
            count: number of iterations, which may be a mean.
        """
        body = body_of(loop)
        label = loop_label(loop)
        while count > 0:
            before = self._busy()
            run = self.simulator.run(body, before, operations)
            # If the streams end an iteration in the state in which they began it, all further
            # iterations are equal and need not be simulated.
            times = count if run.busy == before else min(1, count)
            self._include(run, label or "loop", times, loop.name)
            count -= times

    def _run_ticks(self, body: str, ticks: Ticks) -> None:
        """Simulate the ticks of a pipeline on its busiest stage."""
        busiest_ticks = self.simulator.busiest(body, ticks)
        for operations, stages in zip(busiest_ticks, ticks.stages, strict=True):
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

    def _include(self, run: Execution, label: str, times: float = 1, name: str = "") -> None:
        """Append an execution to the instructions simulated so far."""
        if run.items:
            self.items.append(
                Repeat(label=label, name=name, start_s=self.now_s, count=math.ceil(times), run=run)
            )
        self.totals.add(run.totals, times)
        for stream, work in self._given.items():
            # The inner execution waited for work that was started before it, which is the last
            # work on that stream: attribute the exposed time to it.
            inherited = self.totals.collectives.pop(_INHERITED + stream, None)
            if inherited is not None:
                self._expose(stream, work[-1][1], inherited.exposed_s)
        self.now_s += times * run.duration_s
        for stream, left_s in run.busy:
            self._free_s[stream] = self.now_s + left_s

    def _append(self, lane: str, category: str, name: str, start_s: float, seconds: float) -> None:
        self.items.append(
            Event(lane=lane, category=category, name=name, start_s=start_s, duration_s=seconds)
        )


def _stream_of(lane: str) -> str:
    """Return the stream that a lane's work runs on.

    XLA runs collectives one after another on one stream, except permutations (sends and receives),
    which have their own stream. Copies to the host and copies to the device have one stream each.
    """
    if lane == "collective-permute" or lane in HOST_LANES:
        return lane
    return "collectives"


# Prefix that stands for work started before an execution, for which the execution has to wait.
_INHERITED = "before: "
