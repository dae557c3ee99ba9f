"""Special and added tokens of a tokenizer, from the files next to it.

    tokenizer_config.json      class, names of special tokens, `added_tokens_decoder`
    special_tokens_map.json    names of special tokens, which take precedence
    added_tokens.json          more tokens, and their ids
    generation_config.json     ids of the tokens that end a text
    config.json                the same, if generation_config.json does not say; the model type

special_tokens_map.json and added_tokens.json are not read if there is `added_tokens_decoder`.

The order is the one of `transformers.AutoTokenizer` and `generate`, version 5.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from data.text.tokenization.special_tokens import END_OF_TEXT
from untrusted.documents import read_json
from untrusted.messages import shortened
from untrusted.schema import check

CONFIG_FILE = "tokenizer_config.json"
#: Uses of special tokens; `transformers` writes their names under keys such as "eos_token".
USES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_GPT2 = {"bos": END_OF_TEXT, "eos": END_OF_TEXT, "unk": END_OF_TEXT}
_ROBERTA = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}
#: Class in `transformers`, without "Fast" -> names of special tokens that it implies.
_IMPLIED: dict[str, dict[str, str]] = {
    "BartTokenizer": _ROBERTA,
    "BertTokenizer": {
        "unk": "[UNK]",
        "sep": "[SEP]",
        "pad": "[PAD]",
        "cls": "[CLS]",
        "mask": "[MASK]",
    },
    "CamembertTokenizer": _ROBERTA,
    "CodeGenTokenizer": _GPT2,
    "GPT2Tokenizer": _GPT2,
    "LlamaTokenizer": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "Qwen2Tokenizer": {"eos": END_OF_TEXT, "unk": END_OF_TEXT, "pad": END_OF_TEXT},
    "RobertaTokenizer": _ROBERTA,
    "T5Tokenizer": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "XLMRobertaTokenizer": _ROBERTA,
}
#: Model type -> the class of its tokenizer, if tokenizer_config.json does not name one.
_CLASSES = {
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "mobilebert": "BertTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neo": "GPT2Tokenizer",
    "gptj": "GPT2Tokenizer",
    "llama": "LlamaTokenizer",
    "mt5": "T5Tokenizer",
    "opt": "GPT2Tokenizer",
    "phi": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
    "t5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
#: Classes that tokenize like another one.
_ALIASES = {
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    "MobileBertTokenizer": "BertTokenizer",
}
#: Classes that say nothing about the tokenizer.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
#: The longest token; the library overflows the stack for much longer ones.
_MAX_CHARACTERS = 4096
#: All added tokens together. A normalizer may make them 100 times longer, in about 1 GB of memory.
_MAX_ADDED_CHARACTERS = 2**17
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The content of the files next to a tokenizer.

    Attributes:
        tokenizer_class: class in `transformers`, without "Fast"; empty if no file says.
        options: the other keys of the files, such as "add_bos_token".
        named: use -> special token, for some of USES. The vocabulary may lack the token.
        added: id -> token that may be missing in the vocabulary.
        extra: other special tokens.
        end_ids: ids of tokens that end a text, as in generation.
    """

    tokenizer_class: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    named: Mapping[str, tokenizers.AddedToken] = dataclasses.field(default_factory=dict)
    added: Mapping[int, tokenizers.AddedToken] = dataclasses.field(default_factory=dict)
    extra: Sequence[tokenizers.AddedToken] = ()
    end_ids: Sequence[int] = ()

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an option that is true or false.

        Raises:
            ValueError: It is something else.
        """
        value = self.options.get(name)
        check(value, bool | None, f"{CONFIG_FILE}: {name}")
        return default if value is None else value


def read_settings(
    directory: Path, *, within: Path | None, default_class: str = "", has_model: bool = True
) -> TokenizerSettings:
    """Read the files next to a tokenizer; each of them may be absent.

    Args:
        within: directory that the files must be in, even if they are links; None for any.
        default_class: class of the tokenizer if no file says.
        has_model: whether config.json and generation_config.json there are the model's. If the user
            named a tokenizer file of another name, they may be anything.

    Raises:
        ValueError: A file is damaged, or a link that leads out of the directory.
        OSError: A file cannot be read.
    """

    def read(name: str) -> dict[str, Any]:
        file = directory / name
        return read_json(file, within=within) if file.is_file() else {}

    model = read("config.json") if has_model else {}
    generation = read("generation_config.json") if has_model else {}
    config = read(CONFIG_FILE)
    tokenizer_class = _class_of(config, model, default_class)
    numbered = config.get("added_tokens_decoder")
    if numbered is None:
        config |= read("special_tokens_map.json")
        plain = read("added_tokens.json")
        check(plain, dict[str, int], directory / "added_tokens.json")
        special = _special_names(config)
        added = {i: _token(name, is_special=name in special) for name, i in plain.items()}
    else:
        where = f"{directory / CONFIG_FILE}: added_tokens_decoder"
        check(numbered, dict[str, dict[str, Any]], where)
        added = {_number(i, where): _token_of(token, where) for i, token in numbered.items()}
    known = {token.content: token for token in added.values()}
    named = {use: _token(name) for use, name in _IMPLIED.get(tokenizer_class, {}).items()}
    for use in USES:
        if f"{use}_token" in config:
            token = _special_token(config[f"{use}_token"], f"{directory}: {use}_token")
            named.pop(use, None)
            if token is not None:
                named[use] = token
    named = {use: known.get(token.content, token) for use, token in named.items()}
    for token in named.values():
        token.special = True
    return TokenizerSettings(
        tokenizer_class=tokenizer_class,
        options=config,
        named=named,
        added=added,
        extra=[_token(name) for name in _extra_names(config) if name not in known],
        end_ids=_end_ids(generation, model, directory),
    )


def add_tokens(tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings) -> bool:
    """Add the tokens of a tokenizer's files, mark its special tokens, and return if any was added.

    A special token that has no id in the files and is not in the vocabulary is left out: a model
    was never trained with it.

    Args:
        tokenizer: tokenizer, which is changed.

    Raises:
        ValueError: A token would get another id than its file says, or the tokens are too long.
    """
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [i for i in sorted(settings.added) if settings.added[i].content not in present]
    added = [settings.added[i] for i in missing]
    _check_total(added)
    tokenizer.add_tokens(added)
    for i, token in zip(missing, added, strict=True):
        if (actual_id := tokenizer.token_to_id(token.content)) != i:
            raise ValueError(
                f"the added token {shortened(token.content)!r} has the id {i}, but would get "
                f"{actual_id}: ids of added tokens must follow those of the vocabulary"
            )
    present |= {token.content for token in added}
    special = [
        token
        for token in (*settings.named.values(), *settings.extra)
        if token.content not in present and tokenizer.token_to_id(token.content) is not None
    ]
    _check_total(special)
    tokenizer.add_tokens(special)
    return bool(added or special)


def _class_of(config: Mapping[str, Any], model: Mapping[str, Any], default: str) -> str:
    """Return the class of a tokenizer, from tokenizer_config.json and config.json.

    A generic class, which has a tokenizer.json, implies no special tokens.
    """
    by_model = _CLASSES.get(str(model.get("model_type")), default)
    # Published models of this type name classes with other rules, which AutoTokenizer ignores.
    if model.get("model_type") == "qwen2":
        return by_model
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = str(declared or by_model).removesuffix("Fast")
    return default if name in _GENERIC else _ALIASES.get(name, name)


def _end_ids(
    generation: Mapping[str, Any], model: Mapping[str, Any], directory: Path
) -> Sequence[int]:
    """Return the ids of tokens that end a text; none if no file says."""
    text_model = model.get("text_config")
    nested = text_model if isinstance(text_model, dict) else {}
    for config, name in (
        (generation, "generation_config.json"),
        (model, "config.json"),
        (nested, "config.json: text_config"),
    ):
        ids = config.get("eos_token_id")
        if ids is not None:
            check(ids, int | list[int], f"{directory / name}: eos_token_id")
            return ids if isinstance(ids, list) else [ids]
    return ()


def _special_token(value: Any, where: str) -> tokenizers.AddedToken | None:
    """Return a special token that a file names by its content or describes; None for null."""
    if value is None:
        return None
    check(value, str | dict[str, Any], where)
    return _token(value) if isinstance(value, str) else _token_of(value, where)


def _token(content: str, *, is_special: bool = True) -> tokenizers.AddedToken:
    _check_length(content)
    return tokenizers.AddedToken(content, special=is_special, normalized=not is_special)


def _token_of(value: Mapping[str, Any], where: str) -> tokenizers.AddedToken:
    """Return a token that a file describes with its properties."""
    content = value.get("content")
    check(content, str, f"{where}: content")
    _check_length(str(content))
    flags = {name: value[name] for name in _FLAGS if name in value}
    check(flags, dict[str, bool], where)
    return tokenizers.AddedToken(str(content), **flags)


def _check_length(content: str) -> None:
    if len(content) > _MAX_CHARACTERS:
        raise ValueError(
            f"the added token {shortened(content)!r} has {len(content):,} characters, but at most "
            f"{_MAX_CHARACTERS:,} are allowed"
        )


def _check_total(tokens: Sequence[tokenizers.AddedToken]) -> None:
    total = sum(len(token.content) for token in tokens)
    if total > _MAX_ADDED_CHARACTERS:
        raise ValueError(
            f"{len(tokens):,} added tokens are missing in the vocabulary, which have {total:,} "
            f"characters, but at most {_MAX_ADDED_CHARACTERS:,} are allowed; add them to a "
            "tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )


def _number(text: str, where: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{where} has the key {shortened(text)!r}, which must be a token id")
    return int(text)


def _extra_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of special tokens without a use of their own."""
    values = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(values, dict):
        values = list(values.values())
    names = [value.get("content") if isinstance(value, dict) else value for value in values]
    return [name for name in names if isinstance(name, str)]


def _special_names(config: Mapping[str, Any]) -> set[str]:
    """Return the names of all special tokens."""
    values = [config.get(f"{use}_token") for use in USES]
    names = [value.get("content") if isinstance(value, dict) else value for value in values]
    return {name for name in (*names, *_extra_names(config)) if isinstance(name, str)}
