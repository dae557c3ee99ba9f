"""The `pipeline` section of a run's config."""

import dataclasses

from fields.field import field
from fields.numbers import MAX_LAYERS
from fields.section import Section
from pipeline.schedule import check_name

#: `layers_per_stage=auto`: cut the layers so that the FLOPs of the stages are balanced.
BALANCED = ("auto",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section, section="pipeline"):
    """How microbatches pass through the stages. See docs/pipelines.md."""

    schedule: str = field(
        "1f1b",
        "Order of forward and backward passes: `gpipe`, `1f1b`, `interleaved_1f1b`, `zero_bubble`, "
        "`zbv`, or the path of a schedule as a table in a .csv file.",
        is_path=True,
    )
    chunks: int = field(
        1,
        "Number of chunks (groups of consecutive layers) per stage: 2 for `zbv`; any number for "
        "`gpipe` and `interleaved_1f1b`; 1 for `1f1b` and `zero_bubble`.",
        ge=1,
        le=MAX_LAYERS,
    )
    layers_per_stage: tuple = field(
        (),
        "Number of layers of every chunk of every stage, in the order in which the model runs the "
        "chunks: `mesh.pipeline` × `pipeline.chunks` numbers, such as `5,7,7,5` for 4 stages with "
        "one chunk each or 2 stages with two. `auto` balances FLOPs; `()` gives all the same "
        "number.",
    )
    share_vocab: bool = field(
        False, "Split embedding and head over all stages, along the vocabulary."
    )

    def shares_vocab(self, num_stages: int) -> bool:
        """Return whether a pipeline of `num_stages` stages splits the vocabulary over them."""
        return self.share_vocab and num_stages > 1

    def __post_init__(self):
        counts = self.layers_per_stage
        counts = tuple(counts) if isinstance(counts, list | tuple) else (counts,)
        self._set("layers_per_stage", counts)
        super().__post_init__()
        check_name(self.schedule)
        if counts != BALANCED and not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(
                f"pipeline.layers_per_stage={counts} must list the number of layers of each "
                "chunk, such as 5,7,7,5; use 'auto' to balance FLOPs, or () for an even split"
            )
