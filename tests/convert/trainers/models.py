"""Small Hugging Face models, whose logits are compared with the logits of a checkpoint."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers as hf

from convert.from_hf import load

VOCAB = 99

_SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_size": 36,
    "intermediate_size": 44,
    "rms_norm_eps": 1e-5,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 40,
    "n_inner": 52,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2_exact_gelu": ("GPT2LMHeadModel", {**_GPT2, "activation_function": "gelu"}),
    "llama": ("LlamaForCausalLM", _SIZES),
    "llama_tied": ("LlamaForCausalLM", {**_SIZES, "tie_word_embeddings": True}),
    "llama3": ("LlamaForCausalLM", {**_SIZES, "rope_parameters": _LLAMA3}),
    "qwen2": ("Qwen2ForCausalLM", _SIZES),
    "qwen3": ("Qwen3ForCausalLM", _SIZES),
}


def make(case: str) -> Any:
    """Return a Hugging Face model with random weights, biases and scales."""
    name, sizes = _CASES[case]
    model_class = getattr(hf, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return model


def assert_same_logits(model: Any, path: Path, **options: Any) -> None:
    """Compare the logits of a Hugging Face model and of a checkpoint with the same weights."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 17), dtype=np.int32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(load(path, **options)(jnp.asarray(tokens)))
    assert ours.shape == theirs.shape
    # Both compute in float32, from the same bits; logits are about 1.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
