"""The PyTorch peer: trains the Hugging Face model with our sizes, from our initial weights.

Batch, microbatches, precision, dropout, AdamW's parameter groups and clipping equal ours. Attention
is `scaled_dot_product_attention` without dropout, like ours.
"""

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from convert.architecture import Architecture
from convert.model_on_disk import shapes_of
from convert.to_hf import describe
from models.layers.flops import attention_flops
from models.text.gpt2 import GPT2Config
from models.text.llama import LlamaConfig
from models.vision.vit import ViTConfig
from train.run.run import Run

#: Configs of the models that the peer can train.
MODELS = (GPT2Config, LlamaConfig, ViTConfig)

#: Largest difference of the two first losses. Both are about ln(vocab), from the same weights:
#: float32 sums differ by about 1e-6 of that, bfloat16 products by about 1e-2.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class TorchPeer:
    """The peer's training step, eager or compiled.

    Args:
        run: our run, which the peer copies.
        params: our parameters as numpy arrays.
        batch: host-local numpy arrays of the whole batch, as the run's model takes them.
        compiled: whether to compile the model and its loss with `torch.compile`.
    """

    def __init__(self, run: Run, params: Mapping[str, Any], batch: Mapping, *, compiled: bool):
        self.run = run
        self.device = "cuda" if run.mesh.devices.flat[0].platform == "gpu" else "cpu"
        self.model = _make_model(run, params)
        torch.nn.Module.to(self.model, self.device)
        if run.config.train.parsed_remat.layers == "full":
            self.model.gradient_checkpointing_enable()
        self.optimizer = _make_optimizer(run, self.model)
        self.inputs = torch.as_tensor(_inputs(run, batch), device=self.device)
        targets = np.asarray(batch["targets"])
        self.targets = torch.as_tensor(targets, dtype=torch.long, device=self.device)
        self._sum_of_losses = torch.compile(self._forward) if compiled else self._forward

    def step(self) -> float:
        """Run one step, wait until it has finished, and return the loss before the update."""
        total = 0.0
        count = self.run.config.train.num_microbatches
        # Row r goes to microbatch r mod M, as in our step.
        for part in range(count):
            loss = self._sum_of_losses(self.inputs[part::count], self.targets[part::count])
            loss = loss / self.targets.numel()
            loss.backward()
            total = total + loss.detach()
        if self.run.config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.run.config.optimizer.clip_norm
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding table counts once."""
        return sum(param.numel() for param in self.model.parameters())

    def forward_flops_per_unit(self) -> float:
        """Return the FLOPs of matrix products in a forward pass per token, or per image.

        PyTorch counts attention as plain matrix products that are not causal, so the masked half is
        subtracted here.
        """
        config = self.run.model_config
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            with sdpa_kernel(SDPBackend.MATH):
                self.model(self.inputs[:1])
        if isinstance(config, ViTConfig):
            return counter.get_total_flops()
        length = self.inputs.shape[1]
        head_dim = getattr(config, "head_dim", config.embed_dim // config.num_heads)
        masked = attention_flops(length, config.num_heads, head_dim, is_causal=True)
        return counter.get_total_flops() / length - config.num_layers * masked

    def _forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        smoothing = getattr(self.run.model_config, "label_smoothing", 0.0)
        with self._precision():
            logits = self.model(inputs).logits
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, -2),
                targets.flatten(),
                reduction="sum",
                label_smoothing=smoothing,
            )

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.run.config.precision.compute == "bfloat16":
            return torch.autocast(self.device, torch.bfloat16)
        return contextlib.nullcontext()


def _inputs(run: Run, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return tokens as int64[B, T], or normalized images as float32[B, C, H, W]."""
    if "tokens" in batch:
        return np.asarray(batch["tokens"], np.int64)
    config = run.model_config
    mean, stddev = (np.asarray(v, np.float32) for v in (config.image_mean, config.image_stddev))
    pixels = (np.asarray(batch["images"], np.float32) / 255 - mean) / stddev
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _make_model(run: Run, params: Mapping[str, Any]) -> transformers.PreTrainedModel:
    config = run.model_config
    architecture, hf = describe(run.config.model.name, config, None)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if "resid_pdrop" in hf:  # GPT-2; attention has no dropout, like ours
        hf |= {"embd_pdrop": hf["resid_pdrop"], "attn_pdrop": 0.0}
    hf_config = transformers.AutoConfig.for_model(**hf, use_cache=False)
    # from_pretrained also translates names that transformers has changed since.
    model, loading_info = getattr(transformers, architecture.name).from_pretrained(
        None,
        config=hf_config,
        state_dict=_hf_weights(architecture, params, getattr(config, "vocab_size", None)),
        attn_implementation="sdpa",
        dtype=torch.float32,
        output_loading_info=True,
    )
    if loading_info["missing_keys"] or loading_info["unexpected_keys"]:
        raise ValueError(f"{architecture.name} has other weights: {loading_info}")
    return model.train()


def _hf_weights(
    architecture: Architecture, params: Mapping[str, Any], vocab_size: int | None
) -> dict[str, torch.Tensor]:
    """Return our parameters under Hugging Face's names, without the padding of the vocab."""
    shapes = shapes_of(params)
    arrays = dict(zip(shapes, jax.tree.leaves(params), strict=True))
    tensors = {}
    for mapping in architecture.tensor_mappings(shapes, vocab_size=vocab_size):
        array = arrays[mapping.ours]
        part = array[mapping.place]
        values = np.empty(mapping.their_shape, np.float32)
        mapping.write(values, tuple(slice(size) for size in part.shape), part)
        tensors[mapping.theirs] = torch.from_numpy(values)
    return tensors


def _make_optimizer(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    config = run.config.optimizer
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def agree(run: Run, ours: float, theirs: float) -> bool:
    """Return whether two losses from the same weights agree.

    With dropout they differ, so both only have to be finite.
    """
    if getattr(run.model_config, "dropout", 0.0):
        return math.isfinite(ours) and math.isfinite(theirs)
    return abs(ours - theirs) <= LOSS_TOLERANCE[run.config.precision.compute]
