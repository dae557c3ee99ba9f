"""Tables of DeepSpeed JSON keys: their counterparts in Taibai, valid values and defaults."""

from typing import Any

_MAX_INT = 2**31 - 1
KINDS = {int: "an integer", float: "a number", str: "a string", list[float]: "a list of numbers"}
#: Keys whose values are used in computations -> type, and smallest and largest integer.
TYPES: dict[str, tuple[Any, int, int]] = {
    "train_batch_size": (int, 1, _MAX_INT),
    "train_micro_batch_size_per_gpu": (int, 1, _MAX_INT),
    "gradient_accumulation_steps": (int, 1, _MAX_INT),
    "fp16.loss_scale": (float, 0, 0),
    "fp16.initial_scale_power": (int, 0, 127),
    "fp16.loss_scale_window": (int, 0, _MAX_INT),
    "fp16.hysteresis": (int, 0, _MAX_INT),
    "fp16.min_loss_scale": (float, 0, 0),
    "communication_data_type": (str, 0, 0),
    "optimizer.type": (str, 0, 0),
    "optimizer.params.betas": (list[float], 0, 0),
    "scheduler.type": (str, 0, 0),
    "zero_optimization.offload_optimizer.ratio": (float, 0, 0),
    "zero_optimization.offload_optimizer.device": (str, 0, 0),
    "zero_optimization.offload_param.device": (str, 0, 0),
}

OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")

#: Keys that XLA decides, or that have no meaning in Taibai.
LEFT_TO_XLA = (
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "disable_allgather",
    "checkpoint.use_node_local_storage",
    "optimizer.params.torch_adam",
    "fp16.auto_cast",
    "bf16.immediate_grad_update",
    *(
        f"zero_optimization.{name}"
        for name in (
            "contiguous_gradients",
            "overlap_comm",
            "reduce_scatter",
            "reduce_bucket_size",
            "allgather_partitions",
            "allgather_bucket_size",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "memory_efficient_linear",
            "ignore_unused_parameters",
            "elastic_checkpoint",
            "load_from_fp32_weights",
            "stage3_gather_16bit_weights_on_model_save",
            "param_persistence_threshold",
        )
    ),
    *(
        f"{place}.{name}"
        for place in OFFLOADS
        for name in ("pin_memory", "buffer_count", "buffer_size", "fast_init", "max_in_cpu")
    ),
)

#: Keys that are accepted with this value only.
ONLY = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1,
    "sparse_gradients": False,
    "fp16.consecutive_hysteresis": False,
    "fp16.fp16_master_weights_and_grads": False,
    "data_types.grad_accum_dtype": "fp32",
    "optimizer.params.bias_correction": True,
    "optimizer.params.amsgrad": False,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.dampening": 0,
    "optimizer.params.nesterov": False,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_min_ratio": 0,
    "scheduler.params.warmup_type": "linear",
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
#: Sections of DeepSpeed tools that Taibai does not have; they must be disabled.
OFF = (
    "amp",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comms_logger",
    "curriculum_learning",
    "autotuning",
    "elasticity",
    "data_efficiency",
)

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
    "scheduler.params.warmup_max_lr": "optimizer.learning_rate",
    "scheduler.params.total_num_steps": "train.num_steps",
    "scheduler.params.cos_min_ratio": "optimizer.final_learning_rate_fraction",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}
SCHEDULES = {
    "WarmupLR": ("constant", None),
    "WarmupDecayLR": ("linear", 0.0),
    "WarmupCosineLR": ("cosine", 1e-4),
}


#: DeepSpeed's defaults for the keys that are missing from a section.
DEFAULTS = {
    "adamw": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "WarmupLR": {"warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 1e-4},
    "fp16": {
        **{"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000},
        **{"hysteresis": 2, "min_loss_scale": 1},
    },
}
