"""Tests of ResMLP against the paper's formulas in PyTorch, of its sizes, and of its errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from configs.resmlp import get_config
from models.vision.resmlp import Block, ResMLP, ResMLPConfig

LAYERS = 3
IMAGES = np.random.default_rng(0).normal(size=(4, 11, 11, 2))
CONFIG = ResMLPConfig(
    image_size=11,
    patch_size=3,
    num_channels=2,
    num_layers=LAYERS,
    embed_dim=8,
    mlp_dim=20,
    layer_scale=0.1,
    num_labels=5,
)


def random_params() -> tuple[Any, Any]:
    """Return the graph, and float64 parameters that are all random, including biases and scales."""
    graph, params = nnx.split(ResMLP(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    drawn = jax.tree.map(lambda x: rng.normal(size=x.shape) * 0.5, nnx.to_pure_dict(params))
    return graph, drawn


def their_logits(params: Any) -> torch.Tensor:
    """Return the logits of IMAGES by equations 1 to 3 of the paper's section 2."""

    def affine(x: torch.Tensor, p: Any) -> torch.Tensor:
        return torch.diag(p["scale"]) @ x + p["bias"][:, None]

    embedding = params["patch_embedding"]["linear"]
    pixels = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    kernel = embedding["kernel"].permute(3, 2, 0, 1)
    x = torch.nn.functional.conv2d(pixels, kernel, embedding["bias"], stride=3).flatten(2)
    for i in range(LAYERS):
        p = _at(params["encoder"]["layers"], i)
        a = p["across_patches"]
        up = p["mlp"]["up"]
        down = p["mlp"]["down"]
        z = affine(x, p["patches_affine"]) @ a["kernel"] + a["bias"]
        x = x + torch.diag(p["patches_scale"]["scale"]) @ z
        z = affine(x, p["mlp_affine"])
        z = torch.nn.functional.gelu(up["kernel"].T @ z + up["bias"][:, None])
        z = down["kernel"].T @ z + down["bias"][:, None]
        x = x + torch.diag(p["mlp_scale"]["scale"]) @ z
    mean = affine(x, params["final_affine"]).mean(dim=2)
    return mean @ params["classifier"]["kernel"] + params["classifier"]["bias"]


def _at(tree: Any, layer: int) -> Any:
    return jax.tree.map(lambda x: x[layer], tree)


@pytest.mark.thorough
def test_logits_and_gradients_equal_the_papers_formulas():
    graph, params = random_params()
    directions = np.random.default_rng(2).normal(size=(4, 5))
    theirs = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    expected = their_logits(theirs)
    (expected * torch.from_numpy(directions)).sum().backward()
    with jax.enable_x64(True):

        def scalar(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, params)(jnp.asarray(IMAGES))
            return jnp.sum(logits * directions), logits

        gradients, found = jax.grad(scalar, has_aux=True)(jax.tree.map(jnp.asarray, params))
        assert found.dtype == jnp.float64 and np.abs(found).max() > 0.1
        # float64 rounds at 1e-16; sums here have at most 20 terms near 10.
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0, atol=1e-10)
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
            wanted = theirs
            for key in path:
                wanted = wanted[key.key]
            np.testing.assert_allclose(gradient, wanted.grad.numpy(), rtol=0, atol=1e-10)
            assert np.abs(gradient).max() > 1e-3


def test_other_numbers_of_patches_are_rejected():
    model = ResMLP(CONFIG, rngs=nnx.Rngs(0))
    message = "images of 12 × 11 pixels do not fit model.image_size=11: each patch has weights of"
    with pytest.raises(ValueError, match=re.escape(message)):
        model(jnp.zeros((1, 12, 11, 2), jnp.uint8))


@pytest.mark.thorough
def test_every_layer_drops_branches_at_the_same_rate():
    config = ResMLPConfig(**{**vars(CONFIG), "drop_path": 0.3})
    block = Block(config, rngs=nnx.Rngs(0))
    x = jnp.ones((4000, 9, 8))
    keys = jax.random.split(jax.random.key(0), 4000)
    for layer in (0, LAYERS - 1):
        y = np.asarray(block(x, {"layer": jnp.int32(layer)}, keys))
        left = (y == 1).all(axis=(1, 2)).mean()
        # Both branches are dropped; four standard deviations of the mean of 4,000 draws.
        assert abs(left - 0.09) < 4 * (0.09 * 0.91 / 4000) ** 0.5


@pytest.mark.parametrize(
    ("size", "millions"), [("s12", 15), ("s24", 30), ("s36", 45), ("b24", 129)]
)
def test_published_sizes_have_the_published_parameter_counts(size, millions):
    config: Any = get_config(size)
    fields = config.model.to_dict() | {
        "image_size": 224,
        "num_channels": 3,
        "num_labels": 1000,
    }
    del fields["name"]
    model = nnx.eval_shape(lambda: ResMLP(ResMLPConfig(**fields), rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.split(model)[1])))
    assert round(count / 1e6) == millions


def test_branches_start_with_the_layer_scale():
    layers: Any = ResMLP(CONFIG, rngs=nnx.Rngs(0)).encoder.layers
    for scale in (layers.patches_scale.scale[...], layers.mlp_scale.scale[...]):
        np.testing.assert_array_equal(scale, np.full((LAYERS, 8), np.float32(0.1)))
