"""The description of a Hugging Face architecture: model class in Taibai, config keys, and weights.

Everything is declared in tables that are read in both directions, so one `Architecture` is enough
to import a model and to export it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from convert.keys import KeyMap
from convert.names import Row, TensorMapping, tensor_mappings
from convert.tensor_files import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model class of Hugging Face's transformers, and the corresponding model in Taibai.

    Attributes:
        name: name of the class, as in `architectures` of config.json.
        family: name of the family, as people call it.
        tried: names on the hub of the models whose config.json a test reads.
        model_type: `model_type` of config.json.
        model: `model.name` in the config of a run.
        model_class: model class of this project.
        keys: keys of config.json and the config fields that they correspond to.
        rows: weights, with the names that they have in the model with a head.
        prefix: prefix of the names of the base model's weights, including its dot.
        is_base: whether the model is a base model: it has no head, and its names have no prefix.
        fields: config fields that the class implies, regardless of config.json.
        harmless: keys of config.json that do not affect the computation.
        buffers: regular expressions for tensors that are not weights.
        other_heads: regular expressions for weights of other models with the same base, which a
            file may contain; {num_layers} in them stands for the model's number of layers.
        detect: function (tensors in the files, config.json) -> config fields that only the
            tensors reveal; None if there are none.
        detected_fields: names of the fields that `detect` returns.
        limits: function (the model class's Config) -> descriptions of the settings that
            config.json can express but the class cannot run; None if there are no such settings.
        template: special tokens around a text, such as "{cls} $A {sep}", in the syntax of
            TemplateProcessing in the `tokenizers` library.
        pair_template: special tokens around the two texts $A and $B of a pair.
        is_generative: whether the class generates text.
        module_names: pairs of a regular expression and a replacement, which turn names in files
            into the names of modules in `transformers` 5, under which PEFT stores adapters. Other
            names stay as they are.
    """

    name: str
    family: str
    tried: Sequence[str] = ()
    model_type: str
    model: str
    model_class: type
    keys: KeyMap
    rows: Sequence[Row]
    prefix: str
    is_base: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    harmless: Sequence[str] = ()
    buffers: Sequence[str] = ()
    other_heads: Sequence[str] = ()
    detect: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Any]] | None = None
    detected_fields: Sequence[str] = ()
    limits: Callable[[Any], Iterator[str]] | None = None
    template: str = "$A"
    pair_template: str = "$A $B"
    is_generative: bool = False
    module_names: Sequence[tuple[str, str]] = ()

    def tensor_mappings(
        self, shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int | None
    ) -> list[TensorMapping]:
        """Return the mappings of all parameters; see `convert.names.tensor_mappings`."""
        rows = self.rows
        if self.is_base:
            rows = [
                dataclasses.replace(row, theirs=row.theirs.removeprefix(self.prefix), tied=())
                for row in rows
            ]
        return tensor_mappings(rows, shapes, vocab_size=vocab_size)

    def base(self, name: str, **changes: Any) -> "Architecture":
        """Derive the architecture of the base model, which has no head."""
        fields = {**self.fields, "head": "none", **changes.pop("fields", {})}
        changes = {"is_generative": False, **changes}
        return dataclasses.replace(self, name=name, is_base=True, fields=fields, **changes)


def detect_pooler(tensors: Mapping[str, Tensor], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `use_pooler`: whether the files have a pooler, a layer after the last norm."""
    return {"use_pooler": any(name.endswith("pooler.dense.weight") for name in tensors)}
