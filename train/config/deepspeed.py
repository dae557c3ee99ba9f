"""Translates a DeepSpeed JSON into values of Taibai's config keys.

Each key of the file is handled in one of four ways:

- It is translated to one or more of Taibai's keys.
- It is left to XLA, which decides buckets, buffers and overlap when it compiles the step.
- It is accepted with one value only: the one that matches Taibai's fixed behaviour.
- It is rejected by name.

A key with the value "auto" is ignored, so that Taibai's config decides.

Source: DeepSpeed's documentation of its configuration JSON.
"""

import dataclasses
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fields.keys import nearest
from fields.numbers import shown
from train.config.deepspeed_keys import (
    DEFAULTS,
    DTYPES,
    FLOAT32,
    LEFT_TO_XLA,
    OFF,
    ONLY,
    OPTIMIZER_OFFLOAD,
    OPTIMIZERS,
    PARAM_OFFLOAD,
    PARAMS,
    RENAMED,
    SCHEDULE_TYPES,
    SECTIONS_LEFT_TO_XLA,
    TORCH_ADAMW_WEIGHT_DECAY,
    TYPES,
    BatchSizes,
    flat_values,
    parse_values,
    rename_old_keys,
)
from train.config.schema import checked_value
from untrusted.documents import parse_json
from untrusted.files import read_bytes
from untrusted.messages import shortened

#: Unknown keys that a message names. The search for the nearest known key takes 10 ms for each.
_MAX_NAMED = 10

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translated:
    """A DeepSpeed JSON in Taibai's terms.

    Attributes:
        values: values of Taibai's keys, `section.key`.
        open_batch: batch sizes if they depend on the number of replicas, which is known once
            the devices are; then `values` has provisional ones. None: they are final.
    """

    values: dict[str, Any]
    open_batch: BatchSizes | None


def read(path: str, config: Any, *, fixed: Collection[str] = ()) -> Translated:
    """Read a DeepSpeed JSON, and log the keys that have no effect.

    Args:
        path: JSON file.
        config: Taibai's config. Batch sizes depend on its mesh and number of microbatches, and
            offloading on its ZeRO stage if the file has none.
        fixed: keys of `config` that `mesh.auto` must not change.

    Raises:
        ValueError: some keys cannot be translated; the message lists all of them. Or a value of
            `config` that is needed here is not valid.
        FileNotFoundError: the file does not exist.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"--deepspeed={path}: the file does not exist")
    tree = parse_json(read_bytes(Path(path)), f"--deepspeed={path}")
    translation = _Translation(tree, config, fixed)
    if translation.problems:
        raise ValueError(f"--deepspeed={path}: {'; '.join(translation.problems)}")
    if translation.left:
        _log.info("--deepspeed: left to XLA: %s", ", ".join(sorted(translation.left)))
    for note in translation.notes:
        _log.info("--deepspeed: %s", note)
    return Translated(values=translation.found, open_batch=translation.open_batch)


class _Translation:
    """Translates one file.

    Every handler removes the keys that it understands from `_values`. Keys that remain at the end
    are unknown, and are reported as problems.
    """

    def __init__(self, tree: dict, config: Any, fixed: Collection[str]):
        self.found: dict[str, Any] = {}  # Taibai's key -> value
        self.left: list[str] = []  # keys left to XLA
        self.notes: list[str] = []  # other keys without an effect
        self.problems: list[str] = []
        self.open_batch: BatchSizes | None = None
        self._values, self._without_value = flat_values(tree)
        rename_old_keys(self._values, self.problems)
        parse_values(self._values, self.problems)
        self._switched_off()
        self._precision()
        self._optimizer()
        self._scheduler()
        self._offloading(config)
        self._batch(config, fixed)
        self._fixed_keys()
        for key, ours in RENAMED.items():
            if key in self._values:
                self._set(ours, self._take(key))
        known = [*RENAMED, *LEFT_TO_XLA, *ONLY, *TYPES]
        unknown = list(self._values)
        for key in unknown[:_MAX_NAMED]:
            self._refuse(f"{shortened(key)} is not supported{nearest(key, known)}")
        if len(unknown) > _MAX_NAMED:
            self._refuse(f"{len(unknown) - _MAX_NAMED:,} further keys are not supported")

    def _fixed_keys(self) -> None:
        """Remove the keys without an effect, and those that have only one valid value."""
        sections = tuple(f"{section}." for section in SECTIONS_LEFT_TO_XLA)
        for key in [key for key in self._values if key in LEFT_TO_XLA or key.startswith(sections)]:
            self.left.append(key)
            del self._values[key]
        for key, only in ONLY.items():
            value = self._take(key, only)
            if value != only:
                self._refuse(
                    f"{key}={shown(value)} is not supported; the only valid value is {only!r}"
                )

    def _take(self, key: str, default: Any = None) -> Any:
        return self._values.pop(key, default)

    def _set(self, key: str, value: Any) -> None:
        self.found[key] = value

    def _refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def _with_defaults(self, section: str, defaults: dict) -> None:
        for name, value in defaults.items():
            if f"{section}.{name}" not in self._without_value:
                self._values.setdefault(f"{section}.{name}", value)

    def _switched_off(self) -> None:
        for section in OFF:
            if self._take(f"{section}.enabled", False):
                self._refuse(f"{section} is not supported; set {section}.enabled to false")
            self._drop(section)

    def _drop(self, section: str) -> None:
        for key in [key for key in self._values if key.startswith(section + ".")]:
            del self._values[key]

    def _precision(self) -> None:
        is_on = {name: bool(self._take(f"{name}.enabled", False)) for name in ("fp16", "bf16")}
        for name in [name for name, on in is_on.items() if not on]:
            self._drop(name)
        if all(is_on.values()):
            return self._refuse("fp16 and bf16 are both enabled; choose one")
        if is_on["bf16"]:
            self._set("precision.compute", "bfloat16")
            if self._take("bf16.bf16_master_weights_and_grads", False):
                self._set("precision.params", "bfloat16")
        if is_on["fp16"]:
            self._float16()
        sent = self._take("communication_data_type")
        if sent is not None and sent.lower() not in DTYPES:
            known = ", ".join(DTYPES)
            self._refuse(f"communication_data_type={sent!r} is unknown; choose {known}")
        elif sent is not None:
            self._set("precision.reduce", DTYPES[sent.lower()])
        summed = self._take("data_types.grad_accum_dtype", FLOAT32[0])
        if summed not in FLOAT32:
            self._refuse(
                f"data_types.grad_accum_dtype={shown(summed)} is not supported; the only valid "
                f"value is {FLOAT32[0]!r}"
            )

    def _float16(self) -> None:
        self._with_defaults("fp16", DEFAULTS["fp16"])
        self._set("precision.compute", "float16")
        static = self._take("fp16.loss_scale")
        power = self._take("fp16.initial_scale_power")
        window = self._take("fp16.loss_scale_window")
        hysteresis = self._take("fp16.hysteresis")
        least = self._take("fp16.min_loss_scale")
        if static:
            self._set("precision.loss_scale", float(static))
            return self._set("precision.loss_scale_window", 0)
        if window == 0:
            self._refuse("fp16.loss_scale_window=0 must be at least 1 for a dynamic loss scale")
        for key, value in (
            ("loss_scale", None if power is None else float(2**power)),
            ("loss_scale_window", window),
            ("loss_scale_hysteresis", hysteresis),
            ("loss_scale_min", least),
        ):
            if value is not None:  # None: "auto"
                self._set(f"precision.{key}", value)

    def _optimizer(self) -> None:
        kind = self._take("optimizer.type")
        if kind is None:
            return
        ours = OPTIMIZERS.get(kind.lower())
        if ours is None:
            # For example Lamb: DeepSpeed's bounds the trust ratio (max_coeff), and also applies it
            # to biases, and its Muon scales matrices in its own way.
            self._refuse(
                f"optimizer.type={shown(kind)} is not supported; choose AdamW, Lion or SGD, or "
                "remove the section and set optimizer.name=muon, lamb, lars or "
                "package.module:function"
            )
            return self._drop("optimizer")
        self._check_params("optimizer", kind, PARAMS[ours])
        defaults = dict(DEFAULTS[ours])
        if self._take("optimizer.params.torch_adam", False):
            defaults["weight_decay"] = TORCH_ADAMW_WEIGHT_DECAY
        if kind.lower() == "adamw":  # decoupled, whatever adam_w_mode is
            self._take("optimizer.params.adam_w_mode")
        self._with_defaults("optimizer.params", defaults)
        self._set("optimizer.name", ours)
        betas = self._take("optimizer.params.betas")
        if betas is not None and len(betas) != 2:
            return self._refuse(f"optimizer.params.betas={shown(betas)} must be two numbers")
        for name, beta in zip(("beta1", "beta2"), betas or (), strict=False):
            self._set(f"optimizer.{name}", beta)

    def _scheduler(self) -> None:
        kind = self._take("scheduler.type")
        if kind is None:
            return
        if kind not in SCHEDULE_TYPES:
            known = ", ".join(SCHEDULE_TYPES)
            self._refuse(f"scheduler.type={shown(kind)} is not supported; choose {known}")
            return self._drop("scheduler")
        self._check_params("scheduler", kind, PARAMS[kind])
        # DeepSpeed takes every unknown type, such as "auto", for a logarithmic warmup.
        self._without_value.discard("scheduler.params.warmup_type")
        self._with_defaults("scheduler.params", DEFAULTS[kind])
        schedule, final = SCHEDULE_TYPES[kind]
        self._set("optimizer.schedule", schedule)
        if final is not None:
            self._set("optimizer.final_learning_rate_fraction", final)

    def _check_params(self, section: str, kind: str, names: Collection[str]) -> None:
        """Check that an optimizer or a scheduler has the parameters that the file sets."""
        prefix = f"{section}.params."
        for key in [key for key in self._values if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if name not in names:
                del self._values[key]
                self._refuse(
                    f"{shortened(key)} is not a parameter of {kind}{nearest(name, [*names])}"
                )

    def _offloading(self, config: Any) -> None:
        stage = self._values.get("zero_optimization.stage")
        if stage is None:
            stage = checked_value(config, "memory.zero_stage")
        devices = {
            OPTIMIZER_OFFLOAD: self._offload_device(OPTIMIZER_OFFLOAD, "cpu_offload"),
            PARAM_OFFLOAD: self._offload_device(PARAM_OFFLOAD, "cpu_offload_param"),
        }
        ratio = self._take(f"{OPTIMIZER_OFFLOAD}.ratio", 1.0)
        if devices[PARAM_OFFLOAD] != "none" and stage < 3:
            self.notes.append(
                f"{PARAM_OFFLOAD} has no effect, because zero_optimization.stage is {stage}, not 3"
            )
            devices[PARAM_OFFLOAD] = "none"
        for place, device in devices.items():
            if device not in ("none", "cpu"):
                self._refuse(f"{place}.device={shown(device)} is unknown; choose cpu or none")
        optimizer = devices[OPTIMIZER_OFFLOAD] == "cpu"
        parameters = devices[PARAM_OFFLOAD] == "cpu"
        if optimizer and stage < 1:
            self._refuse(
                f"{OPTIMIZER_OFFLOAD} needs zero_optimization.stage=1, 2 or 3, not {stage}; set "
                "the stage, or remove the key and set memory.placement=host"
            )
        if optimizer and ratio < 1 and stage < 3:
            self._refuse(
                f"{OPTIMIZER_OFFLOAD}.ratio={ratio} needs zero_optimization.stage=3, not {stage}"
            )
        if optimizer or parameters:
            self._set("memory.placement", "host")
            self._set("memory.offload_optimizer_fraction", float(ratio) if optimizer else 0.0)
            self._set("memory.offload_parameters_fraction", float(parameters))

    def _offload_device(self, place: str, old_name: str) -> str:
        """Return the device that state is offloaded to, such as "cpu" or "none"."""
        is_new = any(key.startswith(f"{place}.") for key in self._values)
        old = self._take(f"zero_optimization.{old_name}")
        if old is not None and is_new:
            self._refuse(
                f"zero_optimization.{old_name} is the old name of {place}; remove one of the two"
            )
        device = self._take(f"{place}.device", "cpu" if old else "none")
        if device != "cpu":
            self._drop(place)
        return device

    def _batch(self, config: Any, fixed: Collection[str]) -> None:
        sizes = BatchSizes(
            whole=self._take("train_batch_size"),
            micro=self._take("train_micro_batch_size_per_gpu"),
            count=self._take("gradient_accumulation_steps"),
        )
        is_auto = checked_value(config, "mesh.auto")
        data = checked_value(config, "mesh.data")
        fsdp = checked_value(config, "mesh.fsdp")
        expert = checked_value(config, "mesh.expert")
        count = checked_value(config, "train.num_microbatches")
        replica_axes = {"mesh.data", "mesh.fsdp"}
        if config.model.get("num_experts"):
            replica_axes.add("mesh.expert")
        is_planned = is_auto and not replica_axes <= {*fixed}
        if sizes.micro is None or not (is_planned or min(data, fsdp, expert) < 1):
            try:
                completed = sizes.completed(data * fsdp * expert, count)
            except ValueError as error:
                return self._refuse(str(error))
        elif is_planned and sizes.whole is not None:
            completed = dataclasses.replace(sizes, micro=None).completed(1, count)
            self.notes.append(
                "train_micro_batch_size_per_gpu is left to the plan of mesh.auto, because "
                "train_batch_size is set"
            )
        else:
            self.open_batch = sizes
            # These sizes only make the config valid until the devices are known.
            if sizes.whole is not None:
                completed = {
                    "data.global_batch_size": sizes.whole,
                    "train.num_microbatches": sizes.count or 1,
                }
            else:
                completed = sizes.completed(max(data, 1) * max(fsdp, 1), count)
            if is_planned and sizes.count is None:
                del completed["train.num_microbatches"]  # or the plan could not choose it
        for key, value in completed.items():
            self._set(key, value)
