"""Small runs for tests: a tiny GPT-2 on a small real text."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from data.batches import train_batches
from data.corpus import load_corpus
from data.examples import Corpus
from models.layers.basic import lookup
from models.text.gpt2 import GPT2
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.assemble import assemble_run
from train.run.run import Run

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "configs" / "gpt2.py")

#: A model with dropout, whose heads, layers and vocab every tested mesh divides.
TINY = (
    "data.name=text",
    "data.tokenizer=bytes",
    "data.sequence_length=16",
    "data.global_batch_size=16",
    "data.validation_fraction=0.2",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.embed_dim=32",
    "model.dropout=0.1",
    "train.num_microbatches=2",
    "train.num_steps=20",
    "optimizer.warmup_steps=5",
    "optimizer.learning_rate=0.01",
    "log.every_steps=1",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
)
FLOAT64 = ("precision.compute=float64", "precision.params=float64")


def write_corpus(directory: Path) -> tuple[str, ...]:
    """Write a small text into `directory`; return the overrides to train on it."""
    text = Path(json.__file__).with_name("decoder.py").read_text()
    for i in range(10):
        (directory / f"part_{i}.txt").write_text(text[i * 1000 : (i + 1) * 1000])
    return (f"data.paths={directory}/*.txt", f"data.cache_dir={directory}/cache")


def placed_batch(run: Run, corpus: Corpus, **changes: np.ndarray) -> dict[str, jax.Array]:
    """Return the first training batch on the mesh, with some of its arrays replaced."""
    batch = (
        next(train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)) | changes
    )
    return run.place_batch(batch)


def arguments(workdir: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command-line arguments to train with these overrides."""
    flags = [f"--config.{override}" for override in overrides]
    return [f"--config={CONFIG}", f"--workdir={workdir}", *flags]


def make_run(
    overrides: Sequence[str], config: str = CONFIG, platform: str | None = None
) -> tuple[Run, Corpus]:
    """Return a run and its corpus; the caller sets `jax_enable_x64`.

    Args:
        overrides: overrides of the config.
        config: config file.
        platform: "cpu" or "gpu", whose first devices the run uses; None: jax's default.
    """
    validated = validate_config(load(config, overrides))
    corpus = load_corpus(validated.data, validated.images)
    mesh = validated.make_mesh(jax.devices(platform))
    num_labels = len(corpus.labels) or None
    run = assemble_run(validated, mesh, vocab_size=corpus.vocab_size, num_labels=num_labels)
    return run, corpus


def losses(run: Run, corpus: Corpus, num_steps: int) -> list[float]:
    """Return the losses of the first steps."""
    return list(itertools.islice(_each_loss(run, corpus), num_steps))


def _each_loss(run: Run, corpus: Corpus) -> Iterator[float]:
    """Train from the initial state; yield the loss of each step."""
    state = run.state_layout.initial()
    for batch in train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed):
        state, metrics = run.compile_train_step()(state, run.place_batch(batch))
        yield float(metrics["loss"])


def digest(params) -> str:
    """Return a hash of the bits of all parameters, whatever their sharding."""
    state = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        state.update(str(path).encode())
        state.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return state.hexdigest()


@functools.cache
def _reference_run(overrides: tuple[str, ...]) -> tuple[Run, Corpus]:
    """Return a run on one device and its corpus; assembled once per process."""
    run, corpus = make_run(overrides)
    assert run.mesh.size == 1
    return run, corpus


@functools.cache
def reference_digest(overrides: tuple[str, ...]) -> str:
    """Return the digest of the initial parameters on one device."""
    run, _ = _reference_run(overrides)
    return digest(run.state_layout.initial().params)


@functools.cache
def _reference_steps(overrides: tuple[str, ...]) -> tuple[Iterator[float], list[float]]:
    """Return an iterator over the losses of a run on one device, and an empty list for them."""
    return _each_loss(*_reference_run(overrides)), []


def reference_losses(overrides: tuple[str, ...], num_steps: int) -> list[float]:
    """Return the losses of a run on one device; each step is computed once per process."""
    steps, values = _reference_steps(overrides)
    values.extend(itertools.islice(steps, max(0, num_steps - len(values))))
    return values[:num_steps]


def squared_error(logits, targets):
    """A token loss that needs logits over the whole vocab."""
    return (logits**2).sum(axis=1) - logits[:, 0] * targets


def factored(config, schedule):
    """An optimizer whose state has other shapes than the parameters."""
    return optax.adafactor(schedule, min_dim_size_to_factor=2)


class OwnHead(GPT2):
    """A model with its own head, which inherits `can_share_vocab` from a model with another."""

    def head(self, x_BTD, batch):
        return super().head(x_BTD, batch)


class LooksUpLate(GPT2):
    """A model that reads a vocab-shared table in a function that a single stage runs."""

    can_share_vocab = True

    def before_decoder(self, x_BTD, batch):
        return x_BTD + lookup(self.token_embedding[...], batch["tokens"])


class NeedsWholeVocab(GPT2):
    """A model that does not support a part of the vocab."""

    can_share_vocab = False
