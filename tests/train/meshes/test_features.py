"""Optimizers, layer decay, averages and frozen parameters combined: meshes equal one device."""

import functools

import jax
import numpy as np
import pytest

from data.batches import train_batches
from tests.runs import FLOAT64, TINY, make_run
from train.optim.config import SLICED
from train.state.train_state import average_of

NUM_STEPS = 4
ALL = ("optimizer.layer_decay=0.7", "train.ema_decay=0.6", "optimizer.frozen=*.bias,*.mlp.down.*")
FEATURES = {
    "adamw": (*ALL, "train.ema_schedule=cosine"),
    "lamb": ("optimizer.name=lamb", *ALL),
    "lars": ("optimizer.name=lars", "optimizer.learning_rate=5", *ALL),
    "muon": ("optimizer.name=muon", *ALL),
    "shampoo": ("optimizer.name=shampoo", "optimizer.shampoo_block=24", *ALL),
    "lion": ("optimizer.name=lion", "optimizer.learning_rate=0.001", *ALL),
    "adafactor": ("optimizer.name=adafactor", *ALL),
    "own": ("optimizer.name=tests.runs:factored", *ALL),
    "scaled": (
        "model.scaling=completep",
        "model.base_embed_dim=8",
        "model.base_num_layers=2",
        "model.base_head_dim=2",
        *ALL,
    ),
    "schedule_free": ("optimizer.name=schedule_free", ALL[2]),  # the others do not go with it
    "sgd": ("optimizer.name=sgd", "optimizer.learning_rate=0.1", *ALL),
}
CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
UNEVEN = (*CUBE, "pipeline.layers_per_stage=3,1", "memory.zero_stage=3")
HOSTED = ("memory.placement=host", "memory.offload_parameters_fraction=1.0")
MESHES = {
    "data=4": ("mesh.data=4",),
    "data=4, ZeRO 1": ("mesh.data=4", "memory.zero_stage=1"),
    "data=4, ZeRO 2": ("mesh.data=4", "memory.zero_stage=2"),
    "data=4, ZeRO 3": ("mesh.data=4", "memory.zero_stage=3"),
    "fsdp=4": ("mesh.fsdp=4",),
    "model=2": ("mesh.model=2",),
    "2x2x2": CUBE,
    "2x2x2, ZeRO 1": (*CUBE, "memory.zero_stage=1"),
    "2x2x2, ZeRO 2": (*CUBE, "memory.zero_stage=2"),
    "2x2x2, uneven, ZeRO 3": UNEVEN,
    "chunks": (
        "mesh.pipeline=2",
        "mesh.fsdp=2",
        "pipeline.schedule=zbv",
        "pipeline.chunks=2",
        "pipeline.share_vocab=true",
        "train.remat=none",
    ),
    "host": ("memory.placement=host",),
    "host, 2x2x2, uneven, ZeRO 3": (*UNEVEN, *HOSTED),
}
#: Cases that CI runs; `-m slow` adds the others.
CHOSEN = {
    ("lamb", "2x2x2, uneven, ZeRO 3"),
    ("muon", "host, 2x2x2, uneven, ZeRO 3"),
    ("muon", "2x2x2, ZeRO 1"),
    ("shampoo", "2x2x2, uneven, ZeRO 3"),
    ("lion", "2x2x2, ZeRO 2"),
    ("own", "2x2x2, uneven, ZeRO 3"),
    ("scaled", "host, 2x2x2, uneven, ZeRO 3"),
    ("schedule_free", "2x2x2, uneven, ZeRO 3"),
    ("sgd", "host, 2x2x2, uneven, ZeRO 3"),
}


def combinations():
    for name in FEATURES:
        for mesh in MESHES:
            if name in (*SLICED, "scaled") or "host" not in mesh:
                marks = [pytest.mark.slow] * ((name, mesh) not in CHOSEN)
                yield pytest.param(name, mesh, marks=marks)


def trained(overrides) -> tuple[list[float], list[np.ndarray]]:
    """Return the losses of the first steps, and the final averages in the portable form."""
    run, corpus = make_run(overrides)
    state = run.state_layout.initial()
    losses = []
    batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
    for _ in range(NUM_STEPS):
        batch = run.place_batch(next(batches))
        state, metrics = run.compile_train_step()(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(jax.tree.leaves(average_of(run.state_layout.to_portable(state))))


@functools.cache
def on_one_device(name: str, corpus_overrides: tuple[str, ...]):
    losses, averages = trained((*TINY, *corpus_overrides, *FLOAT64, *FEATURES[name]))
    assert abs(losses[-1] - losses[0]) > 1e-3  # the control: the model learns
    return losses, averages


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "mesh"), list(combinations()))
def test_losses_and_averages_equal_one_device(name, mesh, corpus_overrides):
    with jax.enable_x64(True):
        expected_losses, expected = on_one_device(name, corpus_overrides)
        base = (*TINY, *corpus_overrides, *FLOAT64, *FEATURES[name])
        losses, averages = trained((*base, *MESHES[mesh]))
    # Rounding errors in float64 are about 1e-16 per sum; bugs cause far larger differences.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9, atol=0)
    for found, wanted in zip(averages, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
