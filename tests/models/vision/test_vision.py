"""Tests of shared parts of vision models against published formulas and other implementations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.vit_mae import modeling_vit_mae

from models.layers.dropout import drop_path
from models.layers.windows import merge_windows, partition_windows, regions
from models.vision.common import (
    ImageInputConfig,
    drop_path_rate,
    label_loss,
    patchify,
    resized_positions,
    sincos_positions,
)
from models.vision.resmlp import ResMLP, ResMLPConfig
from models.vision.swin import Swin, SwinConfig
from models.vision.vit import ViT, ViTConfig


def test_pixels_are_normalised_by_mean_and_stddev():
    config = ImageInputConfig(image_size=2, image_mean=(0.5, 0.4, 0.3), image_stddev=(0.2,))
    images = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3) * 10
    expected = (images / 255 - np.array([0.5, 0.4, 0.3])) / 0.2
    # float32 rounds once, then bfloat16 does.
    found = config.normalised(jnp.asarray(images), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert config.normalised(jnp.asarray(images), jnp.bfloat16).dtype == jnp.bfloat16
    floating = jnp.asarray(expected, jnp.float32)
    np.testing.assert_array_equal(config.normalised(floating, jnp.float32), floating)


def test_patches_equal_a_convolution():
    images = np.random.default_rng(0).normal(size=(2, 7, 9, 3)).astype(np.float32)
    unfolded = torch.nn.functional.unfold(
        torch.from_numpy(images).permute(0, 3, 1, 2), kernel_size=2, stride=2
    )
    channels_first = jnp.moveaxis(patchify(jnp.asarray(images), 2), -1, -3)
    np.testing.assert_array_equal(
        channels_first.reshape(2, 12, 12), unfolded.permute(0, 2, 1).numpy()
    )


@pytest.mark.parametrize("grid", [(3, 3), (5, 7), (2, 9), (8, 4)], ids=str)
def test_resized_positions_equal_bicubic_interpolation(grid):
    table = np.random.default_rng(0).normal(size=(25, 6)).astype(np.float32)
    square = torch.from_numpy(table).reshape(1, 5, 5, 6).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(
        square, size=grid, mode="bicubic", align_corners=False
    )
    found = resized_positions(jnp.asarray(table), grid)
    # float32 rounding of sums of 16 products.
    np.testing.assert_allclose(
        found, expected.permute(0, 2, 3, 1).reshape(-1, 6).numpy(), rtol=0, atol=1e-5
    )


def test_sincos_positions_equal_the_code_of_masked_autoencoders():
    rows_first = modeling_vit_mae.build_2d_sinusoidal_position_embedding(5, 5, 16).numpy()
    # Published weights have columns first.
    expected = np.roll(rows_first, 8, axis=1)
    # The reference is float32.
    np.testing.assert_allclose(sincos_positions(5, 5, 16), expected, rtol=0, atol=1e-6)


def test_label_loss_equals_cross_entropy_with_soft_targets():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 7)).astype(np.float32)
    batch = {
        "targets": np.array([0, 3, 6, 2]),
        "other_targets": np.array([1, 3, 2, 5]),
        "target_shares": np.array([0.3, 0.8, 1.0, 0.0], np.float32),
        "weights": np.array([1, 1, 0, 1], np.float32),
    }
    eye = np.eye(7)
    shares = batch["target_shares"][:, None]
    soft = shares * eye[batch["targets"]] + (1 - shares) * eye[batch["other_targets"]]
    for keys, smoothing in (({}, 0.0), ({"dropout_keys": None}, 0.1)):
        wanted = torch.nn.functional.cross_entropy(
            torch.from_numpy(logits),
            torch.from_numpy(soft).float(),
            reduction="none",
            label_smoothing=smoothing,
        )
        loss, weight, _ = label_loss(jnp.asarray(logits), batch | keys, smoothing=0.1)
        # float32 rounding.
        np.testing.assert_allclose(loss, (wanted.numpy() * batch["weights"]).sum(), rtol=1e-5)
        assert weight == 3


def test_accuracy_counts_top_k_with_ties_in_label_order():
    logits = np.zeros((3, 8), np.float32)
    logits[1] = np.arange(8)
    batch = {"targets": np.array([0, 3, 4]), "weights": np.ones(3, np.float32)}
    metrics = label_loss(jnp.asarray(logits), batch, smoothing=0.0)[2]
    assert metrics == {"accuracy": 1, "top5_accuracy": 3}
    assert "top5_accuracy" not in label_loss(jnp.asarray(logits[:, :5]), batch, smoothing=0.0)[2]


def test_nan_logits_are_never_correct():
    logits = np.zeros((3, 8), np.float32)
    logits[0] = np.nan
    logits[1, 2] = np.nan  # the right label's logit
    logits[2] = np.nan
    logits[2, 0] = 9.0  # all other logits are NaN
    batch = {"targets": np.array([0, 2, 0]), "weights": np.ones(3, np.float32)}
    metrics = label_loss(jnp.asarray(logits), batch, smoothing=0.0)[2]
    assert metrics == {"accuracy": 0, "top5_accuracy": 0}


def test_drop_path_drops_whole_examples_and_keeps_the_mean():
    keys = jax.random.split(jax.random.key(0), 4000)
    x = jnp.ones((4000, 2, 3))
    dropped = np.asarray(drop_path(x, jnp.float32(0.3), keys))
    assert set(np.unique(dropped)) == {0.0, np.float32(1) / np.float32(0.7)}
    assert (dropped == dropped[:, :1, :1]).all()
    # Four standard deviations of the mean of 4,000 draws.
    assert abs(dropped.mean() - 1) < 4 * (0.3 / 0.7 / 4000) ** 0.5
    np.testing.assert_array_equal(drop_path(x, 0.3, None), x)


def test_stochastic_depth_rate_increases_up_to_the_last_branch():
    assert [float(drop_path_rate(0.2, jnp.int32(i), 5)) for i in (0, 2, 4)] == pytest.approx(
        [0.0, 0.1, 0.2]
    )
    assert drop_path_rate(0.0, jnp.int32(3), 5) == 0.0


def test_merge_windows_inverts_partition_windows():
    x = np.random.default_rng(0).normal(size=(2, 7, 9, 3)).astype(np.float32)
    windows = partition_windows(jnp.asarray(x), 4, 2)
    assert windows.shape == (2 * 2 * 3, 16, 3)
    np.testing.assert_array_equal(merge_windows(windows, 7, 9, 2), x)


def test_regions_distinguish_patches_joined_by_a_shift():
    rows, columns = np.mgrid[:8, :8].astype(np.float32)
    places = jnp.asarray(np.stack([rows, columns], axis=-1))[None]
    windows = np.asarray(partition_windows(places, 4, 2))
    ids = regions(8, 8, 4, 2)
    for window, numbers in zip(windows, ids, strict=True):
        far = np.abs(window[:, None] - window[None]).max(axis=-1) >= 4
        np.testing.assert_array_equal(numbers[:, None] != numbers[None], far)


VIT = ViTConfig(
    image_size=11,
    patch_size=2,
    num_channels=1,
    num_layers=2,
    num_heads=2,
    embed_dim=8,
    mlp_dim=12,
    num_labels=5,
)
SWIN = SwinConfig(
    image_size=11,
    patch_size=1,
    num_channels=1,
    embed_dim=8,
    depths=(2, 4),
    num_heads=(2, 4),
    window_size=4,
    num_labels=5,
)
RESMLP = ResMLPConfig(
    image_size=11,
    patch_size=2,
    num_channels=1,
    num_layers=2,
    embed_dim=8,
    mlp_dim=12,
    layer_scale=0.1,
    num_labels=5,
)
SWIN_2 = SwinConfig(**{**vars(SWIN), "version": 2})


def drawn(model: nnx.Module) -> nnx.Module:
    """Return the model with noise added to its parameters, so that no block is the identity."""
    graph, params = nnx.split(model)
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params))


MODELS = {
    "ViT": lambda: ViT(VIT, rngs=nnx.Rngs(0)),
    "Swin": lambda: Swin(SWIN, rngs=nnx.Rngs(0)),
    "Swin V2": lambda: Swin(SWIN_2, rngs=nnx.Rngs(0)),
    "ResMLP": lambda: ResMLP(RESMLP, rngs=nnx.Rngs(0)),
}


@pytest.mark.drawn(1)
@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_images_of_a_batch_are_independent(name):
    model: Any = drawn(MODELS[name]())
    images = np.random.default_rng(0).normal(size=(2, 11, 11, 1)).astype(np.float32)
    gradient = jax.grad(lambda images: model(images)[0].sum())(jnp.asarray(images))
    assert np.abs(gradient[0]).max() > 0 and not np.asarray(gradient[1]).any()


@pytest.mark.thorough
def test_swin_2_blocks_are_initially_the_identity():
    model: Any = Swin(SWIN_2, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 11, 8)), jnp.float32)
    y = model.stage0(x, {"layer": jnp.int32(0)})
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (VIT, {"patch_size": 12}, r"model.patch_size=12 must be from 1 to model.image_size=11"),
        (VIT, {"pool": "max"}, "model.pool='max' is unknown; choose class_token, mean"),
        (VIT, {"embed_dim": 6, "positions": "sincos"}, "model.embed_dim=6 to be a multiple of 4"),
        (VIT, {"image_mean": (0.1, 0.2)}, "has 2 numbers; give one, or one for each of"),
        (VIT, {"image_stddev": (0.0,)}, r"model.image_stddev=\(0.0,\) must be positive"),
        (VIT, {"drop_path": 1.0}, r"model.drop_path=1.0 must be in \[0, 1\)"),
        (SWIN, {"depths": (2, 3)}, "3 is not an even number of them; choose even numbers"),
        (SWIN, {"depths": (2,) * 5}, "has 5 stages; choose from 1 to 4"),
        (SWIN, {"num_heads": (2,)}, "must both have a number for each stage"),
        (SWIN, {"num_heads": (2, 3)}, "3 must divide the 16 dims of stage 1"),
        (VIT, {"init_stddev": -1.0}, "model.init_stddev=-1.0 must be 0 or positive"),
        (VIT, {"layer_norm_epsilon": 0.0}, "model.layer_norm_epsilon=0.0 must be positive"),
        (SWIN, {"mlp_ratio": -1.0}, "model.mlp_ratio=-1.0 times model.embed_dim=8 must be at"),
        (SWIN, {"pretrained_windows": (4, 4)}, "needs model.version=2; leave it out"),
        (SWIN_2, {"pretrained_windows": (4, -1)}, "must not be negative; choose "),
        (SWIN, {"version": 3}, "model.version=3 is unknown; choose 1 or 2"),
        (RESMLP, {"patch_size": 12}, r"model.patch_size=12 must be from 1 to model.image_size=11"),
        (RESMLP, {"layer_scale": 0.0}, "model.layer_scale=0.0 must be positive; choose for exam"),
        (RESMLP, {"head": "tokens"}, "model.head='tokens' is unknown; choose labels, none"),
    ],
)
def test_invalid_config_is_rejected(config, changes, message):
    with pytest.raises(ValueError, match=message):
        type(config)(**{**vars(config), **changes})
