"""Write adapters in the format of Hugging Face's PEFT; see peft_format.py."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from convert.adapters.peft_format import (
    CONFIG_FILE,
    PARTS,
    PREFIX,
    TENSORS_FILE,
    adapter_mappings,
    check_untied,
    module_mappings,
    module_of,
)
from convert.architecture import Architecture
from convert.model_on_disk import Shapes, Source
from convert.names import TensorMapping, assemble
from convert.tensor_files import ShardWriter
from models.adapters import adapter_of, is_adapter, layer_of
from untrusted.files import write_text
from untrusted.hub import pinned_model_of

_log = logging.getLogger(__name__)

#: The end of an architecture's name -> the task of an adapter.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
}
#: Modules that PEFT stores whole for the task SEQ_CLS.
_SAVED_BY_PEFT = {"classifier", "score"}
#: Last words of the names of routers and of the products of experts that PEFT converts.
_MODULES_OF_EXPERTS = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}


def base_of(source: Source, read: Callable[[str, Mapping[str, str]], Source]) -> Source | None:
    """Return the model that the adapters of a run are for; None if it cannot be reached.

    A run that continues the adapters of another has the same base as that one. If the base does not
    come from Hugging Face, a warning says so.

    Args:
        read: opens a path, or `org/name@commit`, with the commits of a run for its base.

    Raises:
        ValueError: A model on the way there cannot be read.
    """
    path = source.init_from
    hub_commits = source.hub_commits
    while path and (Path(path).exists() or pinned_model_of(path)):
        try:
            base = read(path, hub_commits)
        except ConnectionError as error:
            _log.warning("%s", error)
            return None
        if base.lora.rank is None:
            if base.architecture is None:
                _log.warning(
                    "The adapters are for %s, which is not a Hugging Face model, so PEFT cannot "
                    "load them. Export it with convert.to_hf, and set base_model_name_or_path to "
                    "the export; or write the whole model with --merge.",
                    path,
                )
            return base
        path = base.init_from
        hub_commits = base.hub_commits
    return None


def write_adapter(
    source: Source,
    architecture: Architecture,
    directory: Path,
    dtype: np.dtype | None,
    base: Source | None,
) -> None:
    """Write the adapters of a model for PEFT, and other parameters that were trained or are new.

    Args:
        dtype: dtype of the tensors; None: as they are stored.
        base: model that the adapters are for, from `base_of`.

    Raises:
        ValueError: PEFT cannot express it, because a convolution has an adapter, or only a part of
            a module was trained, or a parameter that is used in two places, or experts.
    """
    all_shapes = source.shapes()
    shapes = {name: shape for name, shape in all_shapes.items() if not is_adapter(name.split("."))}
    vocab_size = getattr(source.config, "vocab_size", None)
    mappings = module_mappings(architecture, shapes, vocab_size=vocab_size)
    _check_linear(mappings, all_shapes)
    _check_convertible(mappings, all_shapes)
    of_adapters = [*adapter_mappings(mappings, all_shapes)]
    known = shapes if base is None else base.shapes()
    trained = [
        m
        for m in mappings
        if m.ours not in known
        or any(fnmatchcase(m.ours, pattern) for pattern in source.lora.also_trained)
    ]
    _check_no_experts(trained)
    _check_whole_modules(mappings, trained)
    check_untied(trained, "lora.also_trained", "write the whole model with --merge")
    places = {PREFIX + m.theirs: m for m in (*of_adapters, *trained)}
    arrays = source.open({m.ours: all_shapes[m.ours] for m in places.values()})
    dtypes = {name: dtype or arrays[m.ours].dtype for name, m in places.items()}
    tensors = [(name, dtypes[name], m.their_shape) for name, m in places.items()]
    writer = ShardWriter(directory, tensors, max_shard_bytes=None, single=TENSORS_FILE)
    writer.write(lambda name: assemble([places[name]], arrays, dtypes[name]))
    config = _config(source, architecture, mappings, of_adapters, trained)
    name = str(base.path) if base else source.init_from
    repository = pinned_model_of(name)
    config["base_model_name_or_path"] = (repository.name if repository else name) or None
    if repository is not None:
        config["revision"] = repository.revision
    write_text(directory / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _config(
    source: Source,
    architecture: Architecture,
    mappings: Sequence[TensorMapping],
    of_adapters: Sequence[TensorMapping],
    trained: Sequence[TensorMapping],
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    lora = source.lora
    task = next((t for end, t in _TASKS.items() if architecture.name.endswith(end)), None)
    saved = _saved_modules(mappings, of_adapters, trained)
    if task == "SEQ_CLS" and not saved & _SAVED_BY_PEFT:
        task = None  # with this task, PEFT expects its classifier in the file
    names = {m.theirs for m in of_adapters if m.ours.endswith(".a")}
    modules = {name.removesuffix(f".{PARTS['a']}") for name in names}
    kinds = {m.kind for m in mappings if m.theirs.removesuffix(".weight") in modules}
    return {
        "peft_type": "LORA",
        "task_type": task,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _short_names(modules, {module_of(m) for m in mappings}),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": "conv1d" in kinds,
        "bias": "none",
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "inference_mode": True,
    }


def _saved_modules(
    mappings: Sequence[TensorMapping],
    of_adapters: Sequence[TensorMapping],
    trained: Sequence[TensorMapping],
) -> set[str]:
    """Return the modules to store whole, such as `classifier` for `classifier.dense` and the rest.

    PEFT stores the classifier of a text as one module.
    """

    def top(place: TensorMapping) -> str:
        return place.theirs.partition(".")[0]

    names = {m.theirs for m in trained}
    others = [*of_adapters, *(m for m in mappings if m.theirs not in names)]
    in_parts = {top(m) for m in others}
    return {module_of(m) if top(m) in in_parts else top(m) for m in trained}


def _short_names(modules: set[str], known: set[str]) -> list[str]:
    """Return the last words of the modules' names, or whole names where a word is ambiguous."""
    names = set()
    # A module within others, such as layers.0.mlp, stands for them as well: layers.0 and layers.
    within = {
        ".".join(words[: i + 1])
        for words in (name.split(".") for name in known)
        for i in range(len(words))
    }
    for module in modules:
        word = module.rpartition(".")[2]
        same = {each for each in within if each.rpartition(".")[2] == word}
        names.add(word if same <= modules else module)
    return sorted(names)


def _check_linear(mappings: Sequence[TensorMapping], shapes: Shapes) -> None:
    """Check that no layer that is a convolution in the Hugging Face model has an adapter."""
    for place in mappings:
        if place.kind == "conv2d" and f"{adapter_of(place.ours)}.a" in shapes:
            raise ValueError(
                f"{layer_of(place.ours)} has an adapter, but is a convolution in the Hugging Face "
                "model; write the whole model with --merge, or leave it out of lora.targets"
            )


def _check_convertible(mappings: Sequence[TensorMapping], shapes: Shapes) -> None:
    """Check that PEFT converts the adapters of a model with experts for `transformers` 5.

    It goes by the last words of names, so it takes a shared MLP for experts; and it expects that
    `gate`, `up` and `down` have adapters, or `down` alone.
    """
    if not any(".experts" in m.theirs for m in mappings):
        return
    remedy = "write the whole model with --merge, or change lora.targets"
    adapted = {m.ours: m for m in mappings if f"{adapter_of(m.ours)}.a" in shapes}
    for ours, place in adapted.items():
        is_of_experts = layer_of(ours) == ours
        is_known = module_of(place).rpartition(".")[2] in _MODULES_OF_EXPERTS
        if is_of_experts != is_known:
            what = "has no adapters for" if is_of_experts else "takes for experts:"
            raise ValueError(
                f"{layer_of(ours)} has an adapter, which PEFT {what} {module_of(place)}; {remedy}"
            )
    layers: dict[str, set[str]] = {}
    for ours, place in adapted.items():
        if ".experts." in place.theirs:
            layer, _, product = ours.rpartition(".")
            layers.setdefault(layer, set()).add(product)
    for layer, products in layers.items():
        if products not in ({"down"}, {"gate", "up", "down"}):
            raise ValueError(
                f"{layer} has adapters of {', '.join(sorted(products))}, but PEFT converts those "
                f"of gate, up and down together, or of down alone; {remedy}"
            )


def _check_no_experts(trained: Sequence[TensorMapping]) -> None:
    """Check that no experts were trained, which are no modules of their own in transformers."""
    experts = [m.ours for m in trained if ".experts." in m.theirs]
    if experts:
        raise ValueError(
            f"lora.also_trained has {experts[0]}, but PEFT cannot store experts; write the whole "
            "model with --merge"
        )


def _check_whole_modules(
    mappings: Sequence[TensorMapping], trained: Sequence[TensorMapping]
) -> None:
    """Check that all parameters of a module were trained, if one of them was."""
    modules = {module_of(m) for m in trained}
    names = {m.theirs for m in trained}
    missing = [m.ours for m in mappings if module_of(m) in modules and m.theirs not in names]
    if missing:
        raise ValueError(
            f"lora.also_trained has parameters of a module without its {missing[0]}, but PEFT "
            "stores whole modules only; write the whole model with --merge"
        )
