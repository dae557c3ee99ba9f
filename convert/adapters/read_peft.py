"""Read adapters in the format of Hugging Face's PEFT; see peft_format.py."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.lazy import LazyArray
from convert.adapters.peft_format import (
    CONFIG_FILE,
    PARTS,
    PREFIX,
    TENSORS_FILE,
    adapter_mappings,
    check_untied,
    module_mappings,
    module_name,
    module_of,
    name_of,
    name_of_base,
    split_experts,
)
from convert.architecture import Architecture
from convert.huggingface import check_shape, convert_arrays
from convert.model_on_disk import Shapes, Source
from convert.names import TensorMapping, check_names
from convert.tensor_files import Tensor, open_safetensors
from data.text.tokenization.file_tokenizer import find_tokenizer
from models.adapters import layer_of
from models.layers.lora import LoraConfig
from untrusted.documents import read_json
from untrusted.hub import model_of
from untrusted.messages import shortened
from untrusted.schema import check_fields

_PICKLE_FILE = "adapter_model.bin"

#: Types of the keys of adapter_config.json that are read.
_CONFIG_TYPES = {
    "base_model_name_or_path": str | None,
    "revision": str | None,
    "r": int,
    "lora_alpha": float,
    "lora_dropout": float | None,
    "use_rslora": bool | None,
    "use_dora": bool | None,
    "bias": str | None,
    "init_lora_weights": bool | str | None,
    "target_parameters": list[str] | None,
}
#: Keys that do not affect the computation, or whose effect the tensors show.
_HARMLESS = frozenset(
    """
    auto_mapping exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform
    megatron_core modules_to_save peft_version qalora_group_size revision target_modules task_type
    """.split()
)
#: Ways to initialize adapters that leave the base model as it is.
_HARMLESS_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


def open_adapter(path: Path, open_base: Callable[[Path], Source]) -> Source:
    """Open a model with the adapters of a PEFT directory.

    Raises:
        ValueError: A key of adapter_config.json is not supported, the base model is neither on this
            machine nor on the Hugging Face hub, or tensors are missing, unknown or of the wrong
            shape.
    """
    file = path / CONFIG_FILE
    config = read_json(file, within=path)
    _check_config(config, file)
    base = _base(config, file, open_base)
    architecture = base.architecture
    assert architecture is not None
    vocab_size = base.fields.get("vocab_size")
    mappings = module_mappings(architecture, base.shapes(), vocab_size=vocab_size)
    tensors = _tensors(path, architecture, mappings)
    tensors = split_experts(tensors, mappings, config.get("target_parameters") or ())
    lora = _lora(config, mappings, tensors)
    _check_layers(lora, mappings, tensors, path)
    source = dataclasses.replace(
        base,
        path=path,
        tokenizer=find_tokenizer(path) or base.tokenizer,
        lora=lora,
        init_from=str(base.path),
        adapter_files=path,
    )
    in_file = [*adapter_mappings(mappings, source.shapes())]
    in_file += [m for m in mappings if m.ours in lora.also_trained]
    names = {m.theirs for m in in_file}
    check_names(
        {"lacks": sorted(names - tensors.keys()), "has unknown": sorted(tensors.keys() - names)},
        what=f"{path / TENSORS_FILE} does not match {CONFIG_FILE} and the model {base.path}",
    )
    for place in in_file:
        check_shape(place, tensors[place.theirs])

    def open_arrays(wanted: Shapes) -> Mapping[str, LazyArray]:
        peft_arrays = convert_arrays(wanted, in_file, tensors)
        base_shapes = {name: shape for name, shape in wanted.items() if name not in peft_arrays}
        return {**base.open(base_shapes), **peft_arrays}

    return dataclasses.replace(source, open=open_arrays)


def _lora(
    config: Mapping[str, Any], mappings: Sequence[TensorMapping], tensors: Mapping[str, Tensor]
) -> LoraConfig:
    """Return the section `lora` that describes the adapters and parameters in the file."""
    layers = ((layer_of(m.ours), m) for m in mappings)
    targets = {layer for layer, m in layers if layer and name_of(m, "a") in tensors}
    return LoraConfig(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        targets=tuple(sorted(targets)),
        also_trained=tuple(sorted({m.ours for m in mappings if m.theirs in tensors})),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
    )


def _check_layers(
    lora: LoraConfig, mappings: Sequence[TensorMapping], tensors: Mapping[str, Tensor], path: Path
) -> None:
    """Check that all layers of a stack have the same adapters, and no embedding or tied head."""
    check_untied(
        [m for m in mappings if m.ours in lora.also_trained],
        f"{path / CONFIG_FILE}: modules_to_save",
        "train it for a model with tie_word_embeddings=false, or without modules_to_save",
    )
    without = [
        m for m in mappings if layer_of(m.ours) in lora.targets and name_of(m, "a") not in tensors
    ]
    embeddings = [name for name in tensors if "lora_embedding_" in name]
    tied = {name.removesuffix(".weight") for m in mappings for name in m.tied}
    heads = [name for name in tensors if any(name.startswith(f"{module}.") for module in tied)]
    linear = {module_of(m) for m in mappings if layer_of(m.ours) and m.kind != "conv2d"}
    others = {module_of(m) for m in mappings} - linear
    not_linear = [name for name in tensors if _adapted_module(name) in others]
    problems = [
        *(f"{module_of(m)} has no adapter, but other layers have such adapters" for m in without),
        *(f"{name} belongs to an adapter of an embedding" for name in embeddings),
        *(f"{name} belongs to a layer that shares its weight with another" for name in heads),
        *(
            f"{name} belongs to an adapter of an output head or a convolution"
            for name in not_linear
        ),
    ]
    if problems:
        raise ValueError(
            f"{path / TENSORS_FILE}: {problems[0]}, which is not supported; merge the adapter with "
            "PEFT (merge_and_unload)"
        )


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Check that the adapters are of a kind that can be read."""
    # Check the kind first, because other kinds do not have the required keys, such as `r`.
    check_fields(config, {"peft_type": str}, file)
    _check_choice(config, "peft_type", ("LORA",), file)
    check_fields(config, _CONFIG_TYPES, file)
    _check_choice(config, "bias", (None, "none"), file)
    _check_choice(config, "init_lora_weights", _HARMLESS_STARTS, file)
    for name, value in config.items():
        # A value of None, False, 0 or empty stands for a feature that is not used.
        if name not in {"peft_type", *_HARMLESS, *_CONFIG_TYPES} and value:
            raise ValueError(
                f"{file} has {name}={shortened(repr(value))}, which is not supported; merge the "
                "adapter with PEFT (merge_and_unload)"
            )


def _check_choice(config: Mapping[str, Any], name: str, allowed: tuple, file: Path) -> None:
    """Check that a key of adapter_config.json has one of the values that can be read."""
    if config.get(name) not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(
            f"{file} has {name}={shortened(repr(config[name]))}, which is not supported; choose "
            f"{choices}, or merge the adapter with PEFT (merge_and_unload)"
        )


def _base(config: Mapping[str, Any], file: Path, open_base: Callable[[Path], Source]) -> Source:
    """Open the model that the adapters are for."""
    name = name_of_base(config)
    if not name or not (Path(name).is_dir() or model_of(name)):
        value = config.get("base_model_name_or_path")
        raise ValueError(
            f"{file} has base_model_name_or_path={value!r}, which is neither a directory here nor "
            "the name of a model on the Hugging Face hub; download the model, and set this key to "
            "its directory"
        )
    if (Path(name) / CONFIG_FILE).exists():
        raise ValueError(
            f"{file} has base_model_name_or_path={name!r}, which has adapters itself; merge these "
            "first, and set the directory of the merged model"
        )
    base = open_base(Path(name))
    if base.lora.rank is not None:
        raise ValueError(
            f"{file} has base_model_name_or_path={name!r}, a run with adapters of its own; set the "
            f"directory of the model that these are for, {base.init_from!r}"
        )
    if base.architecture is None:
        raise ValueError(
            f"{file} has base_model_name_or_path={name!r}, whose model does not come from Hugging "
            "Face, so the names of its layers there are not known; set the directory of a Hugging "
            "Face model"
        )
    return base


def _tensors(
    path: Path, architecture: Architecture, mappings: Sequence[TensorMapping]
) -> dict[str, Tensor]:
    """Return the tensors by the names that a model of this architecture has for them."""
    if not (path / TENSORS_FILE).exists():
        is_pickle = (path / _PICKLE_FILE).exists()
        why = f"{_PICKLE_FILE} is a pickle, which can run code; " if is_pickle else ""
        raise ValueError(f"{path} has no {TENSORS_FILE}; {why}save the adapter as safetensors")
    modules = {module_of(m) for m in mappings}
    prefix = architecture.prefix
    by_name: dict[str, Tensor] = {}
    for tensor in open_safetensors(path / TENSORS_FILE):
        name = module_name(architecture, tensor.name.removeprefix(PREFIX))
        candidates = (name, prefix + name, name.removeprefix(prefix))
        known = (
            each
            for each in candidates
            if (_adapted_module(each) or each.rpartition(".")[0]) in modules
        )
        by_name[next(known, name)] = tensor
    return by_name


def _adapted_module(name: str) -> str:
    """Return the module that a part of an adapter belongs to; "" for other tensors."""
    end = next((f".{part}" for part in PARTS.values() if name.endswith(f".{part}")), "")
    return name.removesuffix(end) if end else ""
