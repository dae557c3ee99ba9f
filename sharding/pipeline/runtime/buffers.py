"""A schedule's table as arrays that a program can look up, with a buffer slot for everything kept.

Pure Python and NumPy; sharding/pipeline/runtime/executor.py runs what is planned here.

A tick has five phases, in this order: embedding, forward, backward (or its half for the gradient
of the input), weight gradient, arrival. What an operation leaves for a later one lies in a slot of
a buffer from the phase that writes it to the last one that reads it; two things may share a slot
if these times do not overlap. The buffers, and what they hold for a chunk and a microbatch:

- `input`: what the chunk takes in; it arrives from the stage of the chunk before;
- `cotangent`: the gradient of what the chunk gave out; it arrives from that of the chunk after;
- `saved`: what the layers' backward reads, from the forward on;
- `for_weights`: the part of it that the weight gradient reads too, where the backward is split;
- `handed`: what the input gradient leaves for the weight gradient;
- `head_input`: what the last chunk gave out.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from sharding.pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Schedule,
)

_PHASES = {"embed": 0, FORWARD: 1, BACKWARD: 2, WEIGHT_GRADIENT: 3, "arrive": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channel:
    """One permutation of a tick: what operations of this kind give out moves by `shift` stages.

    Attributes:
      kind: FORWARD (activations) or BACKWARD (cotangents).
      shift: modulo the number of stages; 0 stays where it is.
      pairs: (from, to) of every transfer.
    """

    kind: str
    shift: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return f"{self.kind}+{self.shift}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """A schedule ready to run.

    Attributes:
      tables: name -> int32[ticks, stages]. For each kind of operation (F, B, W):
        `F.microbatch` (-1: nothing to do), `F.chunk`, `F.is_first` and `F.is_last` (0 or 1: the
        model's first or last chunk), and `F.<buffer>`, the slot that it reads or writes. For
        each channel its name: the slot that what arrives goes to.
      shared: name -> int32[ticks], the same for all stages: `embed`, `head` and `embed_gradient`,
        the microbatch whose embedding or head all stages work on together, or -1.
      depths: buffer -> number of slots.
      channels: the permutations of a tick.
    """

    tables: dict[str, np.ndarray]
    shared: dict[str, np.ndarray]
    depths: dict[str, int]
    channels: tuple[Channel, ...]
    num_microbatches: int
    first_stage: int
    last_stage: int
    splits_backward: bool
    folds_last_forward: bool
    recomputes: bool  # a chunk's forward runs again in its backward
    shares_vocab: bool  # all stages work on embedding and head together

    def runs(self, kind: str) -> bool | None:
        """Returns whether an operation of this kind runs in every cell; None: in some."""
        return _same(self.tables[f"{kind}.microbatch"] >= 0)

    def holds(self, kind: str, flag: str) -> bool | None:
        """Returns whether a flag is set where operations of this kind run; None: it varies."""
        return _same(self.tables[f"{kind}.{flag}"][self.tables[f"{kind}.microbatch"] >= 0] > 0)


def make_execution_plan(
    schedule: Schedule, *, remat: str = "full", shares_vocab: bool = False
) -> ExecutionPlan:
    """Returns the plan of a verified schedule.

    Args:
      remat: "full" keeps a chunk's input and computes its forward again in the backward; the last
        chunk then has no forward of its own. "none" keeps what the layers save.
      shares_ends: all stages work on embedding and head together.

    Raises:
      ValueError: the table splits some backwards and not others.
    """
    if schedule.splits_backward() and any(kind == BACKWARD for kind, _, _ in schedule.when()):
        raise ValueError(
            f"schedule {schedule.name} has whole backwards (B) and split ones (I, W); a table must "
            "split all of them or none"
        )
    return _PlanBuilder(schedule, remat, shares_vocab).plan()


class _PlanBuilder:
    def __init__(self, schedule: Schedule, remat: str, shares_vocab: bool):
        self.schedule, self.shares_vocab = schedule, shares_vocab
        self.trains, self.splits = schedule.has_backward(), schedule.splits_backward()
        self.keeps_all = remat == "none" and self.trains
        self.folds = self.trains and not self.keeps_all and not shares_vocab
        self.last = len(schedule.placement) - 1
        # The executor's three kinds: an input gradient runs where a whole backward would.
        kinds = {INPUT_GRADIENT: BACKWARD}
        self.when = {(kinds.get(k, k), m, v): t for (k, m, v), t in schedule.when().items()}
        self.shape = (len(schedule.ticks), schedule.num_stages)
        self.tables: dict[str, np.ndarray] = {}
        self.depths: dict[str, int] = {}
        self.slots: dict[tuple[str, int, int], int] = {}  # (buffer, microbatch, virtual stage)

    def plan(self) -> ExecutionPlan:
        for kind in (FORWARD, BACKWARD, WEIGHT_GRADIENT):
            self._table_of_operations(kind)
        self._allocate_all()
        channels = tuple(self._channels())
        shared = {
            "embed": self._shared(FORWARD, 0),
            "head": self._shared(BACKWARD if self.trains else FORWARD, self.last),
            "embed_gradient": self._shared(BACKWARD, 0),
        }
        # Where the last forward is folded into its backward, a tick may have nothing left.
        microbatches = [self.tables[f"{kind}.microbatch"] for kind in "FBW"]
        works = (np.stack(microbatches) >= 0).any(axis=(0, 2))
        return ExecutionPlan(
            tables={name: table[works] for name, table in self.tables.items()},
            shared={name: row[works] for name, row in shared.items()},
            depths=self.depths,
            channels=channels,
            num_microbatches=self.schedule.num_microbatches,
            first_stage=self.schedule.placement[0],
            last_stage=self.schedule.placement[-1],
            splits_backward=self.splits,
            folds_last_forward=self.folds,
            recomputes=self.trains and not self.keeps_all,
            shares_vocab=self.shares_vocab,
        )

    def _table_of_operations(self, kind: str) -> None:
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
        self.tables |= {f"{kind}.{name}": table for name, table in tables.items()}

    def _allocate_all(self) -> None:
        every = range(self.last + 1)
        first_arrival = 0 if self.shares_vocab else 1
        recomputes = self.trains and not self.keeps_all
        readers = (FORWARD, BACKWARD) if recomputes else (FORWARD,)
        self._allocate("input", every[first_arrival:], self._input_written, readers)
        if not self.trains:
            return
        self._allocate("cotangent", every[:-1], self._cotangent_written, (BACKWARD,))
        if self.keeps_all:
            self._allocate("saved", every, FORWARD, (BACKWARD,))
        if not self.folds:
            self._allocate("head_input", every[-1:], FORWARD, (BACKWARD,))
        if self.splits:
            start = FORWARD if self.keeps_all else BACKWARD
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
        """Gives a slot to everything that this buffer holds.

        Args:
          written: the kind of the operation that writes it, or (microbatch, virtual stage) -> time.
          readers: the kinds of those that read it.
        """
        users = tuple(dict.fromkeys((written, *readers))) if isinstance(written, str) else readers
        for kind in users:
            self.tables[f"{kind}.{buffer}"] = np.zeros(self.shape, np.int32)
        lifetimes: dict[int, list[tuple[int, int, int, int]]] = {}
        for v in virtual_stages:
            for m in range(self.schedule.num_microbatches):
                if isinstance(written, str):
                    start = self._time(written, self.when[written, m, v])
                else:
                    start = written(m, v)
                stop = max(self._time(kind, self.when[kind, m, v]) for kind in readers)
                lifetimes.setdefault(self.schedule.placement[v], []).append((start, stop, m, v))
        self.depths[buffer] = 0
        for stage, of_stage in lifetimes.items():
            slots = _assign_slots(of_stage)
            self.depths[buffer] = max(self.depths[buffer], 1 + max(slots.values()))
            for (m, v), slot in slots.items():
                self.slots[buffer, m, v] = slot
                for kind in users:
                    self.tables[f"{kind}.{buffer}"][self.when[kind, m, v], stage] = slot

    def _channels(self) -> Iterable[Channel]:
        """Yields every permutation, and fills the tables of where its arrivals go."""
        size, placement = self.schedule.num_stages, self.schedule.placement
        for kind, step, buffer in ((FORWARD, 1, "input"), (BACKWARD, -1, "cotangent")):
            if kind == BACKWARD and not self.trains:
                continue
            pairs: dict[int, dict[tuple[int, int], None]] = {}
            for v in range(self.last + 1):
                if not 0 <= v + step <= self.last:
                    continue
                source, target = placement[v], placement[v + step]
                channel = Channel(kind=kind, shift=(target - source) % size, pairs=())
                pairs.setdefault(channel.shift, {})[source, target] = None
                if channel.name not in self.tables:
                    # One slot more than there are: arrivals that nobody reads go there.
                    self.tables[channel.name] = np.full(self.shape, self.depths[buffer], np.int32)
                for m in range(self.schedule.num_microbatches):
                    slot = self.slots[buffer, m, v + step]
                    self.tables[channel.name][self.when[kind, m, v], target] = slot
            for shift, found in sorted(pairs.items()):
                yield Channel(kind=kind, shift=shift, pairs=tuple(sorted(found)))

    def _shared(self, kind: str, virtual_stage: int) -> np.ndarray:
        row = np.full(self.shape[0], -1, np.int32)
        for (k, m, v), tick in self.when.items():
            if self.shares_vocab and k == kind and v == virtual_stage:
                row[tick] = m
        return row


def _same(holds: np.ndarray) -> bool | None:
    return True if holds.all() else False if not holds.any() else None


def _assign_slots(lifetimes: list[tuple[int, int, int, int]]) -> dict[tuple[int, int], int]:
    """Returns a slot per (start, stop, microbatch, virtual stage); none is shared while in use."""
    slots: dict[tuple[int, int], int] = {}
    last_used: list[int] = []
    for start, stop, m, v in sorted(lifetimes):
        slot = next((i for i, time in enumerate(last_used) if time < start), len(last_used))
        last_used[slot : slot + 1] = [stop]
        slots[m, v] = slot
    return slots
