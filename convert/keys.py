"""The mapping between config.json of a Hugging Face model and the fields of our model config.

A family declares its keys as a table of `Key`, `Only` and `Keys` entries, which is read in both
directions. `theirs` is a key of config.json, and `ours` a field of the model's Config.

A key `text_config.hidden_size` is `hidden_size` in the dict `text_config` of config.json. A dict is
a section of this kind if the table has such a key.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convert import quantized
from convert.options import DEFAULTS, ReadOptions
from fields.numbers import shown

_log = logging.getLogger(__name__)

REQUIRED = object()

#: Key with the format of quantized weights.
_QUANTIZATION = "quantization_config"

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that corresponds to one field."""

    theirs: str
    ours: str
    default: Any = REQUIRED  # value if the key is absent; REQUIRED if it must not be absent
    # value of the key -> value of the field, if they differ. If several values of the key have
    # the same meaning, the first one is written
    values: Mapping[Any, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that this entry reads and writes."""
        return (self.theirs,)

    def read(self, hf: Config) -> dict[str, Any]:
        """Return the field with the value of the key.

        Raises:
            ValueError: The key is missing, or its value is not supported.
        """
        value: Any = hf.get(self.theirs, self.default)
        if value is REQUIRED or (value is None and self.default is not None):
            raise ValueError(f"config.json has no {self.theirs!r}, which this model needs")
        if self.values is not None and value not in self.values:
            raise ValueError(_unsupported_message(self.theirs, value, self.values))
        return {self.ours: value if self.values is None else self.values[value]}

    def write(self, fields: Config) -> dict[str, Any]:
        """Return the key with the value of the field."""
        value = fields[self.ours]
        if self.values is not None:
            value = next((a for a, b in self.values.items() if b == value), value)
        return {self.theirs: value}


@dataclasses.dataclass(frozen=True)
class Only:
    """A key that affects the computation, but for which only some values are supported."""

    theirs: str
    values: tuple[Any, ...]  # supported values; the first one is the value if the key is absent
    why: str = ""  # explanation, appended to the error message

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that this entry reads and writes."""
        return (self.theirs,)

    @property
    def rule(self) -> str:
        """The supported values in words, in Markdown."""
        values = (x if isinstance(x, str) else json.dumps(x) for x in self.values)
        return f"`{self.theirs}`: {' or '.join(values)}"

    def read(self, hf: Config) -> dict[str, Any]:
        """Check the value of the key; there is no corresponding field.

        Raises:
            ValueError: The value is not supported.
        """
        value = hf.get(self.theirs, self.values[0])
        is_off = value is None and not self.values[0]
        if not is_off and value not in self.values:
            raise ValueError(_unsupported_message(self.theirs, value, self.values) + self.why)
        return {}

    def write(self, fields: Config) -> dict[str, Any]:
        """Return the key with its first supported value, or nothing if that value is None."""
        return {} if self.values[0] is None else {self.theirs: self.values[0]}


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys that determine some fields together."""

    # keys. A key that `write` does not return is removed from the original config.json
    names: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]]  # config.json -> fields
    write: Callable[[Config], dict[str, Any]]  # fields -> keys
    rule: str = ""  # values that `read` refuses, in words, in Markdown; for the docs


KeyMap = Sequence[Key | Only | Keys]

#: Keys that any config.json may contain and that do not affect the computation of any model: they
#: describe files, tokens, training or generation.
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

#: Keys that publishers and tools add, and that no model reads; a test checks that the supported
#: classes of transformers do not. They are mentioned in the log.
WITHOUT_EFFECT = frozenset(
    """
    _flash_attn_2_enabled bos_token eos_token full_attn_mod interpolate_factor is_llama_config
    license max_new_tokens max_sequence_length model_max_length model_name neftune_noise_alpha
    pad_token sentence_transformers seq_length tokenizer_model_max_length tokenizer_padding_side
    torch_version trust_remote_code unk_token unsloth_fixed unsloth_version use_flash_attention_2
    use_flash_attn use_return_dict
    """.split()
)


def read(
    hf: Config, keys: KeyMap, *, harmless: Sequence[str], options: ReadOptions = DEFAULTS
) -> dict[str, Any]:
    """Translate config.json to config fields.

    Args:
        harmless: keys, in addition to HARMLESS, that do not affect the computation of this model.
        options: set for the command; its `harmless` keys are ignored too.

    Raises:
        ValueError: A key is missing, unknown, or has a value that is not supported.
    """
    for name in ("quantization_config", "quantization"):  # the second one is MLX's
        if hf.get(name) and not (name == _QUANTIZATION and quantized.can_read(hf[name])):
            raise ValueError(
                f"config.json has a {name}, but quantized weights cannot be converted; save the "
                "model without quantization"
            )
    hf = {name: value for name, value in hf.items() if name != _QUANTIZATION}
    hf = _with_sections(hf, keys)
    known = HARMLESS | {*harmless, *options.harmless} | {name for key in keys for name in key.names}
    ignored = [name for name in hf if name in WITHOUT_EFFECT and name not in known]
    if ignored:
        _log.info(
            "These keys of config.json have no effect and are ignored: %s", ", ".join(ignored)
        )
    known |= WITHOUT_EFFECT
    for name, value in hf.items():
        # A value of None, False, 0 or empty stands for a feature that is not used.
        section, _, own_name = name.rpartition(".")
        if name not in known and section not in known and own_name not in HARMLESS and value:
            raise ValueError(
                f"config.json has {name}={value!r}, which is not supported and may change the "
                f"computation; {options.remedy_for(name)}"
            )
    fields: dict[str, Any] = {}
    for key in keys:
        try:
            fields |= key.read(hf)
        except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
            settings = ", ".join(f"{name}={shown(hf[name])}" for name in key.names if name in hf)
            raise ValueError(
                f"config.json has {settings or f'no {key.names[0]!r}'}, which cannot be read "
                f"({type(error).__name__}: {error}); correct it"
            ) from None
    return fields


def write(fields: Config, keys: KeyMap, original: Config, *, harmless: Sequence[str]) -> dict:
    """Translate config fields to config.json.

    Keys of the original are changed only if the fields differ from the ones it implies, so that a
    model that is imported and exported again gets the same config.json. Only that its weights were
    quantized is left out, because they no longer are.

    Args:
        original: original config.json; empty to write all keys.
        harmless: as in `read`.
    """
    original_fields = read(original, keys, harmless=harmless) if original else {}
    original = {name: value for name, value in original.items() if name != _QUANTIZATION}
    original = _with_sections(original, keys)
    hf = dict(original)
    for key in keys:
        is_new = key.write(fields)
        if original and all(
            plain(original_fields[name]) == plain(fields[name]) for name in key.read(original)
        ):
            continue
        for name in key.names:
            hf.pop(name, None)
        hf |= is_new
    return _in_sections(hf, keys)


def _sections(keys: KeyMap) -> set[str]:
    """Return the names of the dicts in config.json that keys of a table are in."""
    return {name.partition(".")[0] for key in keys for name in key.names if "." in name}


def _with_sections(hf: Config, keys: KeyMap) -> dict[str, Any]:
    """Replace each section of config.json by its keys, such as `text_config.hidden_size`."""
    flat: dict[str, Any] = {}
    sections = _sections(keys)
    for name, value in hf.items():
        if name not in sections or value is None:
            flat[name] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            raise ValueError(f"config.json has {name}={shown(value)}, which must be an object")
    return flat


def _in_sections(flat: Config, keys: KeyMap) -> dict[str, Any]:
    """Undo `_with_sections`."""
    hf: dict[str, Any] = {}
    sections = _sections(keys)
    for name, value in flat.items():
        section, _, key = name.partition(".")
        if key and section in sections:
            hf[section] = {**(hf.get(section) or {}), key: value}
        else:
            hf[name] = value
    return hf


def plain(value: Any) -> Any:
    """Convert mappings to dicts and tuples to lists, recursively, as in JSON and YAML."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _unsupported_message(name: str, value: Any, values: Any) -> str:
    choices = ", ".join(repr(choice) for choice in values)
    return (
        f"config.json has {name}={value!r}, which is not supported; the supported values are "
        f"{choices}"
    )


#: Values of `hidden_act` and similar keys -> values of `activation`.
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}

#: The number of labels of a classifier. `convert.to_hf` writes the names of labels.
NUM_LABELS = Keys(
    ("id2label", "label2id", "num_labels"),
    lambda hf: {"num_labels": len(hf.get("id2label") or ()) or hf.get("num_labels") or 2},
    lambda fields: {
        "id2label": {str(i): f"LABEL_{i}" for i in range(fields["num_labels"])},
        "label2id": {f"LABEL_{i}": i for i in range(fields["num_labels"])},
    },
)
