"""Names of other trainers lead to our keys."""

import dataclasses
import re
from pathlib import Path

import pytest

from models.text.gpt2 import GPT2Config
from models.text.llama import LlamaConfig
from tests.runs import CONFIG
from tests.train.config.loading import load
from train.config.peer_keys import _EXPLANATIONS, _NAMES, MICROBATCH_SIZE

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
        ("train.bf16", "precision.compute=bfloat16"),
        ("gradient_checkpointing", "train.remat=full"),
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


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("sequence_parallel", "XLA and Taibai decide about it, so it has no key"),
        ("overlap-grad-reduce", "XLA and Taibai decide about it, so it has no key"),
        ("model.swiglu", "configs/llama.py has SwiGLU"),
        ("position_embedding_type", "GPT-2, OPT and BERT learn positions"),
        ("attention_dropout", "model.dropout is for embeddings"),
        ("train.train_samples", "train.num_steps, which is samples / data.global_batch_size"),
        ("split", "data.validation_fraction"),
        ("no_load_optim", "init_from reads only parameters"),
        ("num_layers", "here it is model.num_layers"),
        ("num_experts", "here it is model.num_experts"),
        ("model.num_experts", "the model of this config has no such field"),
        ("kv_channels", "here it is model.head_dim"),
        ("moe_aux_loss_coeff", "here it is model.router_loss"),
        ("save", "here it is --workdir"),
    ],
)
def test_name_of_megatron_leads_to_our_key_or_a_sentence(typed, hint):
    with pytest.raises(ValueError, match=f"--config.{typed}: unknown key; .*{hint}"):
        load(CONFIG, [f"{typed}=1"])


def test_key_without_a_similar_one_suggests_none():
    with pytest.raises(ValueError, match="--config.swigloo: unknown key$"):
        load(CONFIG, ["swigloo=1"])


def test_every_name_belongs_to_one_key_that_exists():
    names = [name for names in (*_NAMES.values(), *_EXPLANATIONS) for name in names.split()]
    assert len(names) == len({*names})
    known = known_keys()
    assert _NAMES.keys() - known == {"--workdir", MICROBATCH_SIZE}
    sections = {key.partition(".")[0] for key in known}
    spans = re.findall(r"\b[a-z]+\.[a-z_]+\b", " ".join(_EXPLANATIONS.values()))
    keys = {span for span in spans if span.partition(".")[0] in sections}
    assert keys and keys <= known


def known_keys() -> set[str]:
    reference = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    models = (GPT2Config, LlamaConfig)
    fields = {field.name for model in models for field in dataclasses.fields(model)}
    return {*re.findall(r"^\| `([\w.]+)` \|", reference, re.M), *(f"model.{f}" for f in fields)}


def test_all_unknown_keys_are_named_at_once():
    typed = ["optimizer.lr=1e-3", "train.num_steps=4", "bf16=true"]
    expected = (
        "--config.optimizer.lr: unknown key; here it is optimizer.learning_rate; and "
        "--config.bf16: unknown key; here it is precision.compute=bfloat16"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        load(CONFIG, typed)
