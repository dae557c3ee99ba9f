"""Tick programs: a schedule with a buffer slot for every value that must wait, ready to run.

A schedule (schedules/table.py) says which operations each stage runs in each tick. Its
`TickProgram` adds where the values are: the buffer slots that each operation reads and writes,
and the channels through which stages exchange values after a tick.

The compiled step (executor.py) is one program for all stages. In every tick it looks up in the
program's integer arrays which microbatch and chunk to work on and which buffer slots to read and
write. This module is pure Python and NumPy.

A tick has five phases, in this order: embed, forward, backward (or input gradient), weight
gradient, arrival. A value occupies a slot of its buffer from the phase that writes it to the last
phase that reads it, and two values may share a slot if these lifetimes do not overlap. The buffers,
each with one value per chunk and microbatch:

- `input`: input of the chunk; arrives from the stage of the previous virtual stage. The model's
  first chunk has none, because it embeds its microbatch itself, unless all stages embed together.
- `cotangent`: gradient of the chunk's output; arrives from the stage of the next virtual stage.
- `saved`: residuals that the backward of the chunk's layers reads.
- `for_weights`: the residuals that the weight gradient reads too, if backwards are split.
- `handed`: values that the input gradient hands over to the weight gradient.
- `head_input`: output of the model's last chunk.

For example, `saved` on stage 0 of 1F1B with 2 stages and 5 microbatches, whose backwards recompute
nothing:

    tick       0      1      2      3      4      5      6
    stage 0    F0     F1     F2 B0  F3 B1  F4 B2  B3     B4

    slot 0     |---- m0 -----|      |---- m3 -----|
    slot 1            |---- m1 -----|      |---- m4 -----|
    slot 2                   |---- m2 -----|

    forward.slots.saved     0      1      2      0      1      .      .      slot that F writes
    backward.slots.saved    .      .      0      1      2      0      1      slot that B reads

m0 is read in B0 of tick 2, after F2 has written m2, so m2 needs a third slot. m3 reuses slot 0 in
tick 3. Three slots suffice for any number of microbatches.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from pipeline.runtime.tick_table import (
    BufferSlots,
    Channel,
    ChunkOperation,
    SharedOperation,
    TickTable,
)
from pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Schedule,
)

#: The kinds of operations that the executor knows.
_KINDS = (FORWARD, BACKWARD, WEIGHT_GRADIENT)
#: The phases of a tick in order. An input gradient (I) runs in the phase of BACKWARD.
_PHASES = {"embed": 0, FORWARD: 1, BACKWARD: 2, WEIGHT_GRADIENT: 3, "arrive": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TickProgram:
    """A schedule, ready to be executed.

    Attributes:
        table: operations of each stage in each tick; its leaves are `int32[ticks, stages]`, and
            `int32[ticks]` for work that all stages do together.
        num_slots: buffer -> number of slots.
        channels: collective permutes of a tick.
        num_microbatches: number of microbatches, M.
        first_stage: stage of the first virtual stage.
        last_stage: stage of the last virtual stage.
        splits_backward: whether backwards run as input gradient and weight gradient.
        recomputes: whether a chunk's forward runs again in its backward.
        shares_vocab: whether all stages compute embedding and head together.
        unrolls: whether layers run without a loop.
    """

    table: TickTable
    num_slots: dict[str, int]
    channels: tuple[Channel, ...]
    num_microbatches: int
    first_stage: int
    last_stage: int
    splits_backward: bool
    recomputes: bool
    shares_vocab: bool
    unrolls: bool

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.table.forward.microbatch.shape[1]

    @property
    def is_skewed(self) -> bool:
        """Whether an iteration runs the forwards of a tick after the backwards of the one before.

        Not if backwards are split: weight gradients hide the sends, and fill bubbles tick by tick.
        """
        trains = self.table.backward.always is not False
        return trains and self.num_stages > 1 and not self.splits_backward

    @property
    def can_unroll(self) -> bool:
        """Whether layers can run without a loop.

        Chunks of several layers would share a program in which a layer's number is a value, and
        several microbatches whose residuals wait at the same time would need buffers.
        """
        has_one_chunk = self.num_stages == 1 and not self.table.backward.chunk.any()
        return has_one_chunk and not self.splits_backward and self.num_slots.get("saved", 1) == 1

    @property
    def iterations(self) -> TickTable:
        """The table as the loop runs it, one row per iteration."""
        if not self.is_skewed:
            return self.table
        buffers = {FORWARD: "input", BACKWARD: "cotangent"}
        unread = [self.num_slots[buffers[channel.kind]] for channel in self.channels]
        return self.table.skewed(unread)


def make_tick_program(
    schedule: Schedule,
    *,
    recomputes: bool = True,
    shares_vocab: bool = False,
    unrolls: bool = False,
) -> TickProgram:
    """Return the tick program of a verified schedule.

    Args:
        schedule: table that `verify` accepts.
        recomputes: whether only a chunk's input is kept, and its backward runs the forward again
            (`stage` in `train.remat`). Nothing needs the output of the model's last chunk before
            its backward, so that forward runs only as a part of the backward. Otherwise, the
            residuals of the layers are kept.
        shares_vocab: all stages compute embedding and head together. The head then runs between the
            last chunk's forward and backward, so that forward is not folded.
        unrolls: layers run without a loop (layers.py); only if `can_unroll`.

    Raises:
        ValueError: the table splits some backwards but not others.
    """
    if schedule.splits_backward() and any(kind == BACKWARD for kind, _, _ in schedule.when()):
        raise ValueError(
            f"schedule {schedule.name} has whole backwards (B) and split ones (I, W); a table must "
            "split all of them or none"
        )
    program = _ProgramBuilder(schedule, recomputes, shares_vocab).build()
    assert program.can_unroll or not unrolls
    return dataclasses.replace(program, unrolls=unrolls)


class _ProgramBuilder:
    """Builds the program of one schedule: first tables of operations, then slots, then channels."""

    def __init__(self, schedule: Schedule, recomputes: bool, shares_vocab: bool):
        self.schedule = schedule
        self.shares_vocab = shares_vocab
        self.trains = schedule.has_backward()
        self.splits = schedule.splits_backward()
        self.recomputes = recomputes and self.trains
        self.folds = self.recomputes and not shares_vocab
        self.last = len(schedule.placement) - 1
        # The executor knows three kinds: an input gradient takes the place of a whole backward.
        kinds = {INPUT_GRADIENT: BACKWARD}
        self.when = {(kinds.get(k, k), m, v): t for (k, m, v), t in schedule.when().items()}
        self.shape = (len(schedule.ticks), schedule.num_stages)
        #: Kind -> field of `ChunkOperation` -> table.
        self.cells: dict[str, dict[str, np.ndarray]] = {}
        #: Kind -> buffer -> table of slots.
        self.slot_tables: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _KINDS}
        self.num_slots: dict[str, int] = {}
        #: (buffer, microbatch, virtual stage) -> slot.
        self.slots: dict[tuple[str, int, int], int] = {}

    def build(self) -> TickProgram:
        for kind in _KINDS:
            self.cells[kind] = self._cells(kind)
        self._allocate_all()
        channels, arrival_slots = self._channels()
        # Folding the last chunk's forward into its backward can leave a tick empty; drop it.
        microbatches = [cells["microbatch"] for cells in self.cells.values()]
        works = (np.stack(microbatches) >= 0).any(axis=(0, 2))

        def operation(kind: str) -> ChunkOperation:
            cells = {name: table[works] for name, table in self.cells[kind].items()}
            slots = {name: table[works] for name, table in self.slot_tables[kind].items()}
            runs = cells["microbatch"] >= 0
            return ChunkOperation(
                kind=kind,
                **cells,
                slots=BufferSlots(**slots),
                always=_same(runs),
                always_first=_same(cells["is_first"][runs] > 0),
                always_last=_same(cells["is_last"][runs] > 0),
            )

        def shared(name: str, kind: str, virtual_stage: int) -> SharedOperation:
            microbatch = self._shared_microbatches(kind, virtual_stage)[works]
            return SharedOperation(name=name, microbatch=microbatch)

        table = TickTable(
            forward=operation(FORWARD),
            backward=operation(BACKWARD),
            weight_gradient=operation(WEIGHT_GRADIENT),
            arrival_slots=tuple(slots[works] for slots in arrival_slots),
            embed=shared("embed", FORWARD, 0),
            head=shared("head", BACKWARD if self.trains else FORWARD, self.last),
            embed_gradient=shared("embed_gradient", BACKWARD, 0),
        )
        return TickProgram(
            table=table,
            num_slots=self.num_slots,
            channels=tuple(channels),
            num_microbatches=self.schedule.num_microbatches,
            first_stage=self.schedule.placement[0],
            last_stage=self.schedule.placement[-1],
            splits_backward=self.splits,
            recomputes=self.recomputes,
            shares_vocab=self.shares_vocab,
            unrolls=False,
        )

    def _cells(self, kind: str) -> dict[str, np.ndarray]:
        """Return the fields of `ChunkOperation` except its slots, for all cells of one kind."""
        names = ("microbatch", "chunk", "is_first", "is_last")
        tables = {name: np.zeros(self.shape, np.int32) for name in names}
        tables["microbatch"] -= 1
        for (k, m, v), tick in self.when.items():
            if k == kind and not (k == FORWARD and v == self.last and self.folds):
                cell = tick, self.schedule.placement[v]
                tables["microbatch"][cell] = m
                tables["chunk"][cell] = self.schedule.chunk_of(v)
                tables["is_first"][cell] = v == 0
                tables["is_last"][cell] = v == self.last
        return tables

    def _allocate_all(self) -> None:
        every = range(self.last + 1)
        first_arrival = 0 if self.shares_vocab else 1
        readers = (FORWARD, BACKWARD) if self.recomputes else (FORWARD,)
        # Without shares_vocab, the first chunk's input is recomputed from the batch when needed.
        self._allocate("input", every[first_arrival:], self._input_written, readers)
        if not self.trains:
            return
        self._allocate("cotangent", every[:-1], self._cotangent_written, (BACKWARD,))
        if not self.recomputes:
            self._allocate("saved", every, FORWARD, (BACKWARD,))
        if not self.folds:
            self._allocate("head_input", every[-1:], FORWARD, (BACKWARD,))
        if self.splits:
            # If the backward recomputes the forward, residuals exist only from then on.
            start = BACKWARD if self.recomputes else FORWARD
            self._allocate("for_weights", every, start, (BACKWARD, WEIGHT_GRADIENT))
            self._allocate("handed", every, BACKWARD, (WEIGHT_GRADIENT,))

    def _input_written(self, m: int, v: int) -> int:
        if v == 0:
            return self._time("embed", self.when[FORWARD, m, 0])
        return self._time("arrive", self.when[FORWARD, m, v - 1])

    def _cotangent_written(self, m: int, v: int) -> int:
        return self._time("arrive", self.when[BACKWARD, m, v + 1])

    def _time(self, phase: str, tick: int) -> int:
        return len(_PHASES) * tick + _PHASES[phase]

    def _allocate(
        self,
        buffer: str,
        virtual_stages: Iterable[int],
        written: str | Callable[[int, int], int],
        readers: tuple[str, ...],
    ) -> None:
        """Assign a slot to every value of a buffer.

        Args:
            buffer: name of the buffer.
            virtual_stages: virtual stages whose values it holds.
            written: kind of operation that writes a value, or (microbatch, virtual stage) ->
                time.
            readers: kinds of operations that read it.
        """
        # Values that arrive are written to the slots that `_channels` returns.
        users = tuple(dict.fromkeys((written, *readers))) if isinstance(written, str) else readers
        for kind in users:
            self.slot_tables[kind][buffer] = np.zeros(self.shape, np.int32)
        lifetimes: dict[int, list[tuple[int, int, int, int]]] = {}
        for v in virtual_stages:
            for m in range(self.schedule.num_microbatches):
                if isinstance(written, str):
                    start = self._time(written, self.when[written, m, v])
                else:
                    start = written(m, v)
                stop = max(self._time(kind, self.when[kind, m, v]) for kind in readers)
                lifetimes.setdefault(self.schedule.placement[v], []).append((start, stop, m, v))
        self.num_slots[buffer] = 0
        for stage, stage_lifetimes in lifetimes.items():
            slots = _assign_slots(stage_lifetimes)
            self.num_slots[buffer] = max(self.num_slots[buffer], 1 + max(slots.values()))
            for (m, v), slot in slots.items():
                self.slots[buffer, m, v] = slot
                for kind in users:
                    self.slot_tables[kind][buffer][self.when[kind, m, v], stage] = slot

    def _channels(self) -> tuple[list[Channel], list[np.ndarray]]:
        """Return every channel, and for each the table of slots for arriving values."""
        channels: list[Channel] = []
        arrival_slots: list[np.ndarray] = []
        for kind, step, buffer in ((FORWARD, 1, "input"), (BACKWARD, -1, "cotangent")):
            if kind == BACKWARD and not self.trains:
                continue
            for shift, virtual_stages in sorted(self._moves(step).items()):
                # The default is one slot past the end, for arrivals that nobody reads.
                slots = np.full(self.shape, self.num_slots[buffer], np.int32)
                pairs = set()
                for v in virtual_stages:
                    target = self.schedule.placement[v + step]
                    pairs.add((self.schedule.placement[v], target))
                    for m in range(self.schedule.num_microbatches):
                        slots[self.when[kind, m, v], target] = self.slots[buffer, m, v + step]
                channels.append(Channel(kind=kind, shift=shift, pairs=tuple(sorted(pairs))))
                arrival_slots.append(slots)
        return channels, arrival_slots

    def _moves(self, step: int) -> dict[int, list[int]]:
        """Return shift -> the virtual stages whose outputs move by it.

        Args:
            step: 1 for activations, which go to the next virtual stage; -1 for cotangents.
        """
        moves: dict[int, list[int]] = {}
        for v in range(self.last + 1):
            if 0 <= v + step <= self.last:
                source = self.schedule.placement[v]
                target = self.schedule.placement[v + step]
                shift = (target - source) % self.schedule.num_stages
                moves.setdefault(shift, []).append(v)
        return moves

    def _shared_microbatches(self, kind: str, virtual_stage: int) -> np.ndarray:
        """Return int32[ticks], the microbatch whose operation runs there, or -1."""
        microbatches = np.full(self.shape[0], -1, np.int32)
        for (k, m, v), tick in self.when.items():
            if self.shares_vocab and k == kind and v == virtual_stage:
                microbatches[tick] = m
        return microbatches


def _same(holds: np.ndarray) -> bool | None:
    """Return the common value of all elements, or None if they differ."""
    return True if holds.all() else False if not holds.any() else None


def _assign_slots(lifetimes: list[tuple[int, int, int, int]]) -> dict[tuple[int, int], int]:
    """Assign a slot to every (start, stop, microbatch, virtual stage).

    Values are taken in order of their start, and each gets the first slot whose last value is no
    longer needed. For intervals this greedy rule uses the smallest possible number of slots.
    """
    slots: dict[tuple[int, int], int] = {}
    last_used: list[int] = []  # per slot: the time of its last read
    for start, stop, m, v in sorted(lifetimes):
        slot = next((i for i, time in enumerate(last_used) if time < start), len(last_used))
        last_used[slot : slot + 1] = [stop]  # replaces the entry, or appends a new slot
        slots[m, v] = slot
    return slots
