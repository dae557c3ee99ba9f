"""The translation of the keys of DeepSpeed JSONs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from tests.runs import CONFIG, TINY
from tests.train.config.deepspeed_jsons import translated, written
from train.build import RunOptions, _complete_config, _load_config, _start_devices
from train.config.config_files import load
from train.config.deepspeed_keys import ONLY, parse_values
from train.config.overrides import Overrides
from train.config.schema import RunConfig
from train.lifecycle.exit_codes import REFUSED
from train.main import main
from train.optim.schedules import make_learning_rate_schedule

#: From the tutorials of Hugging Face's Trainer: ZeRO 3 with everything offloaded to the CPU.
ZERO3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-9, "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": 7,
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": False,
}


def test_tutorial_file_is_translated(tmp_path, caplog):
    ours = load(CONFIG)
    with caplog.at_level("INFO", logger="train"):
        run = translated(ZERO3, tmp_path, "mesh.data=2")
    assert run.precision.compute == "bfloat16" and run.precision.params == "float32"
    assert run.optimizer.learning_rate == 3e-4 and run.optimizer.epsilon == 1e-9
    assert (run.optimizer.beta1, run.optimizer.beta2) == (0.9, 0.95)
    assert run.optimizer.weight_decay == ours.optimizer.weight_decay  # "auto"
    assert run.optimizer.schedule == "linear" and run.optimizer.warmup_steps == 7
    assert run.optimizer.final_learning_rate_fraction == 0
    assert run.train.num_steps == ours.train.num_steps
    assert run.memory.zero_stage == 3 and run.memory.placement == "host"
    assert run.memory.offload_optimizer_fraction == 0.5
    assert run.memory.offload_parameters_fraction == 1
    assert run.train.num_microbatches == 4 and run.data.global_batch_size == 2 * 4 * 2
    assert run.optimizer.clip_norm == 0.5 and run.log.every_steps == 2000
    assert "left to XLA: wall_clock_breakdown, zero_optimization.contiguous" in caplog.text


def test_command_line_overrides_and_absent_keys_keep_their_values(tmp_path):
    ours = load(CONFIG)
    run = translated(
        {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}},
        tmp_path,
        "optimizer.clip_norm=2.0",
    )
    assert run.optimizer.clip_norm == 2 and run.memory.zero_stage == 2
    assert run.optimizer.learning_rate == ours.optimizer.learning_rate
    assert run.data.global_batch_size == ours.data.global_batch_size
    assert run.memory.placement == "device" and run.precision.compute == "float32"


def test_float16_has_deepspeeds_defaults(tmp_path):
    precision = translated({"fp16": {"enabled": True}}, tmp_path).precision
    assert precision.compute == "float16" and precision.loss_scale == 2**16
    assert (precision.loss_scale_window, precision.loss_scale_hysteresis) == (1000, 2)
    fixed = {"enabled": True, "loss_scale": 128, "initial_scale_power": 20}
    precision = translated({"fp16": fixed}, tmp_path).precision
    assert precision.loss_scale == 128 and precision.loss_scale_window == 0
    off = translated({"fp16": {"enabled": False, "hysteresis": 2}}, tmp_path).precision
    assert off.compute == "float32"


def test_lion_has_deepspeeds_defaults(tmp_path):
    found = translated({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, tmp_path).optimizer
    assert (found.name, found.beta1, found.beta2) == ("lion", 0.9, 0.99)
    assert (found.learning_rate, found.weight_decay) == (1e-4, 0.0)


def test_sgd_has_pytorchs_defaults(tmp_path):
    params = {"momentum": 0.8, "dampening": 0, "nesterov": False, "weight_decay": 1e-4}
    found = translated({"optimizer": {"type": "SGD", "params": params}}, tmp_path).optimizer
    assert (found.name, found.momentum, found.weight_decay) == ("sgd", 0.8, 1e-4)
    found = translated({"optimizer": {"type": "SGD"}}, tmp_path).optimizer
    assert (found.momentum, found.weight_decay, found.learning_rate) == (0.0, 0.0, 1e-3)


#: Learning rates of DeepSpeed 0.19.6 in millionths, update by update, recorded from its
#: `runtime/lr_schedules.py` with 5 steps of warmup and an optimizer's rate of 3e-4.
THEIR_RATES = {
    "WarmupLR": [0, 0, 129.202967, 204.781858, 258.405935, 300, 300, 300],
    "WarmupDecayLR": [0, 0, 430.676558, 682.606194, 861.353116, 1000, 1000, 800],
    "WarmupCosineLR": [0, 0, 129.202967, 204.781858, 258.405935, 300, 271.355414, 196.362914],
}


@pytest.mark.parametrize("is_auto", [False, True], ids=["given", "auto"])
@pytest.mark.parametrize("kind", THEIR_RATES)
def test_warmup_is_logarithmic_up_to_deepspeeds_rate(kind, is_auto, tmp_path):
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": kind, "params": {"warmup_num_steps": "auto" if is_auto else 5}},
    }
    run = translated(tree, tmp_path, *(["optimizer.warmup_steps=5"] if is_auto else []))
    schedule: Any = make_learning_rate_schedule(run.optimizer, num_steps=12)
    rates = [float(schedule(update)) * 1e6 for update in range(5)]
    # DeepSpeed makes two updates with a rate of 0. A float32 has a relative error of about 1e-7.
    np.testing.assert_allclose(rates, THEIR_RATES[kind][1:6], rtol=1e-6)


@pytest.mark.parametrize(
    "params, expected",
    [
        ({"warmup_max_lr": 1e-4}, 1e-4),
        ({"warmup_max_lr": None}, 3e-4),
        ({"warmup_max_lr": "auto"}, 3e-4),
        ({}, 1e-3),
    ],
)
def test_warmup_decay_rises_to_its_own_rate(params, expected, tmp_path):
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    assert translated(tree, tmp_path).optimizer.learning_rate == expected


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("params", [{}, {"weight_decay": 0.2}], ids=["default", "given"])
def test_torch_adam_has_the_weight_decay_of_pytorch(kind, params, tmp_path):
    tree = {"optimizer": {"type": kind, "params": {"torch_adam": True, **params}}}
    expected = torch.optim.AdamW([torch.zeros(1)], **params).defaults["weight_decay"]
    assert translated(tree, tmp_path).optimizer.weight_decay == expected
    tree["optimizer"]["params"]["torch_adam"] = False
    assert translated(tree, tmp_path).optimizer.weight_decay == params.get("weight_decay", 0)


def test_adamw_is_decoupled_whatever_adam_w_mode_is(tmp_path):
    tree = {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}
    assert translated(tree, tmp_path).optimizer.name == "adamw"


VALID = {"enabled": True, "initial_scale_power": 1, "loss_scale": 1}


class _TheirFields(pydantic.BaseModel):
    """The types of some fields of DeepSpeed's models."""

    enabled: bool
    initial_scale_power: int
    loss_scale: float


@pytest.mark.parametrize("name", _TheirFields.model_fields)
def test_values_are_parsed_as_by_pydantic(name):
    """As DeepSpeed does, except that bools are not taken for numbers."""
    texts = [
        "false",
        "True",
        "OFF",
        "on",
        "n",
        "yes",
        "2",
        "16.0",
        "1.5",
        "1e3",
        "",
        " true",
        "nan",
    ]
    for value in (*texts, 0, 1, 2, 0.0, 1.0, 16.0, 2.5, [], [1]):
        try:
            theirs = getattr(_TheirFields.model_validate({**VALID, name: value}), name)
            theirs = theirs if math.isfinite(theirs) else None
        except pydantic.ValidationError:
            theirs = None
        found = {f"fp16.{name}": value}
        problems: list[str] = []
        parse_values(found, problems)
        assert found.get(f"fp16.{name}") == theirs
        assert bool(problems) == (theirs is None)


@pytest.mark.parametrize("text", ["false", "False", "0", "off"])
def test_float16_is_off_if_a_string_says_so(text, tmp_path):
    assert translated({"fp16": {"enabled": text}}, tmp_path).precision.compute == "float32"


def test_float16_keeps_own_values_for_auto(tmp_path):
    names = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale".split()
    tree = {"fp16": {"enabled": True, **dict.fromkeys(names, "auto")}}
    ours = translated(tree, tmp_path, "precision.loss_scale_window=7").precision
    assert (ours.compute, ours.loss_scale, ours.loss_scale_window) == ("float16", 65536.0, 7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_offloaded_at_stage_3_only(stage, tmp_path, caplog):
    zero = {"stage": stage, "offload_param": {"device": "cpu", "pin_memory": True}}
    with caplog.at_level("INFO", logger="train"):
        memory = translated({"zero_optimization": zero}, tmp_path).memory
    assert memory.placement == ("host" if stage == 3 else "device")
    assert memory.offload_parameters_fraction == (1 if stage == 3 else 0)
    assert (f"has no effect, because zero_optimization.stage is {stage}" in caplog.text) == (
        stage < 3
    )


@pytest.mark.parametrize(
    "tree, key, expected",
    [
        ({"bfloat16": {"enabled": True}}, "precision.compute", "bfloat16"),
        ({"bf16": None, "bfloat16": {"enabled": True}}, "precision.compute", "bfloat16"),
        ({"zero_optimization": True}, "memory.zero_stage", 1),
        ({"zero_optimization": {"stage": "2"}}, "memory.zero_stage", 2),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "memory.placement", "host"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": False}}, "memory.placement", "device"),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
            "memory.offload_parameters_fraction",
            1.0,
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": None, "offload_optimizer": None}},
            "memory.placement",
            "device",
        ),
        ({"communication_data_type": "FP32"}, "precision.reduce", "float32"),
        ({"gradient_clipping": 1, "steps_per_print": 1e3}, "log.every_steps", 1000),
    ],
)
def test_other_spellings_have_their_meaning(tree, key, expected, tmp_path):
    section, name = key.split(".")
    assert getattr(getattr(translated(tree, tmp_path), section), name) == expected


def test_keys_of_stage_3_have_two_names(tmp_path, caplog):
    names = """
        prefetch_bucket_size param_persistence_threshold model_persistence_threshold
        max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
        module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
        """.split()
    zero = {prefix + name: 1 for prefix in ("", "stage3_") for name in names}
    zero["stage3_gather_fp16_weights_on_model_save"] = 1
    with caplog.at_level("INFO", logger="train"):
        translated({"zero_optimization": zero, "aio": {"queue_depth": 8}}, tmp_path)
    left = set(caplog.messages[0].partition("left to XLA: ")[2].split(", "))
    assert left == {"aio.queue_depth", *(f"zero_optimization.{name}" for name in zero)}


@pytest.mark.parametrize("section", ["fp16", "bf16", "zero_optimization"])
def test_strings_are_read_in_all_keys_that_pydantic_reads(section, tmp_path):
    enabled = {} if section == "zero_optimization" else {"enabled": True}
    values = {
        key.removeprefix(f"{section}."): only
        for key, only in ONLY.items()
        if key.startswith(f"{section}.")
    }
    assert values
    strings = {name: str(value).lower() for name, value in (enabled | values).items()}
    expected = translated({section: enabled | values}, tmp_path)
    assert translated({section: strings}, tmp_path) == expected


def test_cosine_keeps_the_configs_last_rate_for_auto(tmp_path):
    tree = {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "auto"}}}
    run = translated(tree, tmp_path)
    assert run.optimizer.final_learning_rate_fraction == 0.1
    del tree["scheduler"]["params"]["cos_min_ratio"]
    assert translated(tree, tmp_path).optimizer.final_learning_rate_fraction == 1e-4


def test_unknown_warmup_type_is_logarithmic(tmp_path):
    tree = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto"}}}
    assert translated(tree, tmp_path).optimizer.warmup_type == "log"


def test_parameters_on_nvme_have_no_effect_before_stage_3(tmp_path):
    zero = {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}}
    assert translated({"zero_optimization": zero}, tmp_path).memory.placement == "device"
    with pytest.raises(ValueError, match="offload_param.device='nvme' is unknown"):
        translated({"zero_optimization": zero | {"stage": 3}}, tmp_path)


@pytest.mark.parametrize("name", ["fp32", "float32", "torch.float32", "float"])
def test_gradients_are_summed_in_float32_under_any_of_its_names(name, tmp_path):
    translated({"data_types": {"grad_accum_dtype": name}}, tmp_path)
    with pytest.raises(ValueError, match="grad_accum_dtype='bf16' is not supported"):
        translated({"data_types": {"grad_accum_dtype": "bf16"}}, tmp_path)


MICRO = {"train_micro_batch_size_per_gpu": 8}
ACCUMULATED = MICRO | {"gradient_accumulation_steps": 2}
AUTO = ("mesh.auto=True",)
REST = ("mesh.pipeline=1", "mesh.model=1", "mesh.data=-1")


@pytest.mark.parametrize(
    ("tree", "own", "size", "count"),
    [
        (MICRO, AUTO, 8 * 8, 1),  # on 8 devices, with the number of microbatches of the config
        (MICRO, (*AUTO, "mesh.model=2"), 8 * 4, 1),
        (MICRO, (*AUTO, "mesh.data=2", "mesh.fsdp=2"), 8 * 4, 1),
        (MICRO, (*AUTO, "data.global_batch_size=16"), 16, 1),
        (ACCUMULATED, AUTO, 8 * 8 * 2, 2),
        (ACCUMULATED | {"train_batch_size": 48}, AUTO, 48, 2),
        (MICRO | {"train_batch_size": 48}, AUTO, 48, 1),
        (MICRO, REST, 8 * 8, 1),
        (MICRO, (*REST, "mesh.model=2"), 8 * 4, 1),
        (MICRO | {"train_batch_size": 128}, REST, 128, 2),
        (ACCUMULATED | {"train_batch_size": 128}, REST, 128, 2),
    ],
)
def test_micro_batch_size_counts_the_replicas_once_the_devices_are_known(
    tree, own, size, count, tmp_path
):
    run = completed(tree, tmp_path, own)
    assert (run.data.global_batch_size, run.train.num_microbatches) == (size, count)


def test_contradicting_batch_sizes_are_refused_once_the_devices_are_known(tmp_path):
    tree = MICRO | {"train_batch_size": 100}
    with pytest.raises(ValueError, match=r"train_batch_size=100 must equal .* 8 replicas"):
        completed(tree, tmp_path, REST)


def completed(tree: dict, directory: Path, own: tuple[str, ...]) -> RunConfig:
    """Return the config of a run on 8 devices, before its mesh is planned."""
    options = RunOptions(
        config=CONFIG,
        overrides=Overrides.of(own),
        workdir=directory / "run",
        deepspeed=written(tree, directory),
    )
    loaded = _load_config(options)
    return _complete_config(loaded, _start_devices(loaded.config, options, loaded.overrides.keys))


@pytest.mark.parametrize(
    ("tree", "size", "count"),
    [
        ({"train_batch_size": 64}, 64, 1),
        ({"train_micro_batch_size_per_gpu": 3}, 12, 1),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 60, 5),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 64, 8),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 64, 2),
    ],
)
def test_batch_sizes_are_completed(tree, size, count, tmp_path):
    run = translated(tree, tmp_path, "mesh.data=2", "mesh.fsdp=2")
    assert (run.data.global_batch_size, run.train.num_microbatches) == (size, count)


@pytest.mark.parametrize(
    ("scheduler", "schedule", "final"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "constant", 0.1),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": 9}},
            "linear",
            0.0,
        ),
        ({"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}}, "cosine", 1e-4),
    ],
)
def test_schedulers(scheduler, schedule, final, tmp_path):
    run = translated({"scheduler": scheduler}, tmp_path)
    assert run.optimizer.schedule == schedule
    assert run.optimizer.final_learning_rate_fraction == final
    if schedule == "linear":
        assert run.train.num_steps == 9 and run.optimizer.learning_rate == 1e-3
        assert run.optimizer.warmup_steps == 1000


@pytest.mark.thorough
def test_run_trains_with_a_deepspeed_file(corpus_overrides, tmp_path, capsys):
    tree = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_batch_size": 16}
    flags = [f"--config.{override}" for override in (*TINY, *corpus_overrides, "mesh.data=2")]
    where = [f"--config={CONFIG}", f"--workdir={tmp_path}/run"]
    shorter = "--config.train.num_steps=2"
    assert main([*where, f"--deepspeed={written(tree, tmp_path)}", *flags, shorter]) == 0
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "zero_stage: 2" in saved and "compute: bfloat16" in saved
    bad = written({"zero_optimization": {"stage": 7}}, tmp_path)
    assert main([*where, f"--deepspeed={bad}", *flags, shorter]) == REFUSED
    assert "zero_optimization.stage=7 must be an integer from 0 to 3" in capsys.readouterr().err
