"""The format of adapters in Hugging Face's PEFT: files, and names of tensors.

An adapter is stored under the name of its layer, so the tables of the families (convert/families)
also name the tensors of adapters:

    ours                               theirs
    decoder.layers.mlp.up.kernel       model.layers.0.mlp.up_proj.weight
    decoder.layers.mlp.up.lora.a       base_model.model.model.layers.0.mlp.up_proj.lora_A.weight

PEFT finds a layer by the name of its module. For a few architectures, `transformers` 5 renames the
tensors of a file while it loads them, so these names differ.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from convert.architecture import Architecture
from convert.model_on_disk import Shapes
from convert.names import TensorMapping

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
        layer, _, word = kernel.ours.rpartition(".")
        for part in PARTS:
            ours = f"{layer}.lora.{part}"
            if word != "kernel" or ours not in shapes:
                continue
            yield dataclasses.replace(
                kernel,
                theirs=name_of(kernel, part),
                tied=(),
                ours=ours,
                shape=shapes[ours][len(kernel.at) :],
                kind="flat" if part == "magnitude" else "linear",
                num_inputs=1 if part == "b" else kernel.num_inputs,
            )


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
