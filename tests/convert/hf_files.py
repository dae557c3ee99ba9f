"""Reads and edits the files of Hugging Face models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from convert.from_hf import load


def rename_as_published(tensors: dict[str, torch.Tensor]) -> None:
    """Rename the layers of MAE's decoder as in published files; transformers writes other names."""
    for name in [name for name in tensors if ".decoder_encoder.layer." in name]:
        published = name.replace(".decoder_encoder.layer.", ".decoder_layers.")
        tensors[published] = tensors.pop(name)


def parameters(path: Path, **options: Any) -> dict:
    """Return the tree of parameters that `load` reads from a directory."""
    return nnx.to_pure_dict(nnx.split(load(path, **options))[1])


def edit(directory: Path, change: Callable[[dict], Any]) -> None:
    """Apply a change to the dict of a model's tensors, and write them back."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def add(**new: torch.Tensor) -> Callable[[dict], None]:
    """Return a change that adds tensors; `__` stands for a dot in their names."""
    return lambda tensors: tensors.update({k.replace("__", "."): v for k, v in new.items()})
