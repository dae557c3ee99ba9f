"""The config sections `train`, `eval` and `log`: length, failures, evaluations, logged steps."""

import dataclasses

from fields.field import field
from fields.section import Section
from train.config.remat import Remat
from train.optim import ema

_MAX_PROMPTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, section="train"):
    """Length, microbatches, seed, failures and averaging of a run."""

    num_steps: int = field(100, "Optimizer updates, each on one global batch.", ge=1, required=True)
    num_epochs: float | None = field(
        None,
        "Passes over the training data, in place of `num_steps`: as many steps as they need, "
        "rounded up. On the command line, either of the two replaces the other of a config file.",
        gt=0,
        remedy="choose for example 3, or None to count steps",
    )
    num_microbatches: int = field(
        1,
        "Microbatches per step, for pipelines and gradient accumulation. num_microbatches × "
        "mesh.data × mesh.fsdp × mesh.expert must divide `data.global_batch_size`.",
        ge=1,
        le=4096,
        remedy="choose fewer microbatches of more examples each",
        required=True,
    )
    seed: int = field(
        0,
        "Seed for initial parameters, dropout and shuffling.",
        ge=0,
        le=2**32 - 1,
        required=True,
    )
    start_timeout_s: float = field(
        60.0,
        "Seconds to wait at the start for the other processes, and for another run's workdir lock.",
        ge=1,
    )
    failure_timeout_s: float = field(
        600.0,
        "Seconds after which a step, or a wait for data, counts as hung, and the process exits.",
        ge=1,
    )
    init_labels: str = field(
        "by_name",
        "Classifier of an `init_from` checkpoint. `by_name`: match its labels with the data's by "
        "name. `by_position`: keep the order of its labels. `new`: initialize a new classifier.",
        choices=("by_name", "by_position", "new"),
    )
    init_harmless: tuple[str, ...] = field(
        (),
        "Unknown keys in the config.json of an `init_from` checkpoint to ignore, because they do "
        "not change the computation.",
        nonempty=True,
    )
    hub_commits: tuple[str, ...] = field(
        (),
        "Commits of repositories on the Hugging Face hub, `KEY NAME[@REVISION] COMMIT`. A run "
        "stores them here, and uses them when it continues.",
        nonempty=True,
    )
    compilation_cache: bool = field(
        True,
        "Keep compiled steps in `data.cache_dir`, so that a restart does not compile them again. "
        "If a `config.yaml` sets `data.cache_dir`, they are kept in the default directory instead.",
    )
    max_nonfinite_steps: int = field(
        10,
        "Number of steps with a NaN or infinity in a row after which `on_nonfinite` applies; 0: no "
        "limit. Such steps are skipped.",
        ge=0,
        remedy="choose a number of consecutive steps, or 0 for no limit",
    )
    on_nonfinite: str = field(
        "stop",
        "What to do after `max_nonfinite_steps`. `stop`: end the run. `rollback`: continue with "
        "the parameters of a checkpoint from before them.",
        choices=("stop", "rollback"),
    )
    skip_spikes: float | None = field(
        None,
        "Skip a step whose gradient norm exceeds this multiple of the running mean. None: skip "
        "none.",
        gt=1,
        remedy="it is a multiple of the mean gradient norm; choose for example 5, or None to skip "
        "no steps",
    )
    ema_decay: float | None = field(
        None,
        "Decay of an exponential moving average (EMA) of the parameters. None: keep no average.",
        gt=0,
        lt=1,
        remedy="choose for example 0.9999, or None to keep no average of the parameters",
    )
    ema_schedule: str = field(
        "constant",
        "Schedule of `ema_decay`. `cosine`: the decay rises to 1 at the end.",
        choices=ema.EMA_SCHEDULES,
    )
    early_stopping: int | None = field(
        None,
        "End the run after this number of evaluations in a row that do not improve "
        "`checkpoint.best_metric`. Each improvement is saved. None: train to the last step.",
        ge=1,
        remedy="it is a number of evaluations; choose for example 3, or None",
    )
    early_stopping_min_delta: float = field(
        0.0,
        "For `early_stopping`: an evaluation improves the metric only by more than this.",
        ge=0,
    )
    step_callbacks: tuple[str, ...] = field(
        (),
        "Import paths of functions to call after each logged step (see `log.every_steps`), on the "
        "first process; see docs/own_parts.md.",
        nonempty=True,
        splits=True,
        remedy="write for example ('my_project.watch:my_callback',)",
    )
    evaluation_callbacks: tuple[str, ...] = field(
        (),
        "The same, after each evaluation.",
        nonempty=True,
        splits=True,
        remedy="write for example ('my_project.watch:my_callback',)",
    )
    remat: str = field(
        "stage",
        "Rematerialization: activations that a layer keeps for its backward pass, which "
        "recomputes all others. `auto`: as many as fit into memory by the estimate. `none`: "
        "recompute only norms and activation functions. `full`: recompute everything. `dots`: "
        "keep only matrix products outside attention. A list of names, such as `qkv,mlp`: keep "
        "only these activations. With `stage` before it, as in `stage,dots`: until the backward "
        "pass of a microbatch, a pipeline stage keeps only its input; its backward pass then runs "
        "the forward pass of its layers again. `stage` alone: `stage,none`.",
        required=True,
    )

    unroll: bool | None = field(
        None,
        "Compile the layers of a step one after another instead of as a loop. On GPUs such a step "
        "takes less time and memory, if layers keep activations, but compiles several times "
        "longer. Not with a pipeline or host memory; see docs/memory.md. None: on GPUs, for up to "
        "32 layers that keep activations and have no dropout, if `mesh.model`, `mesh.context` and "
        "`mesh.expert` are 1.",
    )

    def __post_init__(self):
        super().__post_init__()
        self._set("remat", str(self.parsed_remat))

    @property
    def parsed_remat(self) -> Remat:
        """The parsed value of `remat`."""
        return Remat.parse(self.remat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, section="eval"):
    """When to evaluate, and on how many batches."""

    every_steps: int = field(
        50, "Steps between evaluations; 0: only after the last step.", ge=0, required=True
    )
    num_batches: int | None = field(
        None,
        "Batches of the validation split per evaluation. None: the whole split.",
        ge=1,
        remedy="None evaluates the whole split",
        required=True,
    )
    prompts: tuple[str, ...] = field(
        (),
        "Texts that a language model continues after each evaluation, at most 16, such as "
        "`def main(,import`. The continuations are in `samples.jsonl` and in the report; see "
        "docs/watch.md.",
        nonempty=True,
        remedy="write for example ('Once upon a time',)",
    )
    max_new_tokens: int = field(
        32,
        "For `prompts`: most tokens of a continuation, which takes the most probable ones.",
        ge=1,
        le=256,
    )

    def __post_init__(self):
        super().__post_init__()
        if len(self.prompts) > _MAX_PROMPTS:
            raise ValueError(
                f"eval.prompts has {len(self.prompts)} texts, which would slow down the run; "
                f"choose at most {_MAX_PROMPTS}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig(Section, section="log"):
    """Which steps are logged and profiled, and where they are recorded."""

    every_steps: int = field(
        5,
        "Steps between logged steps; 1: every step. The first and the last step are always logged.",
        ge=1,
        remedy="choose a number of steps",
        required=True,
    )
    trackers: tuple[str, ...] = field(
        (),
        "Services that also record the metrics: `wandb` (Weights & Biases), `mlflow`, or the "
        "import path of a tracker of your own; see docs/watch.md.",
        nonempty=True,
        splits=True,
        remedy="write for example ('wandb',)",
    )
    profile_steps: tuple[int, ...] = field(
        (),
        "First and last step to profile, such as `10,13`, which jax's profiler records in "
        "`profile/` of the workdir. `()`: profile none. See docs/profiling.md.",
        length=2,
        ge=1,
        also=((),),
        remedy="choose the first and the last step, such as 10,13, or () for none",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.profile_steps and not all(type(step) is int for step in self.profile_steps):
            raise ValueError(
                f"log.profile_steps={self.profile_steps!r} must be two whole numbers, such as 10,13"
            )
        if self.profile_steps and self.profile_steps[0] >= self.profile_steps[1]:
            raise ValueError(
                f"log.profile_steps={self.profile_steps!r}: the first step must be before the last "
                "one; choose for example 10,13"
            )

    def check_length(self, num_steps: int) -> None:
        """Check that the profiled steps are in the run.

        Raises:
            ValueError: they are not.
        """
        if self.profile_steps and self.profile_steps[1] > num_steps:
            raise ValueError(
                f"log.profile_steps={self.profile_steps!r} must be at most train.num_steps="
                f"{num_steps}; choose earlier steps, or a longer run"
            )
