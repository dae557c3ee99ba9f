"""What one Hugging Face architecture is among ours: its config keys and its weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convert.keys import KeyMap
from convert.names import Row, TensorMapping, tensor_mappings
from convert.tensor_files import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One class of Hugging Face's, and what it is among ours.

    Attributes:
      name: in the `architectures` of config.json.
      model_type: in config.json.
      model: `model.name` of a run's config.
      model_class: ours.
      keys: of config.json.
      rows: of the weights, named as in the model with a head.
      prefix: of the base model's names, with its dot.
      is_base: the model has no head, and its names no prefix.
      fields: what the class itself says of our config.
      harmless: keys of config.json that it does not compute with.
      buffers: patterns of tensors that are no weights.
      other_heads: patterns of weights that a file may hold for other models with this base.
      look: (tensors in the files, config.json) -> fields that the files say.
      looked: names of these.
    """

    name: str
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

    def tensor_mappings(
        self, shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int | None
    ) -> list[TensorMapping]:
        """Returns the places of all parameters; see `convert.names.places`."""
        rows = self.rows
        if self.is_base:
            rows = [
                dataclasses.replace(row, theirs=row.theirs.removeprefix(self.prefix), tied=())
                for row in rows
            ]
        return tensor_mappings(rows, shapes, vocab_size=vocab_size)

    def base(self, name: str, **changes: Any) -> "Architecture":
        """Returns the architecture `name` of the model without this one's head."""
        fields = {**self.fields, "head": "none"}
        return dataclasses.replace(self, name=name, is_base=True, fields=fields, **changes)


def detect_pooler(tensors: Mapping[str, Tensor], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns whether the files hold the layer that a base model may have after its last norm."""
    return {"use_pooler": any(name.endswith("pooler.dense.weight") for name in tensors)}
