"""The operations that the stages of a pipeline run in each tick."""

import dataclasses

import numpy as np

from sharding.pipeline.runtime.execution_plan import ExecutionPlan

#: The operations that one stage runs in one tick: "F", "B", "W", flags that apply to these, such as
#: "B.is_last", and names of a `SharedOperation`.
Operations = frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticks:
    """The operations that the stages of a pipeline run in each tick.

    Attributes:
        stages: tick -> stage -> operations.
    """

    stages: tuple[tuple[Operations, ...], ...]

    @classmethod
    def of_plan(cls, plan: ExecutionPlan) -> "Ticks":
        """Return the ticks of an execution plan, as an iteration of its loop runs them."""
        runs: dict[str, np.ndarray] = {}
        table = plan.iterations
        for kind, operation in table.operations.items():
            runs[kind] = np.asarray(operation.microbatch) >= 0
            runs[f"{kind}.is_first"] = runs[kind] & (np.asarray(operation.is_first) > 0)
            runs[f"{kind}.is_last"] = runs[kind] & (np.asarray(operation.is_last) > 0)
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
