"""The `pipeline` section of a run's config."""

import dataclasses

from sharding.pipeline.schedule import SCHEDULES

REMAT = ("full", "none")
AUTO = ("auto",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches pass through the stages, and which activations the stages keep."""

    schedule: str = "1f1b"  # a key of schedule.SCHEDULES, or the path of a CSV table (*.csv)
    # Contiguous runs of layers per stage; values above 1 need a schedule that supports chunks.
    chunks: int = 1
    # Activations kept between forward and backward: "full" keeps only the stage's input and
    # recomputes the forward, "none" keeps everything that the backward of the layers reads.
    remat: str = "full"
    # Number of layers of each chunk, in layer order; () = even split, ("auto",) = balance FLOPs.
    layers_per_stage: tuple = ()
    share_vocab: bool = False  # split embedding and head over the stages along the vocabulary

    def __post_init__(self):
        if self.schedule not in SCHEDULES and not self.schedule.endswith(".csv"):
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} is unknown; choose from "
                f"{', '.join(SCHEDULES)}, or give the path of a CSV table (*.csv)"
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
                f"pipeline.layers_per_stage={counts} must list the number of layers of each "
                "chunk, such as 5,7,7,5; use 'auto' to balance FLOPs, or () for an even split"
            )
