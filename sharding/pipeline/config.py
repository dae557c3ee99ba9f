"""What a run decides about its pipeline."""

import dataclasses

from sharding.pipeline.schedule import SCHEDULES

REMAT = ("full", "none")
AUTO = ("auto",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches go through the stages, and what the stages hold."""

    schedule: str = "1f1b"  # a name in schedule.SCHEDULES, or the path of a table: table.csv
    chunks: int = 1  # runs of layers that each stage holds; more need a schedule that knows them
    remat: str = "full"  # kept from forward to backward: full = the stage's input, none = all
    # Layers of each chunk, in the order of the layers; () = even, "auto" = by FLOPs.
    layers_per_stage: tuple = ()
    share_vocab: bool = False  # embedding and head are split over the stages, by vocab

    def __post_init__(self):
        if self.schedule not in SCHEDULES and not self.schedule.endswith(".csv"):
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} is unknown; choose from "
                f"{', '.join(SCHEDULES)}, or give the path of a table, table.csv"
            )
        if self.remat not in REMAT:
            raise ValueError(
                f"pipeline.remat={self.remat!r} is unknown; choose {' or '.join(REMAT)}"
            )
        if self.chunks < 1:
            raise ValueError(f"pipeline.chunks={self.chunks} must be at least 1")
        counts = self.layers_per_stage
        counts = (counts,) if isinstance(counts, str) else tuple(counts)
        object.__setattr__(self, "layers_per_stage", counts)
        if counts != AUTO and not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(
                f"pipeline.layers_per_stage={counts} must be a number of layers "
                "for each chunk of each stage, such as 5,7,7,5, or auto, or nothing for an even cut"
            )
