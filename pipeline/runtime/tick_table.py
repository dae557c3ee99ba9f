"""The work of one stage in one tick, as typed scalars, and the tables that contain it.

A `TickTable` has the same fields in three forms. tick_program.py makes one whose leaves are
tables of all ticks and stages. Each device takes the column of its own stage and scans over it, so
within a tick the leaves are scalars:

    program.table                       all ticks and stages    int32[ticks, stages]
    program.table.column(stage_index)   one stage, all ticks    int32[ticks]
    tick                                one stage, one tick     int32[]

For example, `tick.forward.microbatch` is the microbatch whose forward the stage runs in this
tick, or -1 if it runs none.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.schedules.table import BACKWARD, FORWARD, WEIGHT_GRADIENT
from sharding.ops.update_if import Condition

Tree = Any
#: A leaf of a `TickTable`, in one of the three forms above: a NumPy or JAX array of int32.
Array = Any

#: Named scope of the loop over ticks. XLA keeps scope names, so predict/time/ can find
#: the loop in a compiled program, and the parts of it that run only in some ticks.
TICKS = "pipeline_ticks"


def scope_of(part: str) -> str:
    """Return the named scope of a part that runs in some ticks only.

    Args:
        part: operation (F, B, W), an operation under a flag of the table (B.is_last), or the
            name of a `SharedOperation`.
    """
    return f"pipeline_{part}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferSlots:
    """The slot of each buffer that an operation reads or writes; None if it does not use it.

    tick_program.py explains the buffers.
    """

    input: Array = None
    cotangent: Array = None
    saved: Array = None
    for_weights: Array = None
    handed: Array = None
    head_input: Array = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("microbatch", "chunk", "is_first", "is_last", "slots"),
    meta_fields=("kind", "always", "always_first", "always_last"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkOperation:
    """An operation on one chunk: forward, backward (or input gradient), or weight gradient.

    Attributes:
        kind: FORWARD, BACKWARD or WEIGHT_GRADIENT.
        microbatch: microbatch, or -1 if the stage is idle.
        chunk: number of the chunk within its stage.
        is_first: 1 for the model's first chunk, else 0.
        is_last: 1 for the model's last chunk, else 0.
        slots: buffer slots that it reads or writes.
        always: True if every cell of the table has such an operation, False if no cell has one,
            None if only some have one. It is known during tracing.
        always_first: the same for `is_first`, over all operations of this kind.
        always_last: the same for `is_last`.
    """

    kind: str
    microbatch: Array
    chunk: Array
    is_first: Array
    is_last: Array
    slots: BufferSlots
    always: bool | None
    always_first: bool | None
    always_last: bool | None

    @property
    def runs(self) -> Condition:
        """Whether the stage runs the operation in this tick."""
        return Condition(lambda: self.microbatch >= 0, self.always, scope_of(self.kind))

    @property
    def on_first_chunk(self) -> Condition:
        """Whether the chunk is the model's first."""
        scope = scope_of(f"{self.kind}.is_first")
        return Condition(lambda: self.is_first > 0, self.always_first, scope)

    @property
    def on_last_chunk(self) -> Condition:
        """Whether the chunk is the model's last."""
        scope = scope_of(f"{self.kind}.is_last")
        return Condition(lambda: self.is_last > 0, self.always_last, scope)


@partial(jax.tree_util.register_dataclass, data_fields=("microbatch",), meta_fields=("name",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedOperation:
    """Work that all stages do together in a tick, with `pipeline.share_vocab`.

    Attributes:
        name: embed, head or embed_gradient.
        microbatch: `int32[ticks]` in a program and `int32[]` in a tick; -1 if there is none.
    """

    name: str
    microbatch: Array

    @property
    def runs(self) -> Condition:
        """Whether the stages do this work in this tick."""
        return Condition(lambda: self.microbatch >= 0, scope=scope_of(self.name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channel:
    """One collective permute of a tick: outputs of one kind of operation move by `shift` stages.

    Attributes:
        kind: FORWARD (activations) or BACKWARD (cotangents).
        shift: distance modulo the number of stages; with 0 the value stays on its stage.
        pairs: (source stage, target stage) of every transfer.
    """

    kind: str
    shift: int
    pairs: tuple[tuple[int, int], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TickTable:
    """Everything that a stage does in a tick, or a table of it for all ticks and stages.

    Attributes:
        forward: forward of a chunk.
        backward: backward of a chunk, or its input gradient.
        weight_gradient: weight gradient of a chunk, if backwards are split.
        arrival_slots: for each channel of the program, the slot for the value that arrives last.
        embed: embedding that all stages compute together.
        head: head, and its gradient if the schedule trains.
        embed_gradient: gradient of the embedding.
    """

    forward: ChunkOperation
    backward: ChunkOperation
    weight_gradient: ChunkOperation
    arrival_slots: tuple[Array, ...]
    embed: SharedOperation
    head: SharedOperation
    embed_gradient: SharedOperation

    @property
    def operations(self) -> dict[str, ChunkOperation]:
        """Kind (F, B, W) -> operation, in the order in which they run."""
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            WEIGHT_GRADIENT: self.weight_gradient,
        }

    @property
    def shared(self) -> dict[str, SharedOperation]:
        """Name -> work that all stages do together."""
        operations = (self.embed, self.head, self.embed_gradient)
        return {operation.name: operation for operation in operations}

    def column(self, stage_index: jax.Array) -> "TickTable":
        """Return one stage's column of the tables, `int32[ticks]`, ready to be scanned over.

        Tables of work that all stages do together are `int32[ticks]` already.
        """

        def stage_column(table: Array) -> jax.Array:
            table = jnp.asarray(table, jnp.int32)
            return table[:, stage_index] if table.ndim == 2 else table

        return jax.tree.map(stage_column, self)

    def skewed(self, unread_slots: Sequence[int]) -> "TickTable":
        """Return a table with one more row, in which all but forwards happen one row later.

        With a row for each iteration of a loop, the forwards of a tick and the backwards of the
        tick before are in the same iteration. Both sends can then overlap with work:

            row        backwards of tick t      forwards of tick t + 1
            send       outputs of tick t =====> cotangents of tick t =====>

        Args:
            unread_slots: for each channel, the slot for values that nobody reads.
        """

        def later(operation: Any) -> Any:
            return _with_idle_row(operation, at=0)

        def same(operation: Any) -> Any:
            return _with_idle_row(operation, at=len(operation.microbatch))

        pairs = zip(self.arrival_slots, unread_slots, strict=True)
        return TickTable(
            forward=same(self.forward),
            backward=later(self.backward),
            weight_gradient=later(self.weight_gradient),
            arrival_slots=tuple(np.insert(slots, 0, unread, axis=0) for slots, unread in pairs),
            embed=same(self.embed),
            head=later(self.head),
            embed_gradient=later(self.embed_gradient),
        )


def _with_idle_row(operation: Any, at: int) -> Any:
    """Return a `ChunkOperation` or `SharedOperation` with a row in which no stage runs it."""
    padded = jax.tree.map(lambda table: np.insert(table, at, 0, axis=0), operation)
    microbatch = np.insert(operation.microbatch, at, -1, axis=0)
    padded = dataclasses.replace(padded, microbatch=microbatch)
    if isinstance(padded, ChunkOperation) and padded.always:
        return dataclasses.replace(padded, always=None)
    return padded
