"""Tiny Hugging Face models with random weights, saved with a tokenizer."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

#: Of the tokenizer, whose first ids are these; the rest are bytes.
SPECIAL = ("<pad>", "</s>", "[CLS]", "[SEP]", "[MASK]", *(f"<extra_id_{i}>" for i in range(100)))


def save_tokenizer(directory: Path) -> int:
    """Writes a tokenizer.json of single bytes; returns the size of its vocab."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    return len(vocab)


def save_model(directory: Path, name: str, **config: Any) -> transformers.PreTrainedModel:
    """Returns a model that was saved with a tokenizer.

    Args:
      name: of the class, such as "OPTForCausalLM"; all its parameters are random.
      config: of the class's config, but the vocab size, which is the tokenizer's and 3 more.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model_class: Any = getattr(transformers, name)
    vocab_size = save_tokenizer(directory) + 3
    settings = model_class.config_class(
        vocab_size=vocab_size, architectures=[name], attn_implementation="eager", **config
    )
    torch.manual_seed(0)
    model = model_class(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model
