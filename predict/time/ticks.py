"""The operations that the stages of a pipeline run in each tick, and the loops that belong to them.

All stages run the same program. Scopes in the names of its loops identify the operation and the
stack of a loop, and so whether a stage runs it in a tick:

    pipeline_F/at_most_once/while                     a forward
    pipeline_F/.../stack_encoder/at_most_once/while   layers of the encoder, in a forward
    .../stack_encoder/before/at_most_once/while       the encoder's `before` function
    .../stack_encoder/layers/while                    one iteration per layer, padding included
    .../layers/while/body/at_most_once/while          a layer, unless it is padding
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from pipeline.runtime.chunks import BEFORE, scope_of_stack
from pipeline.runtime.layers import LAYERS
from pipeline.runtime.tick_program import TickProgram
from pipeline.runtime.tick_table import ChunkOperation, scope_of
from pipeline.stack_layout import StackLayout

#: Operations of one stage in one tick: "F", "B", "W"; flags of these, such as "B.is_last"; names of
#: a `SharedOperation`; and, if chunks differ in their layers, "F.encoder=3" for the number of
#: layers and "F.encoder.first" if the first is among them.
Operations = frozenset[str]

#: Added to the operations in iterations of a loop over layers that only are padding.
PADDING = "padding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticks:
    """The operations that the stages of a pipeline run in each tick.

    Attributes:
        stages: tick -> stage -> operations.
    """

    stages: tuple[tuple[Operations, ...], ...]

    @classmethod
    def of_program(
        cls, program: TickProgram, layouts: Mapping[str, StackLayout] | None = None
    ) -> "Ticks":
        """Return the ticks of a tick program, as an iteration of its loop runs them.

        Args:
            program: tick program.
            layouts: stack -> its layers in each chunk; None: all chunks have the same layers.
        """
        runs: dict[str, np.ndarray] = {}
        table = program.iterations
        for kind, operation in table.operations.items():
            runs[kind] = np.asarray(operation.microbatch) >= 0
            runs[f"{kind}.is_first"] = runs[kind] & (np.asarray(operation.is_first) > 0)
            runs[f"{kind}.is_last"] = runs[kind] & (np.asarray(operation.is_last) > 0)
            for stack, layout in (layouts or {}).items():
                runs |= _runs_of_stack(f"{kind}.{stack}", layout, operation)
        num_ticks, num_stages = runs["F"].shape
        for name, operation in table.shared.items():
            runs[name] = np.repeat(operation.microbatch[:, None] >= 0, num_stages, axis=1)

        def cell(tick: int, stage: int) -> Operations:
            return frozenset(name for name, table in runs.items() if table[tick, stage])

        stages = range(num_stages)
        return cls(stages=tuple(tuple(cell(tick, s) for s in stages) for tick in range(num_ticks)))

    def of_stage(self, stage: int) -> "Ticks":
        """Return the ticks of one stage, which waits for no other."""
        return Ticks(stages=tuple((stages[stage],) for stages in self.stages))

    def __len__(self) -> int:
        return len(self.stages)


def _runs_of_stack(
    name: str, layout: StackLayout, operation: ChunkOperation
) -> dict[str, np.ndarray]:
    """Return, for each number of layers of a stack, the ticks and stages that run as many."""
    counts = np.array([[count for _, count in stage] for stage in layout.chunks])
    if (counts == counts.flat[0]).all():
        return {}
    firsts = np.array([[count > 0 and first == 0 for first, count in s] for s in layout.chunks])
    is_running = np.asarray(operation.microbatch) >= 0
    cells = np.arange(len(counts)), np.asarray(operation.chunk)
    runs = {f"{name}={count}": is_running & (counts[cells] == count) for count in np.unique(counts)}
    return runs | {f"{name}.first": is_running & firsts[cells]}


def is_idle(loop_path: str, operations: Operations) -> bool:
    """Return whether a stage skips a loop that runs at most once.

    Args:
        loop_path: scopes of the loop, such as "pipeline_F/at_most_once/while".
        operations: names and flags of the stage's work in the tick.
    """
    scope = next(filter(_SCOPE.fullmatch, reversed(loop_path.split("/"))), None)
    if scope is None:
        return False
    if scope.startswith(scope_of("")):
        return scope.removeprefix(scope_of("")) not in operations
    count = num_layers(loop_path, operations)
    if scope == LAYERS:  # without its loop, if XLA has removed one of a single iteration
        return count == 0 or PADDING in operations
    if scope == BEFORE and count is not None:
        return f"{_operation_and_stack(loop_path)}.first" not in operations
    return count == 0


def num_layers(loop_path: str, operations: Operations) -> int | None:
    """Return how many layers of its stack a stage runs in a loop; None: all that it has room for.

    Args:
        loop_path: scopes of the loop, such as "pipeline_F/.../stack_encoder/layers/while".
        operations: names and flags of the stage's work in the tick.
    """
    prefix = f"{_operation_and_stack(loop_path)}="
    counts = [int(o.removeprefix(prefix)) for o in operations if o.startswith(prefix)]
    return counts[0] if counts else None


def kind_of(operation: str) -> str:
    """Return the operation of an element of `Operations`, such as "F" for "F.encoder=3"."""
    return operation.partition(".")[0]


def of_kind(operations: Operations, kind: str) -> Operations:
    """Return the elements of one kind, such as "F" with its flags and layer counts."""
    return frozenset(operation for operation in operations if kind_of(operation) == kind)


def _operation_and_stack(loop_path: str) -> str:
    """Return the operation and the stack of a loop, such as "F.encoder"."""
    scopes = loop_path.split("/")
    return f"{_last(scope_of(''), scopes)}.{_last(scope_of_stack(''), scopes)}"


def _last(prefix: str, scopes: Iterable[str]) -> str:
    suffixes = [scope.removeprefix(prefix) for scope in scopes if scope.startswith(prefix)]
    return suffixes[-1] if suffixes else ""


_SCOPE = re.compile(rf"{LAYERS}|{BEFORE}|{scope_of_stack('')}.*|{scope_of('')}[\w.]+")
