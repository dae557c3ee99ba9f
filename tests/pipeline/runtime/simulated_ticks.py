"""An independent simulation of tick programs, which does not know how they were made.

It follows the five phases documented in tick_program.py. Values are names such as ("y",
microbatch, virtual stage). A slot holds one of them, and every operation must find its inputs in
the slots that the program names.
"""

import dataclasses
from collections import defaultdict

import numpy as np

from pipeline.runtime.tick_program import TickProgram, make_tick_program
from pipeline.schedules.table import Schedule

NOTHING = "nothing"  # the value that an idle stage sends


@dataclasses.dataclass
class StoredValue:
    """The value in a slot, and the times of its write and last read."""

    name: object
    written: tuple[int, int]
    last_read: tuple[int, int] = (-1, -1)


class Simulation:
    """Run all stages of a program, tick by tick.

    Attributes:
        log: kind -> [(microbatch, virtual stage, tick)] of all operations that ran.
        stored: (buffer, stage) -> all values that were ever written to a slot.
    """

    def __init__(
        self, program: TickProgram, schedule: Schedule, *, recomputes: bool, shares_vocab: bool
    ):
        self.program = program
        self.placement = schedule.placement
        self.stages = range(schedule.num_stages)
        self.last = len(schedule.placement) - 1
        self.trains = any(op.kind != "F" for _, _, cell in schedule.cells() for op in cell)
        self.recomputes = recomputes
        self.shares_vocab = shares_vocab
        self.keeps = self.trains and not self.recomputes
        self.splits = any(op.kind == "W" for _, _, cell in schedule.cells() for op in cell)
        self.slots: dict[tuple[str, int, int], StoredValue] = {}
        self.stored: dict[tuple[str, int], list[StoredValue]] = defaultdict(list)
        self.log: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self.head: list[int] = []
        self.embedded: list[int] = []
        self.num_ticks = len(program.table.forward.microbatch)
        for tick in range(self.num_ticks):
            self.run_tick(tick)

    def run_tick(self, tick: int) -> None:
        self.tick = tick
        self.phase = 0
        if self.shares_vocab:
            self.embed_together()
        self.phase = 1
        sent = {("F", s): self.forward(s) for s in self.stages}
        self.phase = 2
        if self.shares_vocab:
            self.head_together()
        sent |= {("B", s): self.backward(s) for s in self.stages}
        if self.shares_vocab and self.trains:
            microbatch = self.program.table.embed_gradient.microbatch[self.tick]
            wanted = ("dx", microbatch, 0) if microbatch >= 0 else None
            found = sent["B", self.placement[0]]
            is_first = found != NOTHING and found[2] == 0
            assert (found if is_first else None) == wanted
        self.phase = 3
        for stage in self.stages:
            self.weight_gradient(stage)
        self.phase = 4
        arrival_slots = self.program.table.arrival_slots
        for channel, slots in zip(self.program.channels, arrival_slots, strict=True):
            buffer = {"F": "input", "B": "cotangent"}[channel.kind]
            assert len({s for s, _ in channel.pairs}) == len(channel.pairs)
            assert {(t - s) % len(self.stages) for s, t in channel.pairs} == {channel.shift}
            sources = {target: source for source, target in channel.pairs}
            for stage in self.stages:
                value = sent[channel.kind, sources[stage]] if stage in sources else NOTHING
                slot = slots[self.tick, stage]
                if slot < self.program.num_slots[buffer]:
                    self.write(buffer, stage, slot, value)
                else:
                    assert slot == self.program.num_slots[buffer]  # the slot for unread arrivals

    # Reads and writes of the operations.

    def forward(self, stage: int):
        m, v = self.operation("F", stage)
        if m < 0:
            return NOTHING
        if v > 0 or self.shares_vocab:
            self.read("input", stage, "F", self.input_of(m, v))
        if self.keeps:
            self.put("saved", stage, "F", ("saved", m, v))
            if self.splits:
                self.put("for_weights", stage, "F", ("for_weights", m, v))
        if v == self.last and "head_input" in self.program.num_slots:
            self.put("head_input", stage, "F", ("y", m, v))
        if v == self.last and self.shares_vocab and not self.trains:
            assert self.program.table.head.microbatch[self.tick] == m
            self.head.append(m)
        return ("y", m, v)

    def backward(self, stage: int):
        m, v = self.operation("B", stage)
        if m < 0:
            return NOTHING
        if self.recomputes:
            if v > 0 or self.shares_vocab:
                self.read("input", stage, "B", self.input_of(m, v))
            if self.splits:
                self.put("for_weights", stage, "B", ("for_weights", m, v))
        else:
            self.read("saved", stage, "B", ("saved", m, v))
        if self.splits:
            self.read("for_weights", stage, "B", ("for_weights", m, v))
            self.put("handed", stage, "B", ("handed", m, v))
        if v < self.last:
            self.read("cotangent", stage, "B", ("dx", m, v + 1))
        elif self.shares_vocab:
            assert self.program.table.head.microbatch[self.tick] == m
        elif self.keeps:
            self.read("head_input", stage, "B", ("y", m, v))
        return ("dx", m, v)

    def weight_gradient(self, stage: int) -> None:
        m, v = self.operation("W", stage)
        if m >= 0:
            self.read("for_weights", stage, "W", ("for_weights", m, v))
            self.read("handed", stage, "W", ("handed", m, v))

    def embed_together(self) -> None:
        m = self.program.table.embed.microbatch[self.tick]
        if m >= 0:
            self.embedded.append(m)
            self.put("input", self.placement[0], "F", ("embedding", m))

    def head_together(self) -> None:
        m = self.program.table.head.microbatch[self.tick]
        stage = self.placement[-1]
        if self.trains and m >= 0:
            self.read("head_input", stage, "B", ("y", m, self.last))
            self.head.append(m)

    def input_of(self, m: int, v: int):
        return ("y", m, v - 1) if v else ("embedding", m)

    def operation(self, kind: str, stage: int) -> tuple[int, int]:
        """Return (microbatch, virtual stage) of the cell's operation, after checking its flags."""
        operation = self.program.table.operations[kind]
        cell = {
            name: int(getattr(operation, name)[self.tick, stage])
            for name in ("microbatch", "chunk", "is_first", "is_last")
        }
        if cell["microbatch"] < 0:
            return -1, -1
        own = [v for v, s in enumerate(self.placement) if s == stage]
        v = own[cell["chunk"]]
        assert (cell["is_first"], cell["is_last"]) == (v == 0, v == self.last)
        self.log[kind].append((cell["microbatch"], v, self.tick))
        return cell["microbatch"], v

    # Buffers.

    def put(self, buffer: str, stage: int, kind: str, name) -> None:
        slots = self.program.table.operations[kind].slots
        slot = int(getattr(slots, buffer)[self.tick, stage])
        self.write(buffer, stage, slot, name)

    def write(self, buffer: str, stage: int, slot: int, name) -> None:
        assert 0 <= slot < self.program.num_slots[buffer], (buffer, slot)
        stored = StoredValue(name, (self.tick, self.phase))
        self.slots[buffer, stage, slot] = stored
        self.stored[buffer, stage].append(stored)

    def read(self, buffer: str, stage: int, kind: str, wanted) -> None:
        slots = self.program.table.operations[kind].slots
        slot = int(getattr(slots, buffer)[self.tick, stage])
        stored = self.slots.get((buffer, stage, slot))
        where = f"{kind} on stage {stage} in tick {self.tick}: {buffer}[{slot}]"
        assert stored is not None and stored.name == wanted, where
        stored.last_read = self.tick, self.phase

    def most_held(self, buffer: str) -> int:
        """Return the largest number of a stage's values that are needed in one phase."""
        times = [(tick, phase) for tick in range(self.num_ticks) for phase in range(5)]
        most = 0
        for stage in self.stages:
            stage_values = self.stored.get((buffer, stage), [])
            for time in times:
                most = max(most, sum(h.written <= time <= h.last_read for h in stage_values))
        return most


def simulate(schedule: Schedule, *, recomputes=True, shares_vocab=False) -> Simulation:
    """Run a program, and check everything that it promises."""
    program = make_tick_program(schedule, recomputes=recomputes, shares_vocab=shares_vocab)
    ran = Simulation(program, schedule, recomputes=recomputes, shares_vocab=shares_vocab)
    last = len(schedule.placement) - 1
    folds = ran.trains and recomputes and not shares_vocab
    assert program.splits_backward == ran.splits
    # Every operation runs once, in the order of the table without the ticks that folding emptied.
    kinds = {"F": "F", "B": "B", "I": "B", "W": "W"}
    wanted: list[list[tuple[str, int, int]]] = []
    for tick, _ in enumerate(schedule.ticks):
        ops = [
            (kinds[kind], m, v) for (kind, m, v), when in schedule.when().items() if when == tick
        ]
        ops = [op for op in ops if not (folds and op[0] == "F" and op[2] == last)]
        if ops or not folds:
            wanted.append(sorted(ops))
    found: list[list[tuple[str, int, int]]] = [[] for _ in range(ran.num_ticks)]
    for kind, ops in ran.log.items():
        for m, v, tick in ops:
            found[tick].append((kind, m, v))
    assert [sorted(ops) for ops in found] == wanted
    # Every stored value is read, and every slot is needed by some stage.
    assert all(
        stored.last_read >= stored.written
        for stage_values in ran.stored.values()
        for stored in stage_values
    )
    assert program.num_slots == {buffer: ran.most_held(buffer) for buffer in program.num_slots}
    assert {buffer for buffer, _ in ran.stored} == {
        b for b, count in program.num_slots.items() if count
    }
    # If all stages share embedding and head, these run once per microbatch.
    microbatches = list(range(schedule.num_microbatches)) if shares_vocab else []
    assert sorted(ran.embedded) == sorted(ran.head) == microbatches
    gradients = sorted(m for m in program.table.embed_gradient.microbatch if m >= 0)
    assert gradients == (microbatches if ran.trains else [])
    # Branches that the executor resolves during tracing.
    for kind, operation in program.table.operations.items():
        cells = [
            operation.microbatch[t, s] >= 0
            for t, s in np.ndindex(ran.num_ticks, schedule.num_stages)
        ]
        assert operation.always == (True if all(cells) else None if any(cells) else False)
        for always, wanted_stage in (
            (operation.always_first, 0),
            (operation.always_last, last),
        ):
            flags = {v == wanted_stage for _, v, _ in ran.log[kind]}
            if flags:
                assert always == (flags.pop() if len(flags) == 1 else None)
    return ran
