"""Writes a GPT-2 as LiBai's checkpoint, with the files that OneFlow writes."""

import pickle
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.convert.trainers.megatron_layout import Layout, whole_model

_PREFIX = "GPT_model."
_NAMES = {
    "embedding.word_embeddings": "embeddings.token_embeddings",
    "embedding.position_embeddings": "embeddings.position_embeddings",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "decoder.final_layernorm": "transformer.layernorm_f",
    "decoder.layers": "transformer.layers",
}


class Parameter:
    """Stands for OneFlow's class in a pickle."""

    __module__ = "oneflow.nn"

    def __init__(self, path: str):
        self.path = path


def write_libai(model: Any, directory: Path, *, has_pickle: bool = True, **settings: Any) -> None:
    """Write a model.

    Args:
        has_pickle: whether a pickle has the names of the tensors; if not, their folders have them.
        settings: keys of `model.cfg` to change.
    """
    config = model.config
    cfg = {
        "hidden_layers": config.n_layer,
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "ffn_hidden_size": config.n_inner,
        "num_attention_heads": config.n_head,
        "max_seq_length": config.n_positions,
        "layernorm_epsilon": 1e-5,
        "output_dropout_prob": 0,
        "scale_mask_softmax_fusion": True,
        "apply_query_key_layer_scaling": True,
    }
    sections = {"model": {"_target_": "libai.models.GPTForPreTraining", "cfg": cfg | settings}}
    (directory / "config.yaml").write_text(yaml.safe_dump(sections))
    folder = directory / "model_0000099" / "model"
    folder.mkdir(parents=True)
    names = OrderedDict()
    tensors = whole_model(model, Layout(tensor=1, pipeline=1, multiple=1))
    del tensors["output_layer.weight"]  # LiBai stores it once.
    for number, (name, values) in enumerate(tensors.items()):
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        name = _PREFIX + name
        place = f"global_tensor_{number}" if has_pickle else name
        _write_tensor(folder / place, values)
        names[name] = Parameter(place)
    if has_pickle:
        (folder / "pickled_data").write_bytes(_pickled({"protocol_version": 1, "data": names}))
    else:
        (folder / "snapshot_done").touch()
    (directory / "last_checkpoint").write_text("model_0000099")


def _write_tensor(folder: Path, values: torch.Tensor) -> None:
    folder.mkdir()
    dims = "".join(f"  dim: {size}\n" for size in values.shape)
    (folder / "meta").write_text(f"shape {{\n{dims}}}\ndata_type: kFloat\n")
    (folder / "out").write_bytes(np.ascontiguousarray(values.numpy()).tobytes())


def _pickled(saved: dict[str, Any]) -> bytes:
    """Pickle objects whose class is found in a module that is there for this moment only."""
    modules = {name: types.ModuleType(name) for name in ("oneflow", "oneflow.nn")}
    vars(modules["oneflow.nn"])["Parameter"] = Parameter
    vars(modules["oneflow"])["nn"] = modules["oneflow.nn"]
    sys.modules.update(modules)
    try:
        return pickle.dumps(saved)
    finally:
        for name in modules:
            del sys.modules[name]
