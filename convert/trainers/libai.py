"""Read LiBai's GPT checkpoints, as OneFlow 0.9 and earlier versions save them.

A tensor has a folder, with its shape and dtype in `meta` and its bytes in `out`:

    last_checkpoint                          model_0000099
    config.yaml                              the settings of the run, with the sizes of the model
    model_0000099/model/pickled_data         a pickle: name of a tensor -> its folder
    model_0000099/model/global_tensor_7/meta shape { dim: 4 dim: 3 } data_type: kFloat
    model_0000099/model/global_tensor_7/out

Before OneFlow 0.7, the folder of a tensor had its name, and there was no pickle. LiBai saves whole
tensors, whatever the sizes of tensor and pipeline parallelism. Its tensors have the layout of
Megatron-LM's.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.tensor_files import Tensor, mapper_of
from convert.trainers.gpt import Sizes, as_gpt2, parse_name
from convert.trainers.weights import Weights
from untrusted.documents import read_yaml
from untrusted.files import open_regular, read_bytes, read_text
from untrusted.messages import shortened
from untrusted.pickles import Record, read_pickle
from untrusted.schema import check_fields

LAST = "last_checkpoint"
_CONFIG = "config.yaml"
_NAMES = "pickled_data"
_DONE = "snapshot_done"
_MODEL = "model"
_TENSORS = ("oneflow.Tensor", "oneflow.nn.Parameter")
_MAX_NAMES_BYTES = 16 * 2**20
_DTYPES = {
    "kFloat": np.dtype(np.float32),
    "kDouble": np.dtype(np.float64),
    "kFloat16": np.dtype(np.float16),
    "kBFloat16": np.dtype(ml_dtypes.bfloat16),
}
_META = re.compile(r"\s*shape\s*\{((?:\s*dim:\s*\d{1,18})*)\s*\}\s*data_type:\s*(\w+)\s*")
_SIZES = {
    "hidden_layers": int,
    "vocab_size": int,
    "hidden_size": int,
    "ffn_hidden_size": int,
    "num_attention_heads": int,
    "max_seq_length": int,
    "layernorm_epsilon": float | None,
    "initializer_range": float | None,
    "output_dropout_prob": float | None,
}


def find_checkpoint(path: Path) -> Path | None:
    """Return the folder of the newest checkpoint; None if there is no LiBai checkpoint.

    Args:
        path: output directory of a run, or one of its checkpoints.

    Raises:
        ValueError: `last_checkpoint` is damaged, or names a folder that is missing.
    """
    last = path / LAST
    if not last.is_file():
        model = path / _MODEL
        return path if any((model / name).is_file() for name in (_NAMES, _DONE)) else None
    name = read_text(last, within=path, max_bytes=1000).strip()
    if not name or Path(name).name != name or not (path / name / _MODEL).exists():
        raise ValueError(
            f"{last} names {shortened(name)!r}, but {path} has no such folder with a {_MODEL!r}"
        )
    return path / name


def has_pickle(folder: Path) -> bool:
    """Return whether a checkpoint has a pickle."""
    return not (folder / _MODEL / _DONE).is_file()


def read_folders(folder: Path) -> Weights:
    """Read a checkpoint.

    Args:
        folder: folder with `model`.

    Raises:
        ValueError: A file is damaged or missing, or the model is not supported.
    """
    config, sizes = _read_config(folder)
    model = folder / _MODEL
    if model.is_file():
        raise ValueError(
            f"{model} is a single pickle with the tensors, as OneFlow after 0.9 saves it, which "
            "cannot be read; save it with OneFlow as folders: flow.save(flow.load(path), "
            "new_path, save_as_external_data=True)"
        )
    tensors = {
        parse_name(name, model): _open(name, directory) for name, directory in _directories(model)
    }
    return Weights(config=config, tensors=as_gpt2(tensors, sizes))


def _read_config(folder: Path) -> tuple[dict[str, Any], Sizes]:
    """Return the config.json of the same GPT-2, and its sizes."""
    file = next((x / _CONFIG for x in (folder, folder.parent) if (x / _CONFIG).is_file()), None)
    if file is None:
        raise ValueError(
            f"neither {folder} nor {folder.parent} has a {_CONFIG}, which LiBai writes into the "
            "output directory of a run; copy it there, because it has the sizes of the model"
        )
    section = read_yaml(file, within=file.parent).get("model")
    cfg = section.get("cfg") if isinstance(section, dict) else None
    if not isinstance(cfg, dict):
        raise ValueError(f"{file} has no model.cfg, which LiBai's GPTs have")
    check_fields(cfg, _SIZES, f"{file}: model.cfg")
    wrong = [name for name, kind in _SIZES.items() if kind is int and cfg[name] < 1]
    if wrong:
        raise ValueError(f"{file}: model.cfg has {wrong[0]}={cfg[wrong[0]]}, not at least 1")
    if cfg.get("apply_residual_post_layernorm"):
        raise ValueError(
            f"{file}: model.cfg has apply_residual_post_layernorm=true, which a GPT-2 does not have"
        )
    if not cfg.get("scale_mask_softmax_fusion", False):
        raise ValueError(
            f"{file}: model.cfg has scale_mask_softmax_fusion=false, with which LiBai's GPT has no "
            "causal mask, so that each token also sees those after it; this cannot be read"
        )
    num_heads = cfg["num_attention_heads"]
    sizes = Sizes(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=max(1, cfg["hidden_size"] // num_heads),
        vocab_size=cfg["vocab_size"],
        settings=file,
    )
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": cfg["vocab_size"],
        "n_positions": cfg["max_seq_length"],
        "n_layer": cfg["hidden_layers"],
        "n_head": num_heads,
        "n_embd": cfg["hidden_size"],
        "n_inner": cfg["ffn_hidden_size"],
        "activation_function": "gelu",  # in OneFlow, the fused kernel is exact, too
        "resid_pdrop": cfg.get("output_dropout_prob") or 0.0,
        "layer_norm_epsilon": cfg.get("layernorm_epsilon") or 1e-5,
        "initializer_range": cfg.get("initializer_range") or 0.02,
    }
    return config, sizes


def _directories(model: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of each tensor, and its folder."""
    if (model / _DONE).is_file():
        for directory in sorted(model.iterdir()):
            if directory.is_dir():
                yield directory.name, directory
        return
    file = model / _NAMES
    content = read_bytes(file, within=model, max_bytes=_MAX_NAMES_BYTES)
    saved = read_pickle(content, file, lambda name: name in _TENSORS)
    names = saved.get("data") if isinstance(saved, dict) else None
    if not isinstance(names, dict) or saved.get("protocol_version") != 1:
        raise ValueError(f"{file} is not a file of OneFlow with protocol_version 1")
    for name, record in names.items():
        path = record.get("path") if isinstance(record, Record) else None
        if not isinstance(path, str) or Path(path).name != path or path in (".", ".."):
            raise ValueError(f"{file}: {shortened(str(name))} has no folder of a tensor")
        yield str(name), model / path


def _open(name: str, directory: Path) -> Tensor:
    """Open the tensor in a folder."""
    meta = directory / "meta"
    file = directory / "out"
    for path in (meta, file):
        if not path.is_file():
            raise ValueError(f"{path} is missing, which belongs to the tensor {shortened(name)}")
    text = read_text(meta, within=directory, max_bytes=10_000)
    match = _META.fullmatch(text)
    if match is None or match[2] not in _DTYPES:
        raise ValueError(
            f"{meta} has {shortened(text)!r}, which is not a shape and one of {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[match[2]]
    shape = tuple(map(int, re.findall(r"\d+", match[1])))
    open_regular(file, within=directory).close()
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(shape) > 8 or file.stat().st_size != num_bytes:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes, but {meta} describes "
            f"{dtype}{list(shape)}; the checkpoint is damaged"
        )
    read = mapper_of(file, dtype, shape, 0)
    return Tensor(name=name, file=file, dtype=dtype, shape=shape, map=read)
