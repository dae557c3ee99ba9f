"""The format of adapters in Hugging Face's PEFT: files, and names of tensors.

An adapter is stored under the name of its layer, so the tables of the families (convert/families)
also name the tensors of adapters:

    ours                               theirs
    decoder.layers.mlp.up.kernel       model.layers.0.mlp.up_proj.weight
    decoder.layers.mlp.up.lora.a       base_model.model.model.layers.0.mlp.up_proj.lora_A.weight

PEFT finds a layer by the name of its module. For a few architectures, `transformers` 5 renames the
tensors of a file while it loads them, so these names differ.

For `transformers` 5, the experts of a layer are two parameters instead of a module each. Adapters
are written under the names of these modules, which PEFT converts. Adapters that PEFT trained there
are stored for all experts of a layer together:

    decoder.layers.mlp.up_lora.a    model.layers.0.mlp.experts.0.up_proj.lora_A.weight    [r, D]
    decoder.layers.mlp.up_lora.a    model.layers.0.mlp.experts.base_layer.lora_A.weight   [E · r, D]
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.architecture import Architecture
from convert.model_on_disk import Shapes
from convert.names import TensorMapping
from convert.tensor_files import Tensor
from models.adapters import adapter_of
from untrusted.hub import model_of

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
#: The beginning of the names of all tensors.
PREFIX = "base_model.model."

#: Name of a part of an adapter in a linear layer -> its name in the files.
PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def module_of(place: TensorMapping) -> str:
    """Return the name of the module that a tensor belongs to."""
    return place.theirs.rpartition(".")[0]


def name_of(kernel: TensorMapping, part: str) -> str:
    """Return the name of a part (a key of PARTS) of a kernel's adapter, without PREFIX."""
    return f"{module_of(kernel)}.{PARTS[part]}"


def module_mappings(
    architecture: Architecture, shapes: Shapes, *, vocab_size: int | None
) -> list[TensorMapping]:
    """Return the mappings of all parameters, to the names that PEFT has for them.

    Raises:
        ValueError: the files store several linear layers as one, which PEFT adapts together.
    """
    mappings = architecture.tensor_mappings(shapes, vocab_size=vocab_size)
    if fused := next((m.theirs for m in mappings if m.num_rows is not None), None):
        raise ValueError(
            f"{architecture.name} stores several linear layers in one tensor, such as {fused}, but "
            "their adapters are separate here; merge adapters into the model, and use that"
        )
    return [dataclasses.replace(m, theirs=module_name(architecture, m.theirs)) for m in mappings]


def module_name(architecture: Architecture, name: str) -> str:
    """Return the name that a tensor, or its module, has in a model of `transformers` 5.

    Args:
        name: its name there or in a file.
    """
    for pattern, replacement in architecture.module_names:
        name = re.sub(pattern, replacement, name)
    return name


def adapter_mappings(mappings: Sequence[TensorMapping], shapes: Shapes) -> Iterator[TensorMapping]:
    """Yield the mappings of all adapters.

    Args:
        mappings: mappings of the model without adapters.
        shapes: parameters of the model with adapters.
    """
    for kernel in mappings:
        for part in PARTS:
            ours = f"{adapter_of(kernel.ours)}.{part}"
            if ours not in shapes:
                continue
            yield dataclasses.replace(
                kernel,
                theirs=name_of(kernel, part),
                tied=(),
                ours=ours,
                shape=shapes[ours][len(kernel.place) :],
                kind="flat" if part == "magnitude" else "linear",
                num_inputs=1 if part == "b" else kernel.num_inputs,
            )


def split_experts(
    tensors: Mapping[str, Tensor], mappings: Sequence[TensorMapping], targets: Sequence[str]
) -> dict[str, Tensor]:
    """Split the adapters that cover all experts of a layer into one per expert.

    An adapter of gate and up, which are one parameter, has one A for both.

    Args:
        tensors: by the names of modules in `transformers` 5.
        mappings: as from `module_mappings`.
        targets: `target_parameters` of adapter_config.json.
    """
    result = dict(tensors)
    layers: dict[str, dict[str, list[TensorMapping]]] = {}
    for place in mappings:
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.\w+\.weight", place.theirs):
            product = place.ours.rpartition(".")[2]
            layers.setdefault(match[1], {}).setdefault(product, []).append(place)
    has_down = any(target.endswith("down_proj") for target in targets)
    for module, products in layers.items():
        gate_and_up = [products["gate"], products["up"]]
        # If both parameters have adapters, the wrapper for `down` is the outer one.
        inner = f"{module}.base_layer"
        if f"{inner}.{PARTS['a']}" in tensors:
            _split(result, inner, gate_and_up)
            _split(result, module, [products["down"]])
        else:
            _split(result, module, [products["down"]] if has_down else gate_and_up)
    return result


def _split(
    tensors: dict[str, Tensor], wrapper: str, products: Sequence[Sequence[TensorMapping]]
) -> None:
    """Split the adapter of a parameter, which may be several products, into one per expert.

    Args:
        tensors: changed.
        wrapper: name of the adapter's module.
        products: mappings of the experts' weights, in order, for each product.
    """
    names = [f"{wrapper}.{PARTS[part]}" for part in ("a", "b")]
    a, b = (tensors.get(name) for name in names)
    num_experts = len(products[0])
    num_products = len(products)
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
        return
    if a.shape[0] % num_experts or b.shape[1] % num_experts or b.shape[0] % num_products:
        return
    for name in names:
        del tensors[name]
    rank, num_outputs = a.shape[0] // num_experts, b.shape[0] // num_products
    for number, experts in enumerate(products):
        for expert, place in enumerate(experts):

            def of_a(a: Tensor = a, expert: int = expert) -> np.ndarray:
                return a.map()[expert * rank : (expert + 1) * rank]

            def of_b(b: Tensor = b, number: int = number, expert: int = expert) -> np.ndarray:
                rows = b.map()[number * num_outputs : (number + 1) * num_outputs]
                return rows[:, expert::num_experts]

            shapes = {"a": (rank, a.shape[1]), "b": (num_outputs, b.shape[1] // num_experts)}
            for part, tensor, read in (("a", a, of_a), ("b", b, of_b)):
                name = name_of(place, part)
                tensors[name] = dataclasses.replace(tensor, name=name, shape=shapes[part], map=read)


def check_untied(trained: Iterable[TensorMapping], what: str, remedy: str) -> None:
    """Check that no parameter trained in addition to the adapters is used twice in the model.

    PEFT trains a copy for one of the places, and keeps the original in the other.

    Args:
        what: config key that names these parameters, for the message of the ValueError.
    """
    for place in trained:
        others = [name for name in place.tied if name.endswith(".weight")]
        if others:
            raise ValueError(
                f"{what} has {module_of(place)}, whose weight is also {others[0]}; PEFT would "
                f"train only one of the two; {remedy}"
            )


def name_of_base(config: Mapping[str, Any]) -> str:
    """Return the path of the base, or its name on the hub with the revision; "" without one."""
    name = config.get("base_model_name_or_path")
    revision = config.get("revision")
    if not isinstance(name, str):
        return ""
    return f"{name}@{revision}" if revision and model_of(name) is not None else name
