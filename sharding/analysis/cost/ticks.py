"""The operations that the stages of a pipeline run in each tick."""

import dataclasses

import numpy as np

from sharding.pipeline.runtime.buffers import ExecutionPlan

#: The operations that one stage runs in one tick: "F", "B", "W", flags that apply to these, such as
#: "B.is_last", and names of `ExecutionPlan.shared`.
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
        """Return the ticks of an execution plan."""
        runs: dict[str, np.ndarray] = {}
        for kind in "FBW":
            runs[kind] = plan.tables[f"{kind}.microbatch"] >= 0
            for flag in ("is_first", "is_last"):
                runs[f"{kind}.{flag}"] = runs[kind] & (plan.tables[f"{kind}.{flag}"] > 0)
        num_ticks, num_stages = runs["F"].shape
        for name, row in plan.shared.items():  # operations that all stages run together
            runs[name] = np.repeat((row >= 0)[:, None], num_stages, axis=1)

        def cell(tick: int, stage: int) -> Operations:
            return frozenset(name for name, table in runs.items() if table[tick, stage])

        stages = range(num_stages)
        return cls(stages=tuple(tuple(cell(tick, s) for s in stages) for tick in range(num_ticks)))

    def __len__(self) -> int:
        return len(self.stages)
