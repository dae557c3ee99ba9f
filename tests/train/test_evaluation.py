"""Metrics do not depend on how rows are grouped, and evaluations count every row exactly once."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batches import validation_batches
from models.stack import run_layers
from models.text.gpt2 import GPT2
from models.vision.vit import ViT
from tests.data.images.pictures import uneven_images
from tests.runs import FLOAT64, ROOT, make_run, placed_batch, write_corpus
from train.evaluation import evaluate
from train.lifecycle.phases import Phases
from train.references import add_references

SHARED = (
    "data.validation_fraction=0.3",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embed_dim=8",
    "eval.every_steps=0",
    *FLOAT64,
)
TEXT = (*SHARED, "data.name=text", "data.tokenizer=bytes", "data.sequence_length=24")
MLP = "model.mlp_dim=12"
T5 = (*TEXT, MLP, "model.num_decoder_layers=1", "model.head_dim=4", "data.target_length=16")
IMAGES = (
    *SHARED,
    MLP,
    "data.name=tests.data.images.pictures:uneven_images",
    "images.crop_scale=(1.0,1.0)",
)
#: Objective -> (config, overrides). A loss over the whole batch (`image_contrast`) is not here: it
#: compares the rows of a batch with each other.
OBJECTIVES = {
    "causal_lm": ("gpt2", TEXT),
    "masked_lm": ("bert", (*TEXT, MLP, "model.head=masked_lm")),
    "masked_lm_pairs": ("bert", (*TEXT, MLP, "model.head=pretraining")),
    "span_corruption": ("t5", T5),
    "seq2seq": ("t5", T5),
    "classification": ("bert", (*TEXT, MLP, "model.head=sequence")),
    "chat": ("gpt2", (*TEXT, "data.chat_template=roles", "data.sequence_length=96")),
    "preference": ("gpt2", (*TEXT, "data.chat_template=roles", "data.sequence_length=96")),
    "image_classification": ("vit", IMAGES),
    "image_reconstruction": (
        "mae",
        (*IMAGES, "model.decoder_embed_dim=8", "model.decoder_mlp_dim=12"),
    ),
}
#: Overrides of a model with metrics of its own, for the objective `causal_lm`.
OWN_METRICS = f"model.name={__name__}:GPT2WithMetrics"
SPACE = 32
#: (global batch size, number of microbatches) of evaluations. The last batch is never full.
GROUPS = [(1, 1), (2, 2), (8, 4), (16, 1)]
#: float64 with sums of a few thousand numbers in another order.
TOLERANCE = 1e-11


class GPT2WithMetrics(GPT2):
    """A model whose metric has weights of its own: how many spaces it expects before spaces."""

    objectives = ("causal_lm",)

    def head(self, x_BTD, batch):
        loss, weight, _ = super().head(x_BTD, batch)
        is_right = jnp.argmax(self.logits(x_BTD), axis=-1) == batch["targets"]
        weights = batch["weights"] * (batch["targets"] == SPACE)
        surprise = jnp.square(x_BTD).mean(axis=-1)
        return (
            loss,
            weight,
            {
                "space_accuracy": (jnp.sum(is_right * weights), jnp.sum(weights)),
                "space_surprise": (jnp.sum(surprise * weights), jnp.sum(weights)),
                "surprise": jnp.sum(surprise * batch["weights"]),
            },
        )


def records(objective: str) -> list[dict[str, Any]]:
    """Return examples of an objective that reads records, of different lengths."""
    found = []
    for i in range(90):
        text = f"say {i} times " + "ab" * (i % 7)
        answer = f"{i}!" + "yes " * (i % 5)
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        found.append(
            {
                "seq2seq": {"text": text, "target": answer},
                "classification": {"text": text, "label": f"label {i % 3}"},
                "chat": {"messages": chat},
                "preference": {"prompt": text, "chosen": answer, "rejected": "no" * (1 + i % 4)},
            }[objective]
        )
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function: objective -> overrides for the data."""
    directory = tmp_path_factory.mktemp("corpus")
    text = write_corpus(directory)

    def overrides(objective: str) -> tuple[str, ...]:
        if objective.startswith("image"):
            return (f"data.cache_dir={directory}/cache",)
        if objective in ("seq2seq", "classification", "chat", "preference"):
            path = directory / f"{objective}.jsonl"
            path.write_text("".join(json.dumps(each) + "\n" for each in records(objective)))
            return (f"data.paths={path}", f"data.cache_dir={directory}/cache")
        return text

    return overrides


def run_of(objective: str, files, *changes: str):
    """Return (run, corpus, its initial state with larger weights, so that rows differ more)."""
    config, overrides = OBJECTIVES[objective]
    overrides = (*overrides, *files(objective), f"data.objective={objective}", *changes)
    run, corpus = make_run(overrides, str(ROOT / "configs" / f"{config}.py"))
    state = run.state_layout.initial()
    if objective == "preference":
        add_references(run, corpus, state.params, 0, Path("not written"))
    params = jax.tree.map(lambda leaf: 3 * leaf, state.params)
    return run, corpus, dataclasses.replace(state, params=params)


def by_rows(run, corpus, state) -> dict[str, float]:
    """Return the metrics from one row at a time, without a training or evaluation step.

    Every number is a sum over rows of a row's mean times its weight, divided by all weights.
    """
    functions = run.functions
    parts = functions.split(state.params)

    @jax.jit
    def head(batch):
        x = functions.embed(parts["non_stack"], batch)
        for stack, block in functions.blocks.items():
            if stack in functions.before:
                x = functions.before[stack](parts["non_stack"], x, batch)
            x = run_layers(block, parts["stacks"][stack], x, batch)
        return functions.head(parts["non_stack"], x, batch)

    config = dataclasses.replace(run.config.data, global_batch_size=1)
    rows = []
    for batch in validation_batches(corpus, config, [0]):
        loss, weight, metrics = jax.device_get(head(batch))
        pairs = {name: v if isinstance(v, tuple) else (v, weight) for name, v in metrics.items()}
        losses = loss if isinstance(loss, dict) else {"loss": loss}
        weights = weight if isinstance(weight, dict) else {"loss": weight}
        rows.append(pairs | {name: (losses[name], weights[name]) for name in losses})
    means = {}
    for name in rows[0]:
        values, weights = np.array([row[name] for row in rows], np.float64).T
        means[f"eval_{name}"] = values.sum() / weights.sum()
    if "eval_loss" not in means:
        means["eval_loss"] = means["eval_mlm_loss"] + means["eval_nsp_loss"]
    return means


def check_groups(objective, files, groups, *changes: str):
    """Check that evaluations with each grouping of the rows equal the reference by rows."""
    expected = None
    with jax.enable_x64(True):
        for size, num_microbatches in groups:
            sizes = (f"data.global_batch_size={size}", f"train.num_microbatches={num_microbatches}")
            run, corpus, state = run_of(objective, files, *sizes, *changes)
            if expected is None:
                expected = by_rows(run, corpus, state)
            found = evaluate(run, corpus, state, Phases())
            assert found is not None
            found.pop("eval_perplexity", None)
            assert found == pytest.approx(expected, rel=TOLERANCE, abs=0), (size, num_microbatches)
    assert expected is not None
    return expected


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_evaluation_does_not_depend_on_the_batch_size(objective, files):
    check_groups(objective, files, GROUPS)


@pytest.mark.thorough
def test_evaluation_of_two_losses_does_not_depend_on_the_batch_size(files):
    """Rows have different numbers of masked tokens, but one label each."""
    metrics = check_groups("masked_lm_pairs", files, [(8, 4)])
    assert metrics.keys() == {
        f"eval_{name}" for name in ("loss", "mlm_loss", "nsp_loss", "nsp_accuracy")
    }


@pytest.mark.thorough
def test_metrics_with_weights_of_their_own_do_not_depend_on_the_batch_size(files):
    metrics = check_groups("causal_lm", files, [(8, 4)], OWN_METRICS)
    assert metrics["eval_space_surprise"] != pytest.approx(metrics["eval_surprise"], rel=1e-3)


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        *(pytest.param(name, (), marks=pytest.mark.thorough) for name in OBJECTIVES),
        pytest.param("masked_lm_pairs", (), id="two losses", marks=pytest.mark.thorough),
        pytest.param("causal_lm", (OWN_METRICS,), id="own metrics", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.drawn(1)
def test_training_metrics_do_not_depend_on_the_number_of_microbatches(objective, changes, files):
    found = []
    with jax.enable_x64(True):
        for count in (1, 8):
            sizes = ("data.global_batch_size=8", f"train.num_microbatches={count}")
            run, corpus, state = run_of(objective, files, *sizes, *changes)
            _, metrics = run.compile_train_step()(state, placed_batch(run, corpus))
            found.append({name: float(value) for name, value in metrics.items()})
    assert found[0] == pytest.approx(found[1], rel=TOLERANCE, abs=0)


#: There are 37 validation images, which no mesh and no batch size divides.
VIT = (
    "data.name=tests.data.images.pictures:uneven_images",
    "data.global_batch_size=8",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embed_dim=8",
    "model.mlp_dim=12",
    "train.num_microbatches=2",
    "eval.every_steps=0",
    "images.crop_scale=(1.0,1.0)",
    *FLOAT64,
)
MESHES = {
    "one device": (),
    "data=4": ("mesh.data=4",),
    "fsdp=4": ("mesh.fsdp=4",),
    "pipeline=2": ("mesh.pipeline=2",),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
}


def by_hand(run, state):
    """Return loss and accuracies of a single forward pass over all images on one device."""
    pairs = uneven_images()["validation"]
    images = np.stack([image for image, _ in pairs])
    labels = np.array([label for _, label in pairs])
    graph, _ = nnx.split(run.model)
    model = nnx.merge(graph, nnx.State(jax.device_get(run.state_layout.to_portable(state).params)))
    assert isinstance(model, ViT) and len(images) == 37
    logits = np.asarray(model(jnp.asarray(images)))
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(37), labels]
    ranks = (logits > logits[np.arange(37), labels][:, None]).sum(axis=1)
    return {
        "eval_loss": losses.mean(),
        "eval_accuracy": np.mean(ranks < 1),
        "eval_top5_accuracy": np.mean(ranks < 5),
    }


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_each_image_counts_once(mesh, tmp_path):
    with jax.enable_x64(True):
        overrides = (*VIT, *MESHES[mesh], f"data.cache_dir={tmp_path}")
        run, corpus = make_run(overrides, str(ROOT / "configs" / "vit.py"))
        assert len(corpus.validation) % run.config.data.global_batch_size
        state = run.state_layout.initial()
        # Weights large enough that predictions differ between images.
        state = dataclasses.replace(state, params=jax.tree.map(lambda leaf: 8 * leaf, state.params))
        found = evaluate(run, corpus, state, Phases())
        expected = by_hand(run, state)
    assert found is not None and found.keys() == expected.keys()
    assert 0 < expected["eval_accuracy"] < expected["eval_top5_accuracy"] < 1
    for name, value in expected.items():
        # Rounding errors of float64; an image that counts twice or never changes the values more.
        assert found[name] == pytest.approx(value, rel=1e-12, abs=0), name
