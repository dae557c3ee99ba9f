"""Translates a DeepSpeed JSON into overrides of Taibai's config keys.

Each key of the file is handled in one of four ways:

- It is translated to one or more of Taibai's keys.
- It is left to XLA, which decides buckets, buffers and overlap when it compiles the step.
- It is accepted with one value only: the one that matches Taibai's fixed behaviour.
- It is rejected by name.

A key with the value "auto" is ignored, so that Taibai's config decides.

Source: DeepSpeed's documentation of its configuration JSON.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fields.keys import nearest
from fields.numbers import number_problem, shown
from train.config.deepspeed_keys import (
    DEFAULTS,
    DTYPES,
    KINDS,
    LEFT_TO_XLA,
    OFF,
    OFFLOADS,
    ONLY,
    OPTIMIZERS,
    RENAMED,
    SCHEDULES,
    TYPES,
)
from untrusted.documents import parse_json
from untrusted.files import read_bytes
from untrusted.schema import is_of

AUTO = "auto"
#: Unknown keys that a message names. The search for the nearest known key takes 10 ms for each.
_MAX_NAMED = 10

_log = logging.getLogger(__name__)


def read(path: str, config: Any) -> list[str]:
    """Read a DeepSpeed JSON, and log the keys that are left to XLA.

    Args:
        path: the JSON file.
        config: Taibai's config. Batch sizes depend on its mesh and number of microbatches.

    Returns:
        Overrides `section.key=value`.

    Raises:
        ValueError: some keys cannot be translated; the message lists all of them.
        FileNotFoundError: the file does not exist.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"--deepspeed={path}: the file does not exist")
    tree = parse_json(read_bytes(Path(path)), f"--deepspeed={path}")
    translation = _Translation(tree, config)
    if translation.problems:
        raise ValueError(f"--deepspeed={path}: {'; '.join(translation.problems)}")
    if translation.left:
        _log.info("--deepspeed: left to XLA: %s", ", ".join(sorted(translation.left)))
    return translation.found


class _Translation:
    """Translates one file.

    Every handler removes the keys that it understands from `_values`. Keys that remain at the end
    are unknown, and are reported as problems.
    """

    def __init__(self, tree: dict, config: Any):
        self.found: list[str] = []  # overrides
        self.left: list[str] = []  # keys left to XLA
        self.problems: list[str] = []
        self._values = {key: value for key, value in _flat(tree) if value != AUTO}
        self._auto = {key for key, value in _flat(tree) if value == AUTO}
        self._check_types()
        self._switched_off()
        self._precision()
        self._optimizer()
        self._scheduler()
        self._offloading()
        self._batch(config)
        for key in [key for key in LEFT_TO_XLA if key in self._values]:
            self.left.append(key)
            del self._values[key]
        for key, only in ONLY.items():
            value = self._take(key, only)
            if value != only:
                self._refuse(f"{key}={value!r} is not supported; the only valid value is {only!r}")
        for key, ours in RENAMED.items():
            if key in self._values:
                self._set(ours, self._take(key))
        known = [*RENAMED, *LEFT_TO_XLA, *ONLY, "train_batch_size", "fp16.loss_scale"]
        unknown = list(self._values)
        for key in unknown[:_MAX_NAMED]:
            self._refuse(f"{key} is not supported{nearest(key, known)}")
        if len(unknown) > _MAX_NAMED:
            self._refuse(f"{len(unknown) - _MAX_NAMED:,} further keys are not supported")

    def _check_types(self) -> None:
        for key, value in list(self._values.items()):
            if problem := number_problem(value, is_float=True):
                self._refuse(f"{key}={shown(value)} {problem}")
                del self._values[key]
        for key, (kind, least, most) in TYPES.items():
            value: Any = self._values.get(key)
            is_in_range = is_of(value, kind) and (kind is not int or least <= value <= most)
            if value is not None and not is_in_range:
                rule = f" from {least} to {most}" if kind is int else ""
                self._refuse(f"{key}={shown(value)} must be {KINDS[kind]}{rule}")
                del self._values[key]

    def _take(self, key: str, default: Any = None) -> Any:
        return self._values.pop(key, default)

    def _set(self, key: str, value: Any) -> None:
        self.found.append(f"{key}={value}")

    def _refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def _with_defaults(self, section: str, defaults: dict) -> None:
        for name, value in defaults.items():
            if f"{section}.{name}" not in self._auto:
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
            self._with_defaults("fp16", DEFAULTS["fp16"])
            self._set("precision.compute", "float16")
            static = self._take("fp16.loss_scale")
            power = self._take("fp16.initial_scale_power")
            window = self._take("fp16.loss_scale_window")
            self._set("precision.loss_scale", float(static or 2**power))
            self._set("precision.loss_scale_window", 0 if static else window)
            self._set("precision.loss_scale_hysteresis", self._take("fp16.hysteresis"))
            self._set("precision.loss_scale_min", float(self._take("fp16.min_loss_scale")))
        sent = self._take("communication_data_type")
        if sent is not None and sent not in DTYPES:
            known = ", ".join(DTYPES)
            self._refuse(f"communication_data_type={sent!r} is unknown; choose {known}")
        elif sent is not None:
            self._set("precision.reduce", DTYPES[sent])

    def _optimizer(self) -> None:
        kind = self._take("optimizer.type")
        if kind is None:
            return
        ours = OPTIMIZERS.get(kind.lower())
        if ours is None:
            # For example Lamb: DeepSpeed's bounds the trust ratio (max_coeff), and also applies it
            # to biases.
            self._refuse(
                f"optimizer.type={kind!r} is not supported; choose AdamW or SGD, or remove the "
                "section and set optimizer.name=lamb, lars or package.module:function"
            )
            return self._drop("optimizer")
        self._with_defaults("optimizer.params", DEFAULTS[ours])
        self._set("optimizer.name", ours)
        betas = self._take("optimizer.params.betas")
        for name, beta in zip(("beta1", "beta2"), betas or (), strict=False):
            self._set(f"optimizer.{name}", beta)

    def _scheduler(self) -> None:
        kind = self._take("scheduler.type")
        if kind is None:
            return
        if kind not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            self._refuse(f"scheduler.type={kind!r} is not supported; choose {known}")
            return self._drop("scheduler")
        self._with_defaults("scheduler.params", DEFAULTS[kind])
        schedule, final = SCHEDULES[kind]
        self._set("optimizer.schedule", schedule)
        if final is not None and "scheduler.params.cos_min_ratio" not in self._values:
            self._set("optimizer.final_learning_rate_fraction", final)
        if not self._values.get("scheduler.params.warmup_num_steps"):
            self._values.pop("scheduler.params.warmup_type", None)

    def _offloading(self) -> None:
        devices = {}
        for place in OFFLOADS:
            devices[place] = self._take(f"{place}.device", "none") or "none"
            if devices[place] not in ("none", "cpu"):
                self._refuse(f"{place}.device={devices[place]!r} is unknown; choose cpu or none")
            if devices[place] == "none":
                self._drop(place)
        optimizer, parameters = (devices[place] == "cpu" for place in OFFLOADS)
        if optimizer or parameters:
            ratio = self._take(f"{OFFLOADS[0]}.ratio", 1.0) if optimizer else 0.0
            self._set("memory.placement", "host")
            self._set("memory.offload_optimizer_fraction", float(ratio))
            self._set("memory.offload_parameters_fraction", float(parameters))

    def _batch(self, config: Any) -> None:
        whole = self._take("train_batch_size")
        micro = self._take("train_micro_batch_size_per_gpu")
        count = self._take("gradient_accumulation_steps")
        replicas = config.mesh.data * config.mesh.fsdp
        if micro is not None and min(config.mesh.data, config.mesh.fsdp) < 1:
            return self._refuse(
                "train_micro_batch_size_per_gpu needs a known number of replicas; set mesh.data "
                "and mesh.fsdp to numbers, or remove the key"
            )
        if micro is not None and whole is not None:
            fitting, rest = divmod(whole, micro * replicas)
            if rest or (count is not None and count != fitting):
                return self._refuse(
                    f"train_batch_size={whole} must equal train_micro_batch_size_per_gpu={micro} × "
                    f"gradient_accumulation_steps={count or '...'} × "
                    f"mesh.data={config.mesh.data} × mesh.fsdp={config.mesh.fsdp}"
                )
            count = fitting
        elif micro is not None:
            whole = micro * replicas * (count or config.train.num_microbatches)
        for key, value in (("data.global_batch_size", whole), ("train.num_microbatches", count)):
            if value is not None:
                self._set(key, value)


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
