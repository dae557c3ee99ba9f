"""Tests of MoCo v3 against the paper's algorithm in PyTorch, and in the training step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

from data.batches import train_batches
from models.vision.moco import MoCo, MoCoConfig
from sharding.batches import place_batch
from tests.runs import FLOAT64, ROOT, make_run
from tests.train.meshes.models_on_meshes import MODELS, SHARED, losses_on
from train.state.train_state import average_of

SIZES = {
    **{"image_size": 4, "num_channels": 1, "patch_size": 2, "num_layers": 2, "num_heads": 2},
    **{"embed_dim": 8, "mlp_dim": 12, "hidden_dim": 10, "projection_dim": 6, "temperature": 0.3},
}
NUM_IMAGES = 5


@pytest.fixture(scope="module")
def functions():
    """Return a model, its activations for two views, and a batch whose third row is padding."""
    with jax.enable_x64(True):
        # One program compiles faster than each of its operations alone.
        model = nnx.jit(lambda: MoCo(MoCoConfig(**SIZES), rngs=nnx.Rngs(0)))()
        graph, params = nnx.split(model)
        random = np.random.default_rng(0)

        def draw(leaf):
            return jnp.asarray(0.5 * random.normal(size=leaf.shape))

        model = nnx.merge(graph, jax.tree.map(draw, params))
        batch = {
            "images": jnp.asarray(random.integers(256, size=(NUM_IMAGES, 2, 4, 4, 1)), jnp.uint8),
            "weights": jnp.asarray([1.0, 1.0, 0.0, 1.0, 1.0]),
        }
        keys = random.normal(size=(NUM_IMAGES, 2, 6))
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        x_BVTD = jax.jit(lambda: model.encoder(model.embed(batch), batch))()
        yield model, x_BVTD, batch | {"keys": jnp.asarray(keys)}


def theirs(projector, x: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's output of a projector for one view of the images with a weight."""
    layers = [layer for layer in (projector.first, projector.middle, projector.last) if layer]
    for layer in layers:
        x = x @ torch.tensor(np.asarray(layer.linear.kernel[...]))
        affine = (layer.norm.scale, layer.norm.bias)
        scale, bias = (None if p is None else torch.tensor(np.asarray(p[...])) for p in affine)
        x = functional.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
        x = functional.relu(x) if layer is not layers[-1] else x
    return x


@pytest.mark.thorough
def test_loss_equals_the_papers_over_weighted_images(functions):
    model, x_BVTD, batch = functions
    counts = np.asarray(batch["weights"]) > 0
    with jax.enable_x64(True):
        loss, weight, metrics = jax.jit(model.head)(x_BVTD, batch)
        features = np.asarray(model.final_norm(x_BVTD[:, :, 0]))[counts]
    keys = torch.tensor(np.asarray(batch["keys"])[counts])
    temperature = SIZES["temperature"]
    expected = hits = 0.0
    for view in (0, 1):
        queries = theirs(model.predictor, theirs(model.projector, torch.tensor(features[:, view])))
        logits = functional.normalize(queries) @ keys[:, 1 - view].T / temperature
        own = torch.arange(len(logits))
        expected += 2 * temperature * functional.cross_entropy(logits, own, reduction="sum")
        hits += (logits.argmax(dim=1) == own).double().sum() / 2
    assert weight == 4.0
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-12)
    assert metrics["contrast_accuracy"] == hits.item()


def test_keys_are_normalised_projections_of_each_view(functions):
    model, x_BVTD, batch = functions
    counts = np.asarray(batch["weights"]) > 0
    with jax.enable_x64(True):
        keys = np.asarray(model.teach(x_BVTD, batch)["keys"])[counts]
        features = np.asarray(model.final_norm(x_BVTD[:, :, 0]))[counts]
    for view in (0, 1):
        expected = functional.normalize(theirs(model.projector, torch.tensor(features[:, view])))
        np.testing.assert_allclose(keys[:, view], expected, rtol=0, atol=1e-12)


@pytest.mark.thorough
def test_padding_of_a_batch_changes_neither_loss_nor_gradients(functions):
    model, _, batch = functions
    graph, params = nnx.split(model)

    def loss(params, batch):
        model = nnx.merge(graph, params)
        return model.head(model.encoder(model.embed(batch), batch), batch)[0]

    with jax.enable_x64(True):
        other = batch | {"images": batch["images"].at[2].set(7), "keys": batch["keys"].at[2].set(0)}
        found, expected = (jax.value_and_grad(loss)(params, b) for b in (other, batch))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
def test_views_share_the_encoder_but_not_the_dropout():
    config = MoCoConfig(**SIZES, drop_path=0.9, dropout=0.5)
    model = MoCo(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    images = jnp.asarray(random.integers(256, size=(NUM_IMAGES, 1, 4, 4, 1)), jnp.uint8)
    batch = {"images": jnp.repeat(images, 2, axis=1)}
    x = model.encoder(model.embed(batch), batch)
    np.testing.assert_array_equal(x[:, 0], x[:, 1])
    batch["dropout_keys"] = jax.random.split(jax.random.key(0), NUM_IMAGES)
    x = model.encoder(model.embed(batch), batch)
    assert all(np.any(x[i, 0] != x[i, 1]) for i in range(NUM_IMAGES))


@pytest.mark.thorough
def test_step_computes_keys_with_the_average():
    """After a step, the teacher differs from the model; compute the next loss from both by hand."""
    with jax.enable_x64(True):
        config = str(ROOT / "configs" / "moco.py")
        without_dropout = ("model.dropout=0.0", "model.drop_path=0.0")
        run, corpus = make_run((*SHARED, *MODELS["MoCo v3"][1], *FLOAT64, *without_dropout), config)
        state = run.state_layout.initial()
        graph = nnx.split(run.model)[0]
        batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)

        def outputs(params, batch, method):
            model: Any = nnx.merge(graph, params)
            return getattr(model, method)(model.encoder(model.embed(batch), batch), batch)

        for _ in range(2):
            batch = next(batches)
            plain = {name: jnp.asarray(value) for name, value in batch.items() if name != "index"}
            student, teacher = (jax.device_get(p) for p in (state.params, average_of(state)))
            keys = outputs(teacher, plain, "teach")
            loss, weight, _ = outputs(student, plain | keys, "head")
            placed = place_batch(batch, run.rows, run.batch_layout, 8)
            sums = run.compile_eval_step()(*run.params_to_evaluate(state), placed)
            state, metrics = run.compile_train_step()(state, placed)
            np.testing.assert_allclose(metrics["loss"], loss / weight, rtol=1e-12)
            np.testing.assert_allclose(sums["loss"], loss, rtol=1e-12)
        own = outputs(student, plain, "teach")
        assert np.abs(own["keys"] - keys["keys"]).max() > 1e-3


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.num_microbatches=2", "train.num_microbatches=2: MoCo compares all examples of a"),
        ("train.ema_decay=None", "train.ema_decay=None: MoCo learns from an average of its"),
        ("model.temperature=0.0", "model.temperature=0.0 must be above 0; choose for example 0.2"),
        ("model.hidden_dim=0", "model.hidden_dim=0"),
        ("data.objective=image_classification", "choose image_contrast"),
    ],
)
def test_incompatible_settings_are_rejected(override, message):
    with pytest.raises(ValueError, match=message):
        make_run((*SHARED, *MODELS["MoCo v3"][1], override), str(ROOT / "configs" / "moco.py"))


@pytest.mark.thorough
def test_teacher_can_be_in_device_or_host_memory():
    """In host memory, or sharded over replicas and stages, losses equal those on one device."""
    split = ("mesh.pipeline=2", "mesh.data=2", "memory.zero_stage=2", "memory.placement=host")
    np.testing.assert_allclose(
        losses_on("MoCo v3", split), losses_on("MoCo v3", ()), rtol=1e-9, atol=0
    )
