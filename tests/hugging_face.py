"""Tiny Hugging Face models with random weights, saved with a tokenizer."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

#: Special tokens of the tokenizer, with the first ids; the other tokens are bytes.
SPECIAL = ("<pad>", "</s>", "[CLS]", "[SEP]", "[MASK]", *(f"<extra_id_{i}>" for i in range(100)))

#: Sizes of a tiny OPT.
OPT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}


def save_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer.json; return its vocabulary size."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    return len(vocab)


def save_model(directory: Path, name: str, **config: Any) -> transformers.PreTrainedModel:
    """Create a model with random parameters and save it with a tokenizer.

    Args:
        directory: where to save it.
        name: class in transformers, such as "OPTForCausalLM".
        **config: keys of the class's config, except the vocabulary size, which is the tokenizer's
            plus 3.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model_class: Any = getattr(transformers, name)
    vocab_size = save_tokenizer(directory) + 3
    settings = model_class.config_class(
        vocab_size=vocab_size,
        architectures=[name],
        attn_implementation="eager",
        experts_implementation="eager",
        **config,
    )
    torch.manual_seed(0)
    model = model_class(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model
