"""The PyTorch peer: trains Hugging Face's GPT-2 from our initial weights.

Sizes, batch, microbatches, precision, dropout, AdamW's parameter groups and clipping equal ours.
Attention is `scaled_dot_product_attention` without dropout, like ours.
"""

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.flops import attention_flops
from models.text.gpt2 import GPT2Config
from train.run.run import Run

#: Largest difference of the two first losses. Both are about ln(vocab), from the same weights:
#: float32 sums differ by about 1e-6 of that, bfloat16 products by about 1e-2.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class TorchGPT2:
    """The peer's training step, eager or compiled.

    Args:
        run: our run, which the peer copies.
        params: our parameters as numpy arrays.
        batch: host-local numpy arrays `tokens` and `targets` of the whole batch, int[B, T].
        compiled: whether to compile the model and its loss with `torch.compile`.
    """

    def __init__(self, run: Run, params: Mapping[str, Any], batch: Mapping, *, compiled: bool):
        self.run = run
        self.device = "cuda" if run.mesh.devices.flat[0].platform == "gpu" else "cpu"
        self.model = _make_model(run, params)
        torch.nn.Module.to(self.model, self.device)
        if run.config.train.remat == "full":
            self.model.gradient_checkpointing_enable()
        self.optimizer = _make_optimizer(run, self.model)
        self.tokens, self.targets = (
            torch.as_tensor(np.asarray(batch[name]), dtype=torch.long, device=self.device)
            for name in ("tokens", "targets")
        )
        self._sum_of_losses = torch.compile(self._forward) if compiled else self._forward

    def step(self) -> float:
        """Run one step, wait until it has finished, and return the loss before the update."""
        total = 0.0
        count = self.run.config.train.num_microbatches
        # Row r goes to microbatch r mod M, as in our step.
        for part in range(count):
            loss = self._sum_of_losses(self.tokens[part::count], self.targets[part::count])
            loss = loss / self.tokens.numel()
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
        """Number of parameters; the tied embedding table counts once."""
        return sum(param.numel() for param in self.model.parameters())

    def forward_flops_per_token(self) -> float:
        """Return the FLOPs of the matrix products in a forward pass, as counted by PyTorch.

        PyTorch counts attention as plain matrix products that are not causal, so the masked half is
        subtracted here.
        """
        config: GPT2Config = self.run.model_config
        length = self.tokens.shape[1]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            with sdpa_kernel(SDPBackend.MATH):
                self.model(self.tokens[:1])
        masked = attention_flops(
            length, config.num_heads, config.embed_dim // config.num_heads, is_causal=True
        )
        return counter.get_total_flops() / length - config.num_layers * masked

    def _forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._precision():
            logits = self.model(tokens).logits
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.run.config.precision.compute == "bfloat16":
            return torch.autocast(self.device, torch.bfloat16)
        return contextlib.nullcontext()


def hf_weights(params: Mapping[str, Any], vocab_size: int) -> dict[str, torch.Tensor]:
    """Return our parameters under Hugging Face's names, without the padding of the vocab.

    Conv1D stores its kernel as [in, out], and `c_attn` packs q, k and v in this order.
    """
    table = params["token_embedding"][:vocab_size]
    found = {"transformer.wte.weight": table, "lm_head.weight": table}
    found["transformer.wpe.weight"] = params["position_embedding"]
    found |= _norm("transformer.ln_f", params["final_norm"])
    layers = params["decoder"]["layers"]
    for number in range(layers["attention_norm"]["scale"].shape[0]):
        name = f"transformer.h.{number}"
        block = _index(layers, number)
        embed = block["attention_norm"]["scale"].size
        found |= _norm(f"{name}.ln_1", block["attention_norm"])
        found |= _norm(f"{name}.ln_2", block["mlp_norm"])
        for theirs, ours, inputs in (
            ("attn.c_attn", block["attention"]["qkv"], embed),
            ("attn.c_proj", block["attention"]["out"], embed),
            ("mlp.c_fc", block["mlp"]["up"], embed),
            ("mlp.c_proj", block["mlp"]["down"], 4 * embed),
        ):
            found[f"{name}.{theirs}.weight"] = ours["kernel"].reshape(inputs, -1)
            found[f"{name}.{theirs}.bias"] = ours["bias"].reshape(-1)
    return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}


def _norm(name: str, norm: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}.weight": norm["scale"], f"{name}.bias": norm["bias"]}


def _index(tree: Any, number: int) -> Any:
    if isinstance(tree, Mapping):
        return {name: _index(value, number) for name, value in tree.items()}
    return tree[number]


def _make_model(run: Run, params: Mapping[str, Any]) -> transformers.GPT2LMHeadModel:
    config: GPT2Config = run.model_config
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
            n_embd=config.embed_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=0.0,
            layer_norm_epsilon=config.layer_norm_epsilon,
            use_cache=False,
        )
    )
    model.set_attn_implementation("sdpa")
    model.load_state_dict(hf_weights(params, config.vocab_size))
    return model.train()


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
    if run.model_config.dropout:
        return math.isfinite(ours) and math.isfinite(theirs)
    return abs(ours - theirs) <= LOSS_TOLERANCE[run.config.precision.compute]
