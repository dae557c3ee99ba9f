"""Image evaluations count every image exactly once, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.vision.vit import ViT
from tests.data.images.pictures import uneven_images
from tests.runs import FLOAT64, ROOT, make_run
from train.evaluation import evaluate
from train.lifecycle.phases import Phases

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


@pytest.mark.thorough(but=["2x2x2"])
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
