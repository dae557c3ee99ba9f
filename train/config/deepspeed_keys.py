"""The keys of a DeepSpeed JSON, and its values with the types that DeepSpeed gives them.

{"bfloat16": {"enabled": "true"}, "zero_optimization": {"stage": "auto"}}
-> {"bf16.enabled": True}, and zero_optimization.stage is without a value

Source: DeepSpeed 0.19.6: `runtime/config.py`, `runtime/precision_config.py`,
`runtime/zero/config.py`, `runtime/zero/offload_config.py`, `runtime/lr_schedules.py`, and
`_configure_basic_optimizer` in `runtime/engine.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fields.numbers import number_problem, shown
from untrusted.schema import is_of

_MAX_INT = 2**31 - 1
KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list[float]: "a list of numbers",
}


class Kind(NamedTuple):
    """The type of a value and, for a number, its range."""

    type: Any
    least: float = -math.inf
    most: float = math.inf

    @property
    def description(self) -> str:
        """The rule, such as "an integer from 0 to 3"."""
        has_range = (self.least, self.most) != (-math.inf, math.inf)
        return KINDS[self.type] + (f" from {self.least} to {self.most}" if has_range else "")


_COUNT = Kind(int, 1, _MAX_INT)
_SIZE = Kind(int, 0, _MAX_INT)

OPTIMIZER_OFFLOAD = "zero_optimization.offload_optimizer"
PARAM_OFFLOAD = "zero_optimization.offload_param"

#: Sections of DeepSpeed tools that Taibai does not have; they must be disabled.
OFF = (
    "amp",
    "torch_autocast",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "comms_logger",
    "curriculum_learning",
    "autotuning",
    "elasticity",
    "data_efficiency",
    "eigenvalue",
    "progressive_layer_drop",
    "hybrid_engine",
    "nebula",
)

#: Keys whose values are used in computations -> their types.
TYPES: Mapping[str, Kind] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "gradient_clipping": Kind(float),
    "steps_per_print": _COUNT,
    **{f"{section}.enabled": Kind(bool) for section in ("fp16", "bf16", *OFF)},
    "bf16.bf16_master_weights_and_grads": Kind(bool),
    "fp16.loss_scale": Kind(float),
    "fp16.initial_scale_power": Kind(int, 0, 127),
    "fp16.loss_scale_window": _SIZE,
    "fp16.hysteresis": _SIZE,
    "fp16.min_loss_scale": Kind(float),
    "communication_data_type": Kind(str),
    "data_types.grad_accum_dtype": Kind(str),
    "optimizer.type": Kind(str),
    "optimizer.params.lr": Kind(float),
    "optimizer.params.betas": Kind(list[float]),
    "optimizer.params.eps": Kind(float),
    "optimizer.params.weight_decay": Kind(float),
    "optimizer.params.momentum": Kind(float),
    "optimizer.params.torch_adam": Kind(bool),
    "optimizer.params.adam_w_mode": Kind(bool),
    "scheduler.type": Kind(str),
    "scheduler.params.warmup_num_steps": _SIZE,
    "scheduler.params.warmup_max_lr": Kind(float),
    "scheduler.params.warmup_type": Kind(str),
    "scheduler.params.total_num_steps": _COUNT,
    "scheduler.params.cos_min_ratio": Kind(float),
    "zero_optimization.stage": Kind(int, 0, 3),
    "zero_optimization.cpu_offload": Kind(bool),
    "zero_optimization.cpu_offload_param": Kind(bool),
    f"{OPTIMIZER_OFFLOAD}.ratio": Kind(float, 0, 1),
    f"{OPTIMIZER_OFFLOAD}.device": Kind(str),
    f"{PARAM_OFFLOAD}.device": Kind(str),
}
#: Beginnings of the keys that pydantic parses in DeepSpeed, which also takes "false" and "3".
PARSED_BY_PYDANTIC = ("fp16.", "bf16.", "zero_optimization.", *(f"{name}.enabled" for name in OFF))

#: Keys for which null means the same as no value.
NULLABLE = frozenset(
    f"""
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
    communication_data_type data_types.grad_accum_dtype data_types.param_dtype
    data_types.buffer_dtype bf16 bfloat16
    scheduler.params.warmup_max_lr zero_optimization.zenflow zero_optimization.zeropp_loco_param
    zero_optimization.cpu_offload zero_optimization.cpu_offload_param
    {OPTIMIZER_OFFLOAD} {OPTIMIZER_OFFLOAD}.device {PARAM_OFFLOAD} {PARAM_OFFLOAD}.device
    """.split()
)

#: Keys of `zero_optimization` whose names may also begin with `stage3_`.
_STAGE_3 = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold
    use_all_reduce_for_fetch_params allgather_sequential
    """.split()
_ZERO = """
    contiguous_gradients overlap_comm reduce_scatter reduce_bucket_size
    use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size round_robin_gradients
    sub_group_size memory_efficient_linear ignore_unused_parameters elastic_checkpoint
    load_from_fp32_weights stage3_gather_fp16_weights_on_model_save cpu_offload_use_pin_memory
    pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory
    """.split()
_OFFLOAD = """
    pin_memory buffer_count buffer_size fast_init max_in_cpu nvme_path pipeline_read pipeline_write
    super_offload cpuadam_cores_perc
    """.split()

#: Keys that XLA decides, or that have no meaning in Taibai.
LEFT_TO_XLA = frozenset(
    [
        *"""
        wall_clock_breakdown memory_breakdown dump_state log_level vocabulary_size
        graph_harvesting dataloader_drop_last zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer disable_allgather checkpoint.use_node_local_storage
        checkpoint.tag_validation optimizer.legacy_fusion optimizer.params.set_grad_none
        optimizer.params.foreach optimizer.params.fused optimizer.params.capturable fp16.auto_cast
        bf16.immediate_grad_update activation_checkpointing.number_checkpoints
        """.split(),
        *(f"zero_optimization.{name}" for name in (*_ZERO, *_STAGE_3)),
        *(f"zero_optimization.stage3_{name}" for name in _STAGE_3),
        *(f"{place}.{name}" for place in (OPTIMIZER_OFFLOAD, PARAM_OFFLOAD) for name in _OFFLOAD),
    ]
)
#: Sections of which all keys are such keys.
SECTIONS_LEFT_TO_XLA = (
    "aio",
    "compile",
    "timers",
    "checkpoint.parallel_write",
    "zero_optimization.leaf_module",
)

#: Keys that are accepted with this value only.
ONLY = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "sparse_gradients": False,
    "seq_parallel_communication_data_type": "fp32",
    "use_data_before_expert_parallelism": False,
    "checkpoint.load_universal": False,
    "bf16.bf16_optimizer_states": False,
    "bf16.check_grad_overflow": True,
    "fp16.consecutive_hysteresis": False,
    "fp16.fp16_master_weights_and_grads": False,
    "optimizer.params.bias_correction": True,
    "optimizer.params.amsgrad": False,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.fp32_optimizer_states": True,
    "optimizer.params.maximize": False,
    "optimizer.params.dampening": 0,
    "optimizer.params.nesterov": False,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_min_ratio": 0,
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.legacy_stage1": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.mics_hierarchical_params_gather": False,
    **{
        f"activation_checkpointing.{name}": False
        for name in (
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    },
}

#: DeepSpeed key -> Taibai key with the same meaning and value.
RENAMED = {
    "gradient_clipping": "optimizer.clip_norm",
    "steps_per_print": "log.every_steps",
    "zero_optimization.stage": "memory.zero_stage",
    "optimizer.params.lr": "optimizer.learning_rate",
    "optimizer.params.eps": "optimizer.epsilon",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.momentum": "optimizer.momentum",
    "scheduler.params.warmup_num_steps": "optimizer.warmup_steps",
    "scheduler.params.warmup_type": "optimizer.warmup_type",
    "scheduler.params.warmup_max_lr": "optimizer.learning_rate",
    "scheduler.params.total_num_steps": "train.num_steps",
    "scheduler.params.cos_min_ratio": "optimizer.final_learning_rate_fraction",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: DeepSpeed's names of float32.
FLOAT32 = ("fp32", "float32", "torch.float32", "float")
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "lion": "lion",
    "sgd": "sgd",
}
SCHEDULE_TYPES = {
    "WarmupLR": ("constant", None),
    "WarmupDecayLR": ("linear", 0.0),
    "WarmupCosineLR": ("cosine", None),
}

#: Optimizer or scheduler -> the keys of its `params`.
PARAMS = {
    "adamw": """
        lr betas eps weight_decay bias_correction amsgrad adam_w_mode torch_adam set_grad_none
        fp32_optimizer_states maximize foreach fused capturable
        """.split(),
    "lion": "lr betas weight_decay set_grad_none".split(),
    "sgd": "lr momentum dampening weight_decay nesterov maximize foreach fused".split(),
    "WarmupLR": """
        warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration
        """.split(),
    "WarmupDecayLR": """
        total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type
        last_batch_iteration
        """.split(),
    "WarmupCosineLR": """
        total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type
        last_batch_iteration
        """.split(),
}

_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
#: DeepSpeed's defaults for the keys that are missing from a section. WarmupLR and WarmupCosineLR
#: rise to the optimizer's learning rate (since DeepSpeed 0.17.2), WarmupDecayLR to one of its own.
DEFAULTS = {
    "adamw": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"warmup_max_lr": 1e-3, **_WARMUP},
    "WarmupCosineLR": {"cos_min_ratio": 1e-4, **_WARMUP},
    "fp16": {
        **{"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000},
        **{"hysteresis": 2, "min_loss_scale": 1},
    },
}
#: `weight_decay` of torch.optim.AdamW, which `"torch_adam": true` uses instead of DeepSpeed's own.
TORCH_ADAMW_WEIGHT_DECAY = 0.01


_AUTO = "auto"
#: Strings that pydantic parses as a bool.
_BOOLS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The batch sizes of a file, which complete each other once the number of replicas is known.

    whole = micro × count × replicas

    Attributes:
        whole: `train_batch_size`, or None.
        micro: `train_micro_batch_size_per_gpu`, or None.
        count: `gradient_accumulation_steps`, or None.
    """

    whole: int | None
    micro: int | None
    count: int | None

    def completed(self, num_replicas: int, default_count: int) -> dict[str, int]:
        """Return the values of `data.global_batch_size` and `train.num_microbatches`, if known.

        Args:
            num_replicas: `mesh.data` × `mesh.fsdp` × `mesh.expert`.
            default_count: count if the file has only `micro`.

        Raises:
            ValueError: the file has all sizes, and they contradict each other.
        """
        whole = self.whole
        count = self.count
        if self.micro is not None and whole is not None:
            fitting, remainder = divmod(whole, self.micro * num_replicas)
            if remainder or count not in (None, fitting):
                raise ValueError(
                    f"train_batch_size={whole} must equal train_micro_batch_size_per_gpu="
                    f"{self.micro} × gradient_accumulation_steps={count or '...'} × "
                    f"{num_replicas} replicas (mesh.data × mesh.fsdp × mesh.expert)"
                )
            count = fitting
        elif self.micro is not None:
            count = count or default_count
            whole = self.micro * num_replicas * count
        sizes = {"data.global_batch_size": whole, "train.num_microbatches": count}
        return {key: size for key, size in sizes.items() if size is not None}


def flat_values(tree: dict) -> tuple[dict[str, Any], set[str]]:
    """Return the values of a file by dotted key, and the keys without a value.

    The latter are those with "auto", and those with null if DeepSpeed allows it there.
    """
    values = dict(_flat(tree))
    without_value = {
        key
        for key, value in values.items()
        if value == _AUTO or (value is None and key in NULLABLE)
    }
    return {key: value for key, value in values.items() if key not in without_value}, without_value


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value of a nested dict."""
    for name, value in tree.items():
        if "." in name:  # It must not be taken for a key of a section.
            yield prefix + repr(name), value
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def rename_old_keys(values: dict[str, Any], problems: list[str]) -> None:
    """Replace deprecated keys by those that have their meaning now.

    Args:
        values: values by dotted key, which are changed in place.
        problems: list that a problem is added to.
    """
    old = [key for key in values if key.startswith("bfloat16.")]
    if old and any(key.startswith("bf16.") for key in values):
        problems.append("bf16 and bfloat16 are names of the same section; remove one of the two")
    for key in old:
        values[f"bf16.{key.removeprefix('bfloat16.')}"] = values.pop(key)
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization.stage"] = int(values.pop("zero_optimization"))


def parse_values(values: dict[str, Any], problems: list[str]) -> None:
    """Convert the values of known keys to their types, and check their ranges.

    Args:
        values: values by dotted key, which are changed in place; invalid ones are removed.
        problems: list that problems are added to.
    """
    for key, value in list(values.items()):
        is_lax = key.startswith(PARSED_BY_PYDANTIC)
        kind = TYPES.get(key)
        if kind is None and is_lax and key in ONLY:
            kind = Kind(type(ONLY[key]))
        parsed = value
        problem = number_problem(value, is_float=True)
        if problem is None and kind is not None:
            parsed = _parse_value(value, kind, is_lax=is_lax)
            problem = f"must be {kind.description}" if parsed is None else None
        if problem is None:
            values[key] = parsed
        else:
            problems.append(f"{key}={shown(value)} {problem}")
            del values[key]


def _parse_value(value: Any, kind: Kind, *, is_lax: bool) -> Any:
    """Return a value with the type of a key, or None if it has another type or is out of range.

    Args:
        value: value in the file. A float without a fraction, such as 1e9, is also an integer.
        kind: type of the key.
        is_lax: whether to convert strings to numbers and bools, and 0 and 1 to bools, as pydantic
            does.
    """
    if kind.type is bool:
        if is_lax and type(value) in (int, float) and value in (0, 1):
            return bool(value)
        if is_lax and isinstance(value, str):
            return _BOOLS.get(value.lower())
        return value if type(value) is bool else None
    if kind.type not in (int, float):
        return value if is_of(value, kind.type) else None
    if is_lax and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if type(value) is float and kind.type is int and value.is_integer():
        value = int(value)
    if not is_of(value, kind.type) or not math.isfinite(value):
        return None
    return value if kind.least <= value <= kind.most else None
