"""Tests of the patches that MAE hides, of its decoder's order of patches, and of its loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from models.vision.common import patchify, sincos_positions, unpatchify
from models.vision.mae import MAE, MAEConfig
from models.vision.vit import ViT

pytestmark = pytest.mark.drawn(3, among="thorough")

CONFIG = MAEConfig(
    image_size=11,
    patch_size=2,
    num_channels=3,
    num_layers=2,
    num_heads=2,
    embed_dim=8,
    mlp_dim=12,
    decoder_num_layers=1,
    decoder_num_heads=3,
    decoder_embed_dim=12,
    decoder_mlp_dim=10,
    mask_ratio=0.7,
)
NUM_PATCHES = 25
NUM_KEPT = 7


@functools.cache
def model(**changes) -> MAE:
    config = MAEConfig(**{**vars(CONFIG), **changes})
    # One program compiles faster than each of its operations alone.
    return nnx.jit(lambda: MAE(config, rngs=nnx.Rngs(0)))()


def batch(size: int, **more) -> dict:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, 11, 11, 3), dtype=np.uint8)
    seeds = rng.integers(0, 2**32, size, dtype=np.uint32)
    weights = np.ones(size, np.float32)
    return {"images": images, "mask_seeds": seeds, "weights": weights, **more}


def hidden(inputs: dict, **changes) -> np.ndarray:
    """Return bool[B, T], the patches whose predictions the loss of the head depends on."""
    mae = model(**changes)
    x = jnp.zeros((len(inputs["images"]), 1 + NUM_PATCHES, CONFIG.decoder_embed_dim))
    gradient = jax.jit(jax.grad(lambda x: mae.head(x, inputs)[0]))(
        x + np.random.default_rng(1).normal(size=x.shape)
    )
    return np.abs(gradient[:, 1:]).max(axis=-1) > 0


@pytest.mark.thorough
def test_equally_many_patches_are_hidden_per_image_with_uniform_probability():
    inputs = batch(600)
    is_hidden = hidden(inputs)
    assert (is_hidden.sum(axis=1) == NUM_PATCHES - NUM_KEPT).all()
    share = (NUM_PATCHES - NUM_KEPT) / NUM_PATCHES
    # Five standard deviations of the mean of 600 draws, for each of 25 places.
    assert np.abs(is_hidden.mean(axis=0) - share).max() < 5 * (share * (1 - share) / 600) ** 0.5
    assert len(np.unique(is_hidden, axis=0)) > 590


@pytest.mark.thorough
def test_hidden_patches_depend_only_on_the_seed():
    inputs = batch(6)
    other = {**inputs, "images": inputs["images"][::-1], "weights": np.full(6, 0.5, np.float32)}
    np.testing.assert_array_equal(hidden(inputs), hidden(other))
    last = {name: value[4:] for name, value in inputs.items()}
    np.testing.assert_array_equal(hidden(inputs)[4:], hidden(last))
    seeds = {**inputs, "mask_seeds": inputs["mask_seeds"] + 1}
    assert (hidden(inputs) != hidden(seeds)).any(axis=1).all()


@pytest.mark.thorough
def test_patches_with_the_least_noise_are_kept_with_ties_in_order():
    noise = np.random.default_rng(0).random((3, NUM_PATCHES), np.float32)
    noise[1] = 0.5
    is_hidden = hidden(batch(3, noise=noise))
    for row in (0, 2):
        assert set(np.flatnonzero(~is_hidden[row])) == set(np.argsort(noise[row])[:NUM_KEPT])
    np.testing.assert_array_equal(np.flatnonzero(~is_hidden[1]), np.arange(NUM_KEPT))


@pytest.mark.thorough
def test_encoder_gets_the_patches_that_the_head_does_not_predict():
    mae = model()
    inputs = batch(2)
    pixels = jnp.asarray(inputs["images"] / 127.5 - 1, jnp.float32)
    loss = jax.jit(lambda x: (mae.embed({**inputs, "images": x}) ** 2).sum())
    gradient = jax.grad(loss)(pixels)
    patches = patchify(jnp.abs(gradient), 2).reshape(2, NUM_PATCHES, -1)
    np.testing.assert_array_equal(patches.max(axis=-1) == 0, hidden(inputs))
    assert mae.embed(inputs).shape == (2, 1 + NUM_KEPT, 8)


@pytest.mark.thorough
def test_decoder_gets_patches_in_image_order():
    noise = np.random.default_rng(2).random((3, NUM_PATCHES), np.float32)
    mae = model()
    inputs = batch(3, noise=noise)
    order = np.argsort(noise, axis=1)[:, :NUM_KEPT, None]
    first, patches = (np.asarray(x) for x in mae.tokens(inputs["images"]))
    kept = jnp.concatenate([first, np.take_along_axis(patches, order, axis=1)], axis=1)
    np.testing.assert_array_equal(mae.embed(inputs), kept)
    embedded = np.asarray(mae.decoder_embedding(mae.final_norm(kept)))
    expected = np.tile(np.asarray(mae.mask_token[...]), (3, 1 + NUM_PATCHES, 1))
    expected[:, 0] = embedded[:, 0]
    np.put_along_axis(expected[:, 1:], order, embedded[:, 1:], axis=1)
    expected += np.asarray(mae.decoder_position_embedding[...])
    # float32 rounds once.
    np.testing.assert_allclose(
        mae.before_decoder(jnp.asarray(kept), inputs), expected, rtol=0, atol=1e-6
    )


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("normalise", [True, False])
def test_loss_is_the_mean_over_hidden_patches_of_each_image(normalise):
    noise = np.random.default_rng(3).random((4, NUM_PATCHES))
    weights = np.array([1, 0, 0.5, 1])
    with jax.enable_x64(True):
        graph, params = nnx.split(model(normalise_targets=normalise))
        mae = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params))
        inputs = batch(4, noise=noise, weights=weights)
        predictions, is_hidden = jax.jit(mae)(inputs["images"], jnp.asarray(noise))

        @jax.jit
        def head(inputs):
            x = mae.before_decoder(mae.encoder(mae.embed(inputs), inputs), inputs)
            return mae.head(mae.decoder(x, inputs), inputs)

        loss, weight, metrics = head(inputs)
    images = (torch.from_numpy(inputs["images"]).double() / 255 - 0.5) / 0.5
    # Patches in the order of a convolution, then with channels last.
    patches = torch.nn.functional.unfold(images.permute(0, 3, 1, 2), kernel_size=2, stride=2)
    targets = patches.reshape(4, 3, 4, NUM_PATCHES).permute(0, 3, 2, 1).reshape(4, 25, 12)
    if normalise:
        variance, mean = torch.var_mean(targets, dim=-1, keepdim=True, correction=1)
        targets = (targets - mean) / (variance + 1e-6) ** 0.5
    errors = torch.nn.functional.mse_loss(
        torch.from_numpy(np.array(predictions)), targets, reduction="none"
    )
    expected = sum(
        weights[row] * errors[row][torch.from_numpy(np.array(is_hidden[row]))].mean()
        for row in range(4)
    )
    assert predictions.dtype == np.float64 and float(weight) == 2.5 and metrics == {}
    # float64 rounding of sums of 216 squares.
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-12)


@pytest.mark.thorough
def test_hidden_pixels_change_no_prediction():
    mae = model()
    inputs = batch(2)
    is_hidden = np.array(mae(inputs["images"])[1])
    pixels = jnp.asarray(inputs["images"] / 127.5 - 1, jnp.float32)
    gradient = jax.grad(lambda x: (mae(x)[0] ** 2).sum())(pixels)
    patches = patchify(jnp.abs(gradient), 2).reshape(2, NUM_PATCHES, -1)
    np.testing.assert_array_equal(patches.max(axis=-1) == 0, is_hidden)


@pytest.mark.thorough
def test_encoder_has_the_names_and_shapes_of_a_vit():
    mae = nnx.to_pure_dict(nnx.split(model())[1])
    vit = nnx.to_pure_dict(nnx.split(ViT(CONFIG.encoder, rngs=nnx.Rngs(0)))[1])
    shapes = functools.partial(jax.tree.map, lambda leaf: leaf.shape)
    assert shapes({name: mae[name] for name in vit}) == shapes(vit)
    assert mae["position_embedding"][0, 0].max() == 0  # the class token has zeros with sincos
    assert mae["position_embedding"][0, 1:].min() < 0


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("normalise", [True, False])
def test_reconstructions_show_visible_and_predicted_patches(normalise):
    mae = model(normalise_targets=normalise)
    images = batch(2)["images"]
    predictions, is_hidden = mae(images)
    seen, reconstructed = (np.asarray(x) for x in mae.reconstructions(images))
    pixels = images[:, :10, :10] / 255
    patches = np.asarray(patchify(jnp.asarray(pixels), 2)).reshape(2, 25, 12)
    mask = np.repeat(np.array(is_hidden)[..., None], 12, axis=-1).reshape(2, 5, 5, 2, 2, 3)
    mask = np.asarray(unpatchify(jnp.asarray(mask)))
    # float32 rounding.
    for found, hidden_ones in ((seen, np.full_like(pixels, 0.5)), (reconstructed, None)):
        np.testing.assert_allclose(found[~mask], pixels[~mask], atol=1e-6)
        if hidden_ones is None:
            values = np.asarray(predictions) / 2  # undoes the normalization with deviation 0.5
            if normalise:
                values = np.asarray(predictions) * patches.std(axis=-1, ddof=1, keepdims=True)
            values = values + (patches.mean(axis=-1, keepdims=True) if normalise else 0.5)
            values = np.clip(values, 0, 1).reshape(2, 5, 5, 2, 2, 3)
            hidden_ones = np.asarray(unpatchify(jnp.asarray(values)))
        np.testing.assert_allclose(found[mask], hidden_ones[mask], atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mask_ratio": 0.0}, r"model.mask_ratio=0.0 keeps 25 of 25 patches; choose one"),
        ({"mask_ratio": 0.99}, r"model.mask_ratio=0.99 keeps 0 of 25 patches; choose one"),
        ({"mask_ratio": float("nan")}, r"model.mask_ratio=nan must be finite"),
        ({"kernels": "glorot"}, "model.kernels='glorot' is unknown; choose normal, xavier"),
        ({"decoder_num_heads": 5}, "model.decoder_num_heads=5 must divide model.decoder_embed_dim"),
        ({"decoder_num_layers": 0}, "model.decoder_num_layers=0 must be at least 1"),
        ({"decoder_num_heads": 2, "decoder_embed_dim": 6}, "model.decoder_embed_dim=6 must be a"),
        ({"patch_size": 1, "num_channels": 1}, "model.normalise_targets=True needs patches of"),
    ],
)
def test_invalid_config_is_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        MAEConfig(**{**vars(CONFIG), **changes})


@pytest.mark.thorough
def test_kernels_have_xavier_initialization():
    """As in the code of MAE and of MoCo v3: sqrt(2 / (input features + output features))."""
    sizes = {"embed_dim": 96, "num_heads": 4, "mlp_dim": 200}
    sizes |= {"decoder_embed_dim": 48, "decoder_num_heads": 4, "decoder_mlp_dim": 120}
    mae: Any = model(**sizes)
    block = mae.encoder.layers
    decoded = mae.decoder.layers
    kernels = {
        "patches": (mae.patch_embedding.linear.kernel, 12, 96),
        "q": (block.attention.q.kernel, 96, 96),
        "out": (block.attention.out.kernel, 96, 96),
        "down": (block.mlp.down.kernel, 200, 96),
        "decoder": (mae.decoder_embedding.kernel, 96, 48),
        "decoder's up": (decoded.mlp.up.kernel, 48, 120),
        "prediction": (mae.prediction.kernel, 48, 12),
    }
    for name, (kernel, inputs, outputs) in kernels.items():
        expected = (2 / (inputs + outputs)) ** 0.5
        np.testing.assert_allclose(np.std(kernel[...]), expected, rtol=0.1, err_msg=name)
    normal: Any = model(**sizes, kernels="normal")
    np.testing.assert_allclose(np.std(normal.encoder.layers.mlp.up.kernel[...]), 0.02, rtol=0.05)
    patches = normal.patch_embedding.linear.kernel[...]
    np.testing.assert_allclose(np.std(patches), (3 * 12) ** -0.5, rtol=0.1)  # uniform fan-in


def test_table_of_fixed_positions_has_a_limit():
    with pytest.raises(ValueError, match="14×14 patches × an embedding size of 1000000000000"):
        sincos_positions(14, 14, 10**12)
