"""Config section `checkpoint`: when checkpoints are saved and how many are kept."""

from dataclasses import dataclass

from distributed.messages import TIMEOUT_S
from fields.field import field
from fields.section import Section


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, section="checkpoint"):
    """When checkpoints are saved, and how many are kept.

    See docs/checkpoints.md.
    """

    every_steps: int = field(
        50,
        "Steps between checkpoints; 0: save only after the last step.",
        ge=0,
        remedy="choose a number of steps, or 0 to save at the end only",
        required=True,
    )
    every_minutes: float | None = field(
        None,
        "Also save after this many minutes, by the first process's clock. None: only `every_steps` "
        "applies.",
        gt=0,
        remedy="choose a number of minutes, or None to count steps only",
    )
    max_to_keep: int = field(
        3,
        "How many of the newest checkpoints to keep. With 1, the previous one is kept as well, "
        "until the next save has proven the newest one good.",
        ge=1,
        remedy="choose 2 or more to have another one if the newest is damaged",
        required=True,
    )
    keep_best: int = field(
        0,
        "How many of the best checkpoints to keep in addition, by `best_metric`.",
        ge=0,
        remedy="choose 0 to keep only the newest",
    )
    best_metric: str = field(
        "eval_loss",
        "Metric of the evaluation that ranks checkpoints: `eval_loss` or another `eval_...`.",
    )
    best_is_max: bool = field(False, "True: larger values of `best_metric` are better.")
    timeout_s: float = field(
        TIMEOUT_S,
        "Seconds after which a save counts as hung and fails.",
        gt=0,
        remedy="choose several times the duration of a save in seconds",
    )
