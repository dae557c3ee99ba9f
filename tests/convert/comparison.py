"""Runs our models and their Hugging Face counterparts on the same inputs."""

import copy
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file

from tests.convert.cases import PAD, VOCAB, make, reads_images
from tests.convert.hf_files import rename_as_published

LENGTH = 14


def inputs(name: str) -> dict[str, np.ndarray]:
    """Return the inputs of a case.

    Text models get three rows of tokens with masks: one without padding, one padded on the right,
    and one padded on the left. Sequence classifiers read the first token of a row, so their third
    row is padded on the right too, like that of Switch Transformers, where padding that comes first
    would take room in experts. Vision models get normalized images, and MAE also the noise that
    decides which patches are hidden.
    """
    rng = np.random.default_rng(0)
    if reads_images(name):
        config = make(name).config
        shape = (3, config.image_size, config.image_size, config.num_channels)
        images = {"images": rng.normal(size=shape).astype(np.float32)}
        num_patches = (config.image_size // config.patch_size) ** 2
        noise = {"noise": rng.random((3, num_patches), np.float32)}
        return images | noise if name in ("mae", "mae_odd") else images
    mask = np.ones((3, LENGTH), np.int32)
    mask[1, 9:] = 0
    if name.endswith("sequence") or "switch" in name:
        mask[2, 6:] = 0
    else:
        mask[2, :4] = 0
    tokens = np.where(mask, rng.integers(2, VOCAB, mask.shape, dtype=np.int32), PAD)
    batch = {"tokens": tokens, "attention_mask": mask}
    if "t5" in name:
        decoder_mask = np.roll(mask, 1, axis=0)[:, : LENGTH - 2]
        decoder_tokens = rng.integers(2, VOCAB, decoder_mask.shape, dtype=np.int32)
        batch |= {"decoder_tokens": decoder_tokens, "decoder_attention_mask": decoder_mask}
    if name.startswith(("bert", "electra")):
        batch["token_types"] = rng.integers(0, 2, mask.shape, dtype=np.int32)
    return batch


def weights(name: str) -> np.ndarray:
    """Return the weights of a case's outputs in the loss: 0 at padding and 1 elsewhere."""
    batch = inputs(name)
    if name.endswith("sequence") or reads_images(name):
        return np.ones(3, np.float32)
    return batch.get("decoder_attention_mask", batch["attention_mask"]).astype(np.float32)


def our_outputs(model: Any, name: str) -> Any:
    """Return logits, or the activations of a model without a head, from our model."""
    outputs = model(**inputs(name))
    return outputs[0] if isinstance(outputs, tuple) else outputs


def their_images(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the arguments of a Hugging Face vision model.

    For an MAE, noise in ascending order keeps patches in order if the case has no noise of its own.
    """
    batch = inputs(name)
    images = {"pixel_values": torch.from_numpy(batch["images"]).permute(0, 3, 1, 2)}
    if not isinstance(model, hf.ViTMAEPreTrainedModel):
        return images
    config: Any = model.config
    num_patches = (config.image_size // config.patch_size) ** 2
    in_order = np.arange(num_patches, dtype=np.float32)
    noise = batch.get("noise", np.tile(in_order, (len(batch["images"]), 1)))
    return {**images, "noise": torch.from_numpy(noise)}


def their_outputs(model: Any, name: str) -> torch.Tensor:
    """Return logits, or the activations of a model without a head, from a Hugging Face model."""
    if reads_images(name):
        output = model(**their_images(model, name))
        if "logits" in output:
            return output.logits
        activations = output.last_hidden_state
        if not name.startswith("swin"):
            return activations
        # Our Swin returns [B, rows, columns, D].
        side = round(activations.shape[1] ** 0.5)
        return activations.reshape(len(activations), side, side, -1)
    names = {
        "tokens": "input_ids",
        "decoder_tokens": "decoder_input_ids",
        "token_types": "token_type_ids",
    }
    batch = {names.get(k, k): torch.from_numpy(v).long() for k, v in inputs(name).items()}
    output = model(**batch)
    if name == "bert_pretraining":
        return output.prediction_logits
    return output.logits if "logits" in output else output.last_hidden_state


def log_loss(outputs: Any, name: str, log_softmax: Any) -> Any:
    """Return the weighted mean of -log softmax(outputs)[target] with random targets.

    Args:
        outputs: jax.Array or a torch.Tensor.
        name: case.
        log_softmax: function of the library of `outputs`.
    """
    if name == "electra_pretraining":  # the logit of one of two labels; the other's is 0
        stack: Any = torch.stack if isinstance(outputs, torch.Tensor) else jnp.stack
        outputs = stack([0 * outputs, outputs], -1)
    weight = weights(name)
    weight = weight.reshape(*weight.shape, *[1] * (outputs.ndim - 1 - weight.ndim))
    weight = np.broadcast_to(weight, outputs.shape[:-1])
    size = outputs.shape[-1]
    targets = np.eye(size, dtype=np.float32)[
        np.random.default_rng(2).integers(0, size, outputs.shape[:-1])
    ]
    factor = targets * weight[..., None] / weight.sum()
    factor = torch.from_numpy(factor) if isinstance(outputs, torch.Tensor) else jnp.asarray(factor)
    return -(log_softmax(outputs) * factor).sum()


def their_gradients(model: Any, directory: Path) -> dict[str, np.ndarray]:
    """Return the gradients of a Hugging Face model by the names that weights have in its files.

    A weight without a gradient has zeros.

    Args:
        model: model, after its backward pass.
        directory: directory to write the files to.
    """
    named = copy.deepcopy(model)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    with torch.no_grad():
        for name, weight in named.named_parameters():
            gradient = gradients[name]
            weight.copy_(torch.zeros_like(weight) if gradient is None else gradient)
        for buffer in named.buffers():  # The biases that balance experts have no gradient.
            buffer.zero_()
    named.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    rename_as_published(tensors)
    return {name: tensor.numpy() for name, tensor in tensors.items()}
