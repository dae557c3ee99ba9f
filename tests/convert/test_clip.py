"""CLIP and SigLIP: embeddings, logits, losses and gradients of transformers, and round trips."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from flax import nnx

from convert import from_hf, to_hf
from convert.from_hf import load
from convert.keys import read
from convert.registry import find
from convert.source import read_source
from tests.convert import comparison
from tests.convert.test_round_trip import all_tensors, assert_same_bits, read_back

VOCAB = 211
EOS = 210
_TEXT = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
}
_IMAGES = {
    "hidden_size": 39,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "image_size": 21,  # the last row and column of pixels are in no patch
    "patch_size": 4,
}
#: Published config.json, as facts: the keys that openai/clip-vit-base-patch32 and
#: google/siglip-base-patch16-224 have, without those of generation that every model has.
PUBLISHED = {
    "openai/clip-vit-base-patch32": {
        "architectures": ["CLIPModel"],
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "model_type": "clip",
        "projection_dim": 512,
        "text_config": {
            "_name_or_path": "",
            "add_cross_attention": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "diversity_penalty": 0.0,
            "do_sample": False,
            "dropout": 0.0,
            "eos_token_id": 2,
            "hidden_act": "quick_gelu",
            "hidden_size": 512,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
            "initializer_factor": 1.0,
            "initializer_range": 0.02,
            "intermediate_size": 2048,
            "layer_norm_eps": 1e-05,
            "max_length": 20,
            "max_position_embeddings": 77,
            "model_type": "clip_text_model",
            "num_attention_heads": 8,
            "num_hidden_layers": 12,
            "pad_token_id": 1,
            "problem_type": None,
            "projection_dim": 512,
            "temperature": 1.0,
            "top_k": 50,
            "transformers_version": "4.16.0.dev0",
            "vocab_size": 49408,
        },
        "text_config_dict": None,
        "transformers_version": None,
        "vision_config": {
            "attention_dropout": 0.0,
            "dropout": 0.0,
            "hidden_act": "quick_gelu",
            "hidden_size": 768,
            "image_size": 224,
            "initializer_factor": 1.0,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "model_type": "clip_vision_model",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "patch_size": 32,
            "projection_dim": 512,
            "transformers_version": "4.16.0.dev0",
        },
        "vision_config_dict": None,
    },
    "google/siglip-base-patch16-224": {
        "architectures": ["SiglipModel"],
        "initializer_factor": 1.0,
        "model_type": "siglip",
        "text_config": {"model_type": "siglip_text_model"},
        "torch_dtype": "float32",
        "transformers_version": "4.37.0.dev0",
        "vision_config": {"model_type": "siglip_vision_model"},
    },
}
CASES = ("clip", "clip_highest_id", "siglip")


def make(name: str):
    """Return a small model with random weights."""
    torch.manual_seed(0)
    if name == "siglip":
        text = {**_TEXT, "projection_size": 39, "eos_token_id": EOS}
        model = hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=_IMAGES))
    else:
        text = {**_TEXT, "eos_token_id": 2 if name == "clip_highest_id" else EOS}
        config = hf.CLIPConfig(text_config=text, vision_config=_IMAGES, projection_dim=23)
        model = hf.CLIPModel(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight + 0.1 * torch.randn_like(weight))
        model.logit_scale.fill_(0.7)
    return model.eval()


def inputs(name: str) -> dict[str, np.ndarray]:
    """Return three pairs of texts of different lengths and images."""
    rng = np.random.default_rng(0)
    pad = 1 if name == "siglip" else EOS
    tokens = rng.integers(3, EOS, (3, 14), dtype=np.int32)
    for row, length in zip(tokens, (14, 9, 5), strict=True):
        row[length - 1] = EOS
        row[length:] = pad
    return {"tokens": tokens, "images": rng.normal(size=(3, 21, 21, 3)).astype(np.float32)}


def theirs_of(model, name: str):
    batch = inputs(name)
    return model(
        input_ids=torch.from_numpy(batch["tokens"]).long(),
        pixel_values=torch.from_numpy(batch["images"]).permute(0, 3, 1, 2),
        return_loss=True,
    )


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", CASES)
def test_loaded_model_has_the_losses_and_gradients_of_transformers(name, tmp_path):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    batch = inputs(name)
    expected = theirs_of(theirs, name)
    expected.loss.backward()
    image, text = ours.encode(**batch)
    # 1e-4 is float32 rounding accumulated over the layers, with sums in different orders.
    for found, reference in (
        (image, expected.image_embeds),
        (text, expected.text_embeds),
        (ours(**batch), expected.logits_per_image),
    ):
        np.testing.assert_allclose(found, reference.detach().numpy(), rtol=0, atol=1e-4)
    graph, params = nnx.split(ours)

    def loss_of(params):
        model = nnx.merge(graph, params)
        rows = batch | {"weights": np.ones(3, np.float32)}
        x = model.text_encoder(model.image_encoder(model.embed(rows), rows), rows)
        loss, weight, _ = model.head(x, rows)
        return loss / weight

    loss, gradients = jax.value_and_grad(loss_of)(nnx.to_pure_dict(params))
    np.testing.assert_allclose(loss, expected.loss.item(), rtol=0, atol=1e-4)
    flat = nnx.traversals.flatten_mapping(gradients)
    flat = {".".join(map(str, path)): np.asarray(value) for path, value in flat.items()}
    reference = comparison.their_gradients(theirs, tmp_path / "gradients")
    architecture = read_source(tmp_path / "theirs").architecture
    assert architecture is not None
    shapes = {path: value.shape for path, value in flat.items()}
    for place in architecture.tensor_mappings(shapes, vocab_size=VOCAB):
        found = np.zeros(place.their_shape, np.float32)
        ours = flat[place.ours][place.place]
        place.write(found, tuple(slice(0, size) for size in place.shape), ours)
        theirs_part = reference[place.theirs]
        if place.num_rows is not None:
            rows = slice(place.first_row, place.first_row + place.part_shape[0])
            found, theirs_part = found[rows], theirs_part[rows]
        scale = np.linalg.norm(theirs_part)
        if np.linalg.norm(found) < 1e-6 and scale < 1e-6:
            continue  # Zero up to rounding, like the gradient of the bias of keys.
        assert np.linalg.norm(found - theirs_part) < 1e-3 * scale, place.theirs


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", CASES)
def test_round_trip_preserves_every_tensor_and_config(name, tmp_path):
    make(name).save_pretrained(tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("theirs", "back")]
    assert configs[0] == configs[1]
    model, messages = read_back(tmp_path / "back")
    assert not messages
    assert theirs_of(model, name).loss == theirs_of(make(name), name).loss


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_sizes_of_transformers(name):
    published = PUBLISHED[name]
    architecture = find(published)
    fields = read(published, architecture.keys, harmless=architecture.harmless)
    ours = architecture.model_class.Config(**fields, **architecture.fields)
    theirs = getattr(hf, f"{published['architectures'][0].removesuffix('Model')}Config")
    theirs = theirs(**published)
    for side, section in (("image", theirs.vision_config), ("text", theirs.text_config)):
        assert dataclasses.astuple(ours.encoder(side))[:4] == (
            section.num_hidden_layers,
            section.num_attention_heads,
            section.hidden_size,
            section.intermediate_size,
        )
        assert ours.layer_norm_epsilon == section.layer_norm_eps
    assert ours.image_size == theirs.vision_config.image_size
    assert ours.patch_size == theirs.vision_config.patch_size
    assert ours.max_positions == theirs.text_config.max_position_embeddings
    assert ours.vocab_size == theirs.text_config.vocab_size


def test_config_that_the_model_cannot_express_is_refused():
    published = PUBLISHED["openai/clip-vit-base-patch32"]
    architecture = find(published)
    for section, key, value, message in (
        ("vision_config", "hidden_act", "gelu", "hidden_act='gelu'.* they must be equal"),
        ("text_config", "attention_sink", 4, "text_config.attention_sink=4, which is not"),
    ):
        changed = {**published, section: {**published[section], key: value}}
        with pytest.raises(ValueError, match=message):
            read(changed, architecture.keys, harmless=architecture.harmless)
    older = {**published, "text_config_dict": {"hidden_size": 768}}
    with pytest.raises(ValueError, match="hidden_size=768 in text_config_dict but 512"):
        read(older, architecture.keys, harmless=architecture.harmless)


#: Class in transformers -> its config, and the name of what it returns for a text or an image.
ENCODERS = {
    "CLIPTextModel": (hf.CLIPTextConfig, "last_hidden_state"),
    "CLIPTextModelWithProjection": (hf.CLIPTextConfig, "text_embeds"),
    "CLIPVisionModel": (hf.CLIPVisionConfig, "pooler_output"),
    "CLIPVisionModelWithProjection": (hf.CLIPVisionConfig, "image_embeds"),
}


def make_encoder(name: str):
    config, _ = ENCODERS[name]
    sizes: dict[str, Any] = (
        {**_TEXT, "eos_token_id": EOS} if config is hf.CLIPTextConfig else _IMAGES
    )
    torch.manual_seed(0)
    return getattr(hf, name)(config(**sizes, projection_dim=23)).eval()


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ENCODERS)
def test_one_encoder_equals_that_of_transformers_and_comes_back(name, tmp_path):
    config, output = ENCODERS[name]
    is_text = config is hf.CLIPTextConfig
    theirs = make_encoder(name)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    if is_text:
        # The second row has padding on the left, which has positions, too.
        tokens = inputs("clip")["tokens"]
        tokens[1] = [1] * 5 + [*tokens[1, :9]]
        mask = np.ones_like(tokens)
        mask[1, :5] = mask[2, 5:] = 0
        args = {"input_ids": torch.from_numpy(tokens).long()}
        reference = theirs(**args, attention_mask=torch.from_numpy(mask))
        found = np.asarray(ours(tokens, mask))
        expected = getattr(reference, output).detach().numpy()
        if output == "text_embeds":
            found = found[np.arange(3), [13, 13, 4]]
        else:
            found, expected = found[mask > 0], expected[mask > 0]
    else:
        images = inputs("clip")["images"]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        expected = getattr(theirs(pixel_values=pixels), output).detach().numpy()
        found = np.asarray(ours(images))
        found = found if output == "image_embeds" else found[:, 0]
    # 1e-4 is float32 rounding accumulated over the layers, with sums in different orders.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("theirs", "back")]
    assert configs[0] == configs[1]


@pytest.mark.thorough
def test_padding_before_a_text_must_be_another_token(tmp_path):
    theirs = make("clip")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    batch = inputs("clip")
    mask = np.ones_like(batch["tokens"])
    mask[0, :2] = 0
    batch["tokens"][0, :2] = 1
    _, text = ours.encode(**batch, attention_mask=mask)
    expected = theirs(
        input_ids=torch.from_numpy(batch["tokens"]).long(),
        pixel_values=torch.from_numpy(batch["images"]).permute(0, 3, 1, 2),
        attention_mask=torch.from_numpy(mask),
    )
    np.testing.assert_allclose(text, expected.text_embeds.detach().numpy(), rtol=0, atol=1e-4)
    batch["tokens"][0, :2] = EOS
    with pytest.raises(ValueError, match="attention_mask hides the token that represents a text"):
        ours.encode(**batch, attention_mask=mask)
