"""Config section of the optimizer and its learning-rate schedule."""

import dataclasses

from fields.field import field
from fields.section import Section
from train.optim.muon import SCALES
from untrusted.imports import is_import_path

OPTIMIZERS = (
    "adamw",
    "muon",
    "shampoo",
    "lion",
    "adafactor",
    "schedule_free",
    "lamb",
    "lars",
    "sgd",
)
#: Optimizers that update the matrices of stacks in another way than all other parameters.
FOR_MATRICES = ("muon", "shampoo")
#: Optimizers whose updates can be computed one layer of a stack, or some rows of another parameter,
#: at a time.
SLICED = ("adamw", "muon", "lion", "sgd")
RATE_SCHEDULES = (
    "cosine",
    "linear",
    "constant",
    "wsd",
    "inverse_sqrt",
    "polynomial",
    "cosine_restarts",
    "piecewise",
)
#: Shapes of the decay of the schedule "wsd".
DECAYS = ("linear", "cosine", "sqrt")
WARMUPS = ("linear", "log")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, section="optimizer"):
    """The optimizer, its learning-rate schedule, weight decay and clipping.

    See docs/optimizers.md.
    """

    name: str = field(
        "adamw",
        "The optimizer: `adamw`, `muon`, `shampoo`, `lion`, `adafactor`, `schedule_free`, `lamb`, "
        "`lars`, `sgd`, or `package.module:function` for one of your own (see docs/own_parts.md).",
        required=True,
    )
    learning_rate: float = field(1e-3, "Peak learning rate.", ge=0, required=True)
    warmup_steps: int = field(
        20,
        "Steps of warmup; the last of them has the peak learning rate.",
        ge=0,
        required=True,
    )
    warmup_type: str = field(
        "linear",
        "Rate of warmup step n / peak: `n / warmup_steps` (linear), or `log(n) / "
        "log(warmup_steps)` (log), which is 0 in the first step.",
        choices=WARMUPS,
    )
    schedule: str = field(
        "cosine",
        "Decay after the warmup: `cosine`, `linear`, `constant`, `wsd` (stable, then a decay in "
        "the last steps), `inverse_sqrt`, `polynomial`, `cosine_restarts`, `piecewise`, or "
        "`package.module:function` for a schedule of your own, with its warmup.",
        required=True,
    )
    decay_steps: int = field(
        0, "For `schedule=wsd`: number of steps at the end of the run that decay.", ge=0
    )
    decay_shape: str = field(
        "sqrt",
        "For `schedule=wsd`: how the rate falls. With t from 0 to 1: `1 - t` (linear), "
        "`(1 + cos(π t)) / 2` (cosine), or `1 - sqrt(t)` (sqrt).",
        choices=DECAYS,
    )
    decay_power: float = field(
        1.0, "For `schedule=polynomial`: p of `(1 - t) ** p`, with t from 0 to 1.", gt=0
    )
    cycle_steps: int = field(
        0, "For `schedule=cosine_restarts`: number of steps of the first cosine.", ge=0
    )
    cycle_factor: int = field(
        1, "For `schedule=cosine_restarts`: length of a cosine / length of the one before.", ge=1
    )
    milestones: tuple = field(
        (),
        "For `schedule=piecewise`: steps, counted from 0, from which the rate is multiplied by "
        "`milestone_factor`, such as `8000,9000`.",
    )
    milestone_factor: float = field(
        0.1, "For `schedule=piecewise`: rate / rate before the milestone.", gt=0
    )
    final_learning_rate_fraction: float = field(
        0.1,
        "Last rate / peak, if the rate decays to the end of the run or of a cycle.",
        ge=0,
        le=1,
        required=True,
    )
    weight_decay: float = field(
        0.1,
        "Weight decay, multiplied by the learning rate. It does not apply to biases, norm scales, "
        "other vectors and the parameters that the model names in `not_decayed`.",
        ge=0,
        required=True,
    )
    clip_norm: float = field(
        1.0, "Largest global gradient norm; 0: no clipping.", ge=0, required=True
    )
    beta1: float = field(
        0.9,
        "Decay of the first moment of `adamw`, `muon`'s AdamW, `shampoo` and `lamb`; for `lion`, "
        "share of the momentum in an update; for `schedule_free`, share of the average in the "
        "parameters.",
        ge=0,
        lt=1,
        required=True,
    )
    beta2: float = field(
        0.95,
        "Decay of the second moment of `adamw`, `muon`'s AdamW, `shampoo`, `schedule_free` and "
        "`lamb`, and of `shampoo`'s statistics; for `lion`, decay of the momentum.",
        ge=0,
        lt=1,
        required=True,
    )
    epsilon: float = field(
        1e-8,
        "For `adamw`, `muon`'s AdamW, `shampoo`, `schedule_free` and `lamb`: added to the root of "
        "the second moment.",
        gt=0,
        required=True,
    )
    momentum: float = field(
        0.9,
        "For `muon`, `lars` and `sgd`: momentum; 0: no momentum is kept. Muon is published with "
        "0.95.",
        ge=0,
        lt=1,
    )
    muon_scale: str = field(
        "match_rms_adamw",
        "For `muon`: factor of an update of a matrix with these numbers of inputs and outputs: "
        "`0.2 sqrt(max(inputs, outputs))` (match_rms_adamw), or `sqrt(max(1, outputs / inputs))` "
        "(original).",
        choices=tuple(SCALES),
    )
    muon_adamw_rate: float = field(
        1.0, "For `muon`: learning rate of its AdamW / `learning_rate`.", ge=0
    )
    shampoo_block: int = field(
        1024,
        "For `shampoo`: largest number of rows and of columns of the blocks into which each matrix "
        "is cut.",
        ge=1,
    )
    shampoo_every: int = field(
        10,
        "For `shampoo`: number of updates from one computation of the inverse roots to the next; "
        "the first update computes them too.",
        ge=1,
    )
    layer_decay: float = field(
        1.0,
        "Layer-wise decay: the update of layer l of L is multiplied by `layer_decay ** (L - l)`; "
        "1: none.",
        gt=0,
        le=1,
        remedy="choose for example 0.75, or 1 for none",
    )
    frozen: tuple = field(
        (),
        "Parameters that are not trained: names, in which `*` matches anything, such as "
        "`token_embedding,encoder.*`.",
        nonempty=True,
        splits=True,
        remedy="write for example ('token_embedding',)",
    )

    def __post_init__(self):
        milestones = self.milestones
        milestones = tuple(milestones) if isinstance(milestones, list | tuple) else (milestones,)
        self._set("milestones", milestones)
        super().__post_init__()
        self._check_schedule()
        if self.name == "schedule_free" and self.beta1 == 0:
            raise ValueError(
                "optimizer.name=schedule_free needs optimizer.beta1 above 0, which is 0; choose "
                "for example 0.9"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in RATE_SCHEDULES and not is_import_path(self.schedule):
            raise ValueError(
                f"optimizer.schedule={self.schedule!r} is unknown; choose "
                f"{', '.join(RATE_SCHEDULES)} or an import path, package.module:function"
            )
        for schedule, key, value in (
            ("wsd", "decay_steps", self.decay_steps),
            ("cosine_restarts", "cycle_steps", self.cycle_steps),
            ("piecewise", "milestones", self.milestones),
        ):
            if self.schedule == schedule and not value:
                raise ValueError(
                    f"optimizer.schedule={schedule} needs optimizer.{key}, which is {value}; set "
                    "it, or choose optimizer.schedule=cosine"
                )
        are_steps = all(type(step) is int and step > 0 for step in self.milestones)
        if not are_steps or list(self.milestones) != sorted({*self.milestones}):
            raise ValueError(
                f"optimizer.milestones={self.milestones} must be positive integers in ascending "
                "order, such as 8000,9000"
            )

    def check_length(self, num_steps: int) -> None:
        """Check that the schedule fits into a run of so many steps.

        Raises:
            ValueError: its decay is longer than the run.
        """
        if self.schedule == "wsd" and self.decay_steps > num_steps:
            raise ValueError(
                f"optimizer.decay_steps={self.decay_steps} is more than the {num_steps} steps of "
                "the run; choose fewer steps of decay"
            )

    def length_warnings(self, num_steps: int) -> list[str]:
        """Return a sentence for each part of the schedule that a run of so many steps lacks."""
        run = f"train.num_steps={num_steps}"
        warmup = self.warmup_steps
        if self.schedule not in RATE_SCHEDULES:
            return []
        if warmup >= max(num_steps, 2):  # a warmup of one step has no step below the peak
            peak = "only at its last step" if warmup == num_steps else "at no step"
            return [
                f"optimizer.warmup_steps={warmup} takes all of {run}, so the learning rate has its "
                f"peak {peak}; reduce the warmup, or train for more steps"
            ]
        if self.schedule == "wsd" and warmup + self.decay_steps > num_steps:
            return [
                f"optimizer.warmup_steps={warmup} and optimizer.decay_steps={self.decay_steps} "
                f"overlap in {run}, so the learning rate has its peak at no step; reduce one of "
                "them, or train for more steps"
            ]
        if self.schedule == "cosine_restarts" and warmup + self.cycle_steps > num_steps:
            return [
                f"optimizer.cycle_steps={self.cycle_steps} after optimizer.warmup_steps={warmup} "
                f"is longer than {run}, so the first cycle does not end; reduce it, or train for "
                "more steps"
            ]
        late = [step for step in self.milestones if step >= num_steps]
        if self.schedule == "piecewise" and late:
            return [
                f"optimizer.milestones={self.milestones}: {run} ends before {late[0]}; choose "
                "earlier milestones, or train for more steps"
            ]
        return []

    @property
    def is_built_in(self) -> bool:
        """Whether the optimizer is one of OPTIMIZERS, not one of your own."""
        return self.name in OPTIMIZERS

    @property
    def can_be_sliced(self) -> bool:
        """Whether it is one of SLICED, which state in host memory requires."""
        return self.name in SLICED
