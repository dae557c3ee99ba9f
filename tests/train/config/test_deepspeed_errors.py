"""DeepSpeed JSONs that cannot be translated are refused, and their problems named."""

import json

import pytest

from tests.runs import CONFIG
from tests.train.config.deepspeed_jsons import translated
from train.config.config_files import load
from train.config.deepspeed import read


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
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
            ["optimizer.warmup_type='cubic' is unknown; choose linear or log"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}},
            ["scheduler.params.total_num_steps is not a parameter of WarmupLR"],
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
            ["optimizer.params.momentum is not a parameter of AdamW"],
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            ["offload_optimizer needs zero_optimization.stage=1, 2 or 3, not 0"],
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                }
            },
            ["offload_optimizer.ratio=0.5 needs zero_optimization.stage=3, not 2"],
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            ["cpu_offload is the old name of zero_optimization.offload_optimizer; remove"],
        ),
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
            ["bf16 and bfloat16 are names of the same section"],
        ),
        (
            {"fp16.enabled": True},
            ["'fp16.enabled' is not supported; the nearest known key is fp16"],
        ),
        (
            {"fp16": {"enabled": True, "loss_scale_window": 0}},
            ["fp16.loss_scale_window=0 must be at least 1 for a dynamic loss scale"],
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            ["zero_quantized_weights=True is not supported; the only valid value is False"],
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
    path.write_text('{"zero_optimization": {"stage": 3, "stage": 2}}')
    with pytest.raises(ValueError, match="has the key 'stage' twice in the same object"):
        read(str(path), load(CONFIG))


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"train_batch_size": ""}, "train_batch_size='' must be an integer from 1 to"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu=0 must be an int"),
        ({"fp16": {"enabled": True, "initial_scale_power": 10**8}}, "must be an integer from 0 to"),
        ({"optimizer": {"type": "Adam", "params": {"betas": True}}}, "betas=True must be a list"),
        ({"scheduler": {"type": ["WarmupLR"]}}, r"scheduler.type=\['WarmupLR'\] must be a string"),
        ({"fp16": {"enabled": "maybe"}}, "fp16.enabled='maybe' must be true or false"),
        ({"bf16": {"enabled": 2}}, "bf16.enabled=2 must be true or false"),
        ({"optimizer": {"type": "SGD", "params": {"lr": "0.1"}}}, "lr='0.1' must be a number"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "betas=.* must be two numb"),
        ({"zero_optimization": {"stage": 2.5}}, "stage=2.5 must be an integer from 0 to 3"),
    ],
)
def test_values_of_wrong_types_are_refused_by_name(tree, message, tmp_path):
    (tmp_path / "deepspeed.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=message):
        read(str(tmp_path / "deepspeed.json"), load(CONFIG))
