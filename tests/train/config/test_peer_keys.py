"""Names of other trainers lead to our keys."""

import dataclasses
from pathlib import Path

import pytest

from models.text.llama import LlamaConfig
from tests.runs import CONFIG
from tests.train.config.loading import load
from train.config.peer_keys import _NAMES, MICROBATCH_SIZE

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("batch_size", "data.global_batch_size"),
        ("train.rampup_batch_size", "data.rampup_batch_size"),
        ("train.gradient_accumulation_steps", "train.num_microbatches"),
        ("micro_batch_size", r"data.global_batch_size / \(train.num_microbatches × replicas\), .*"),
        ("tp", "mesh.model"),
        ("pipeline_model_parallel_size", "mesh.pipeline"),
        ("train.bf16", "precision.compute"),
        ("gradient_checkpointing", "train.remat"),
        ("num-train-epochs", "train.num_epochs"),
        ("train.output_dir", "--workdir"),
        ("train.report_to", "log.trackers"),
        ("early_stopping_patience", "train.early_stopping"),
        ("metric_for_best_model", "checkpoint.best_metric"),
    ],
)
def test_name_of_another_trainer_leads_to_our_key(typed, ours):
    with pytest.raises(ValueError, match=f"--config.{typed}: unknown key; here it is {ours}$"):
        load(CONFIG, [f"{typed}=1"])


def test_every_name_belongs_to_one_key_that_exists():
    names = [name for names in _NAMES.values() for name in names.split()]
    assert len(names) == len({*names})
    reference = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    of_model = [f"model.{field.name}" for field in dataclasses.fields(LlamaConfig)]
    keys = {key for key in _NAMES if f"`{key}`" in reference or key in of_model}
    assert _NAMES.keys() - keys == {"--workdir", MICROBATCH_SIZE}
