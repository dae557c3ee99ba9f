"""Read MaxText's checkpoints of LLaMA, Mistral, Qwen 2.5 and Qwen 3.

Orbax stores them as it stores checkpoints of Taibai (checkpoint/arrays.py):

    config.json                    placed there by the user
    100/items/_METADATA            the list of arrays, and the format that they have
    100/items/manifest.ocdbt …     the arrays params.params.decoder… and the state of the optimizer

The checkpoint has neither the sizes of heads nor the base of rotary positions, so config.json of
the same model in the Hugging Face format is needed. The layers of a stack are one array, in which
the second axis counts the layers, or each layer has arrays of its own (`layers_0`).

LLaMA and Mistral divide the query by the square root of the size of a head when their weights are
initialized, not when scores are computed; and with the rotary positions of Llama 3.1, neighbouring
features are rotated together, where the Hugging Face format rotates the two halves of a head. Both
are undone here.

D embed, F mlp, N heads, H head dim, V vocab, L layers.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from convert.model_on_disk import read_config
from convert.tensor_files import DTYPES, Tensor
from convert.trainers.weights import Weights, derived, rows
from untrusted.documents import read_json
from untrusted.files import check_tree
from untrusted.messages import shortened
from untrusted.schema import check_fields

_LIST = "_METADATA"
_CONFIG = "config.json"
_ITEMS = "items"
# TensorStore keeps this much of recently read chunks in memory. The layers of a stack are read one
# after another, and a chunk has some of each.
_CACHE_BYTES = 2**30

#: Tensor of a layer in MaxText -> its name in the Hugging Face format.
_OF_LAYER = {
    "pre_self_attention_layer_norm.scale": "input_layernorm.weight",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
    "self_attention.query.kernel": "self_attn.q_proj.weight",
    "self_attention.key.kernel": "self_attn.k_proj.weight",
    "self_attention.value.kernel": "self_attn.v_proj.weight",
    "self_attention.out.kernel": "self_attn.o_proj.weight",
    "self_attention.query.bias": "self_attn.q_proj.bias",
    "self_attention.key.bias": "self_attn.k_proj.bias",
    "self_attention.value.bias": "self_attn.v_proj.bias",
    "self_attention.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention.key_norm.scale": "self_attn.k_norm.weight",
    "mlp.wi_0.kernel": "mlp.gate_proj.weight",
    "mlp.wi_1.kernel": "mlp.up_proj.weight",
    "mlp.wo.kernel": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "token_embedder.embedding": "model.embed_tokens.weight",
    "decoder.decoder_norm.scale": "model.norm.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
}
_LAYER = re.compile(r"decoder\.layers(?:_(\d+))?\.(.+)")
#: `model_type` -> whether the weights of the query are divided by the square root of H.
_QUERY_IS_SCALED = {"llama": True, "mistral": True, "qwen2": False, "qwen3": False}


def find_items(path: Path) -> Path | None:
    """Return the folder with the arrays of the newest step; None if there is no such checkpoint.

    Args:
        path: directory of a run, its `checkpoints`, one of their steps, or its `items`.
    """
    for folder in (path, path / "checkpoints"):
        if folder.is_dir():
            steps = [step for step in folder.iterdir() if step.name.isdecimal()]
            steps = [step for step in steps if (step / _ITEMS / _LIST).is_file()]
            if steps:
                return max(steps, key=lambda step: int(step.name)) / _ITEMS
    places = (path / _ITEMS, path)
    items = next((place for place in places if (place / _LIST).is_file()), None)
    return items if items is not None and items.name == _ITEMS else None


def read_items(path: Path, items: Path) -> Weights:
    """Read a checkpoint.

    Args:
        path: directory with config.json.
        items: folder with the arrays.

    Raises:
        ValueError: config.json is missing, a file is damaged, or the model is not supported.
    """
    if not (path / _CONFIG).is_file():
        raise ValueError(
            f"{path} has no {_CONFIG}, which MaxText does not write; copy the {_CONFIG} of the "
            "same model in the Hugging Face format there, because it has the sizes of the heads "
            "and the base of rotary positions"
        )
    config = read_config(path / _CONFIG, within=path)
    if config.get("model_type") not in _QUERY_IS_SCALED:
        raise ValueError(
            f"{path / _CONFIG} has model_type={shortened(str(config.get('model_type')))}, but of "
            f"MaxText's models only {', '.join(_QUERY_IS_SCALED)} can be read"
        )
    kinds = {"num_attention_heads": int, "hidden_size": int, "vocab_size": int}
    check_fields(config, kinds | {"num_hidden_layers": int}, path / _CONFIG)
    arrays = _open(items)
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        tensors |= _converted(name, array, config, items)
    return Weights(config=config, tensors=tensors)


def _open(items: Path) -> dict[str, ts.TensorStore]:
    """Open the arrays of the model by name, without `params.`."""
    check_tree(items, items)
    file = items / _LIST
    metadata = read_json(file, within=items)
    kinds = {"use_ocdbt": bool | None, "use_zarr3": bool | None}
    check_fields(metadata, kinds | {"tree_metadata": dict[str, dict[str, Any]]}, file)
    names = []
    for leaf in metadata["tree_metadata"].values():
        check_fields(leaf, {"key_metadata": list[dict[str, Any]]}, file)
        keys = [str(key.get("key")) for key in leaf["key_metadata"]]
        if keys[:1] == ["params"]:
            names.append(".".join(keys))
    if not names:
        raise ValueError(f"{file} lists no arrays whose names begin with params")
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    stores = {
        name: {"driver": driver, "kvstore": _store(items, name, metadata.get("use_ocdbt"))}
        for name in names
    }
    try:
        opening = {
            name: ts.open(spec, open=True, read=True, context=context)
            for name, spec in stores.items()
        }
        return {
            re.sub(r"^(params\.)+", "", name): future.result() for name, future in opening.items()
        }
    except Exception as error:  # TensorStore's, which has several lines
        raise ValueError(
            f"{items} does not have the arrays that {_LIST} lists ({shortened(error)}); the "
            "checkpoint is damaged"
        ) from None


def _store(items: Path, name: str, has_ocdbt: bool | None) -> dict[str, Any]:
    if not has_ocdbt:
        return {"driver": "file", "path": f"{items / name}/"}
    base = {"driver": "file", "path": f"{items}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{name}/"}


def _converted(
    name: str, array: ts.TensorStore, config: Mapping[str, Any], items: Path
) -> dict[str, Tensor]:
    """Return the tensors of an array by their Hugging Face names."""
    match = _LAYER.fullmatch(name)
    theirs = _OUTSIDE.get(name) if match is None else _OF_LAYER.get(match[2])
    if theirs is None:
        raise ValueError(
            f"{items} has the array {shortened(name)}, which a {config['model_type']} of MaxText "
            "does not have by default; only its layers as in base.yml can be read, without experts "
            "and fused projections"
        )
    if match is None:
        return {theirs: _as_linear(name, _tensor(name, array, items), config)}
    module = match[2]
    if match[1] is not None:
        tensor = _tensor(name, array, items)
        return {f"model.layers.{match[1]}.{theirs}": _as_linear(module, tensor, config)}
    layers = array.shape[1] if len(array.shape) > 1 else -1
    if layers != config["num_hidden_layers"]:
        raise ValueError(
            f"{items} has the array {name} of the shape {list(array.shape)}, whose second axis "
            f"must count the layers, but config.json has num_hidden_layers="
            f"{config['num_hidden_layers']}; set param_scan_axis=1, the default of MaxText"
        )
    return {
        f"model.layers.{layer}.{theirs}": _as_linear(
            module, _tensor(name, array[:, layer], items), config
        )
        for layer in range(layers)
    }


def _tensor(name: str, array: ts.TensorStore, items: Path) -> Tensor:
    dtype = array.dtype.numpy_dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"{items}: the array {name} is {dtype}, which weights cannot be")
    return Tensor(
        name=name,
        file=items / _LIST,
        dtype=dtype,
        shape=tuple(array.shape),
        map=lambda: array.read().result(),
    )


def _as_linear(module: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor as the Hugging Face format has it.

    Args:
        module: name of the tensor in MaxText, without the name of the layer.
    """
    name, shape = tensor.name, tensor.shape
    if module == "token_embedder.embedding":
        return rows(name, tensor, slice(config["vocab_size"]))
    if module.endswith((".query.kernel", ".key.kernel")) and len(shape) == 3:
        tensor = _as_halves(tensor, config)
        if module.endswith(".query.kernel") and _QUERY_IS_SCALED[config["model_type"]]:
            tensor = derived(name, tensor, shape, _times(math.sqrt(shape[-1])))
    if not module.endswith(".kernel"):
        return derived(name, tensor, (math.prod(shape),), np.ravel)
    # All but the last axis of `out` are inputs, and all but the first axis of the others outputs.
    num_inputs = math.prod(shape[:-1]) if module.endswith(".out.kernel") else shape[0]
    num_outputs = math.prod(shape) // max(1, num_inputs)
    return derived(
        name,
        tensor,
        (num_outputs, num_inputs),
        lambda values: values.reshape(num_inputs, num_outputs).T,
    )


def _as_halves(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Order the features of a head as two halves, if neighbouring features are rotated together."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
    if kind != "llama3":
        return tensor
    return derived(
        tensor.name,
        tensor,
        tensor.shape,
        lambda values: np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1),
    )


def _times(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that multiplies in float32, and keeps the dtype."""
    return lambda values: (values.astype(np.float32) * np.float32(factor)).astype(values.dtype)
