"""DeepSpeed JSONs: translation of their keys, and the errors for unsupported ones."""

import json

import pytest

from tests.runs import CONFIG, TINY
from train.config.config_files import load
from train.config.deepspeed import read
from train.config.schema import validate_config
from train.lifecycle.exit_codes import REFUSED
from train.main import main

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


def written(tree: dict, tmp_path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(tree))
    return str(path)


def translated(tree: dict, tmp_path, *own: str):
    """Return the run config for a JSON, with command-line overrides."""
    found = read(written(tree, tmp_path), load(CONFIG, own))
    return validate_config(load(CONFIG, [*found, *own]))


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


def test_sgd_has_pytorchs_defaults(tmp_path):
    params = {"momentum": 0.8, "dampening": 0, "nesterov": False, "weight_decay": 1e-4}
    found = translated({"optimizer": {"type": "SGD", "params": params}}, tmp_path).optimizer
    assert (found.name, found.momentum, found.weight_decay) == ("sgd", 0.8, 1e-4)
    found = translated({"optimizer": {"type": "SGD"}}, tmp_path).optimizer
    assert (found.momentum, found.weight_decay, found.learning_rate) == (0.0, 0.0, 1e-3)


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


@pytest.mark.parametrize(
    ("tree", "messages"),
    [
        ({"zero_optimisation": {"stage": 3}}, ["zero_optimisation.stage is not supported"]),
        (
            {"gradient_cliping": 1, "sparse_attention": {"mode": "fixed"}},
            [
                "gradient_cliping is not supported; the nearest known key is "
                "gradient_clipping; sparse_attention.mode is not supported"
            ],
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["are both enabled; choose one"]),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            ["zero_optimization.offload_param.device='nvme' is unknown; choose cpu or none"],
        ),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1}}}, ["'Lamb' is not supported"]),
        ({"optimizer": {"type": "OneBitLamb"}}, ["'OneBitLamb' is not supported"]),
        (
            {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
            ["optimizer.params.nesterov=True is not supported; the only valid value is False"],
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            ["optimizer.params.adam_w_mode=False is not supported; the only valid value is True"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            ["warmup_type='log' is not supported; the only valid value is 'linear'"],
        ),
        ({"scheduler": {"type": "OneCycle"}}, ["choose WarmupLR, WarmupDecayLR, WarmupCosineLR"]),
        ({"wandb": {"enabled": True, "team": "x"}}, ["set wandb.enabled to false"]),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4},
            ["train_batch_size=30 must equal train_micro_batch_size_per_gpu=4"],
        ),
        ({"communication_data_type": "int8"}, ["choose fp32, bf16, fp16"]),
        ({"prescale_gradients": True}, ["prescale_gradients=True is not supported"]),
    ],
)
def test_keys_without_counterpart_are_listed_and_rejected(tree, messages, tmp_path):
    with pytest.raises(ValueError) as caught:
        translated(tree, tmp_path)
    for message in messages:
        assert message in str(caught.value)


def test_many_unknown_keys_are_counted(tmp_path):
    with pytest.raises(ValueError, match="unknown_9 is not supported.*; 4,990 further keys are"):
        translated({f"unknown_{i}": i for i in range(5000)}, tmp_path)


@pytest.mark.parametrize("key", ["lr", "eps"])
def test_huge_numbers_are_refused_by_name(key, tmp_path):
    path = tmp_path / "deepspeed.json"
    params = {"lr": 1e-3, key: 10**400}
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": params}}))
    message = rf"optimizer\.params\.{key}=an integer of 400 digits must be finite"
    with pytest.raises(ValueError, match=message):
        read(str(path), load(CONFIG))


def test_invalid_file_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="the file does not exist"):
        read(str(tmp_path / "none.json"), load(CONFIG))
    path = tmp_path / "ds.json"
    path.write_text("{'stage': 3}")
    with pytest.raises(ValueError, match="is not valid JSON"):
        read(str(path), load(CONFIG))
    path.write_text("[]")
    with pytest.raises(ValueError, match="must contain a JSON object"):
        read(str(path), load(CONFIG))


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
    assert "memory.zero_stage=7 is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"train_batch_size": ""}, "train_batch_size='' must be an integer from 1 to"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu=0 must be an int"),
        ({"fp16": {"enabled": True, "initial_scale_power": 10**8}}, "must be an integer from 0 to"),
        ({"optimizer": {"type": "Adam", "params": {"betas": True}}}, "betas=True must be a list"),
        ({"scheduler": {"type": ["WarmupLR"]}}, r"scheduler.type=\['WarmupLR'\] must be a string"),
    ],
)
def test_values_of_wrong_types_are_refused_by_name(tree, message, tmp_path):
    (tmp_path / "deepspeed.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=message):
        read(str(tmp_path / "deepspeed.json"), load(CONFIG))
