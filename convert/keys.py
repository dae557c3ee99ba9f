"""From a Hugging Face model's config.json to the fields of our config, and back: one row a key."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REQUIRED = object()

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key whose value is a field of ours.

    Attributes:
      theirs, ours: the names of the two.
      default: what theirs means where it is absent.
      values: their value -> ours; of several that are one of ours, the first is written.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, hf: Config) -> dict[str, Any]:
        value: Any = hf.get(self.theirs, self.default)
        if value is REQUIRED or (value is None and self.default is not None):
            raise ValueError(f"config.json has no {self.theirs!r}, which this model needs")
        if self.values is not None and value not in self.values:
            raise ValueError(_unsupported(self.theirs, value, self.values))
        return {self.ours: value if self.values is None else self.values[value]}

    def write(self, fields: Config) -> dict[str, Any]:
        value = fields[self.ours]
        if self.values is not None:
            value = next((a for a, b in self.values.items() if b == value), value)
        return {self.theirs: value}


@dataclasses.dataclass(frozen=True)
class Only:
    """A key that changes the computation, and of which only these values can be had.

    Attributes:
      values: the first is what it means where it is absent.
      why: an addition to the error.
    """

    theirs: str
    values: tuple[Any, ...]
    why: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, hf: Config) -> dict[str, Any]:
        value = hf.get(self.theirs, self.values[0])
        is_off = value is None and not self.values[0]
        if not is_off and value not in self.values:
            raise ValueError(_unsupported(self.theirs, value, self.values) + self.why)
        return {}

    def write(self, fields: Config) -> dict[str, Any]:
        return {} if self.values[0] is None else {self.theirs: self.values[0]}


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys that say something together.

    Attributes:
      names: theirs; where `write` leaves one out, it is taken out of an old config.json.
      read: config.json -> fields of ours.
      write: fields of ours -> keys.
    """

    names: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[Config], dict[str, Any]]


KeyMap = Sequence[Key | Only | Keys]

#: What any config.json may hold and no model computes with: about files, tokens, training or
#: generation.
HARMLESS = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path
    _commit_hash auto_map use_cache bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id
    mask_token_id unk_token_id decoder_start_token_id tokenizer_class prefix task_specific_params
    id2label label2id num_labels _num_labels finetuning_task output_attentions output_hidden_states
    output_past return_dict torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    gradient_checkpointing is_encoder_decoder attn_implementation _attn_implementation
    _attn_implementation_autoset _attn_implementation_internal _experts_implementation_internal
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    transformers.js_config
    """.split()
)


def read(hf: Config, keys: KeyMap, *, harmless: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of ours that a config.json says.

    Args:
      harmless: keys that this model does not compute with, beside HARMLESS.

    Raises:
      ValueError: a key is missing, or its value or the key itself is not supported.
    """
    if hf.get("quantization_config"):
        raise ValueError(
            "config.json has a quantization_config: quantised weights cannot be converted; "
            "save the model unquantised"
        )
    known = HARMLESS | set(harmless) | {name for key in keys for name in key.names}
    for name, value in hf.items():
        # None, False, 0 and empty: a feature that is not used.
        if name not in known and value:
            raise ValueError(
                f"config.json has {name}={value!r}, which is not supported, and may change what "
                f"the model computes; if it does not, `python -m convert.from_hf "
                f"--harmless={name}` converts it"
            )
    fields: dict[str, Any] = {}
    for key in keys:
        fields |= key.read(hf)
    return fields


def write(fields: Config, keys: KeyMap, original: Config, *, harmless: Sequence[str]) -> dict:
    """Returns a config.json: the original, changed where our fields are not what it says.

    Args:
      original: what else to keep; empty to write all keys.
      harmless: as in `read`.
    """
    hf = dict(original)
    said = read(original, keys, harmless=harmless) if original else {}
    for key in keys:
        is_new = key.write(fields)
        if original and all(
            plain(said[name]) == plain(fields[name]) for name in key.read(original)
        ):
            continue
        for name in key.names:
            hf.pop(name, None)
        hf |= is_new
    return hf


def plain(value: Any) -> Any:
    """Returns the value made of dicts and lists alone, as JSON and YAML have them."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _unsupported(name: str, value: Any, values: Any) -> str:
    choices = ", ".join(repr(choice) for choice in values)
    return f"config.json has {name}={value!r}, which is not supported; only {choices} can be had"


#: `hidden_act` and the like -> `activation`.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

#: The number of labels of a classifier; their names are written elsewhere.
NUM_LABELS = Keys(
    ("id2label", "label2id", "num_labels"),
    lambda hf: {"num_labels": len(hf.get("id2label") or ()) or hf.get("num_labels") or 2},
    lambda fields: {
        "id2label": {str(i): f"LABEL_{i}" for i in range(fields["num_labels"])},
        "label2id": {f"LABEL_{i}": i for i in range(fields["num_labels"])},
    },
)
