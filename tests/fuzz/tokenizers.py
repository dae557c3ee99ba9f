"""Valid tokenizer.json files of each model, and mutations that recombine their parts."""

import base64
import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from data.text.tokenization.file_tokenizer import load_tokenizer_file
from tests.fuzz.mutations import damaged_json, damaged_values
from tests.fuzz.parser import Parser
from tests.fuzz.valid import TEXT

_STRINGS = ("", "a", " ", "▁", "##", "é", "ﷺ", "</s>", "xx", "a" * 50, "x" * 5000, "\0", "\n")
_PATTERNS = (
    r"\s+|\w+",
    "(a+)+b",
    "(x|xx)*y",
    "(?:.*)*z",
    "a{1,1000}",
    "(",
    "[",
    "",
    ".*.*.*=",
    "a|",
)
_NUMBERS = (0, 1, 2, 3, 100, 10**6, 2**31, 2**32 - 1, 2**63)
_STEP_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


def _charsmap() -> bytes:
    """Return a map that replaces "a" by "b"; see `tokenizer_checks`."""
    units = np.zeros(512, "<u4")
    units[0] = 256 << 10
    units[256 ^ ord("a")] = ord("a") | 1 << 8 | 1 << 10
    units[256 ^ ord("a") ^ 1] = 1 << 31
    return len(units.tobytes()).to_bytes(4, "little") + units.tobytes() + b"b\0"


def _model(kind: str) -> dict[str, Any]:
    texts = ["<unk>", "</s>", *"abcdefghi ▁ĠÃ", "##a", "ab", "▁a"]
    vocab = {text: i for i, text in enumerate(texts)}
    if kind == "BPE":
        return {"type": kind, "vocab": vocab, "merges": [["a", "b"]], "unk_token": "<unk>"}
    if kind == "Unigram":
        pieces = [[text, -float(i)] for i, text in enumerate(texts)]
        return {"type": kind, "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    if kind == "WordLevel":
        return {"type": kind, "vocab": vocab, "unk_token": "<unk>"}
    words = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"type": kind, "vocab": vocab, "unk_token": "<unk>", **words}


def _content(kind: str) -> dict[str, Any]:
    charsmap = base64.b64encode(_charsmap()).decode()
    special = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 1, "content": "</s>", "special": True, **flags}],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequence, end],
            "pair": [sequence, end, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special,
        },
        "decoder": {"type": "ByteFallback"},
        "model": _model(kind),
    }


def _writer(kind: str) -> Callable[[Path], Any]:
    """Return a function that writes a tokenizer.json with a model of this kind."""
    return lambda directory: (directory / "tokenizer.json").write_text(json.dumps(_content(kind)))


_text = st.sampled_from(_STRINGS)
_pattern = st.fixed_dictionaries({"String": _text}) | st.fixed_dictionaries(
    {"Regex": st.sampled_from(_PATTERNS)}
)


def _step(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


@st.composite
def _charsmaps(draw: Any) -> str:
    content = bytearray(_charsmap())
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from([0, 4, 4 * (1 + 256 ^ 97), draw(st.integers(0, 516)) * 4]))
        value = draw(st.sampled_from(_NUMBERS) | st.integers(0, 2**32 - 1)) % 2**32
        content[place : place + 4] = value.to_bytes(4, "little")
    return base64.b64encode(content).decode()


_flag = st.booleans()
_number = st.sampled_from(_NUMBERS)
_replace = _step("Replace", pattern=_pattern, content=_text)
_byte_level = _step("ByteLevel", add_prefix_space=_flag, trim_offsets=_flag, use_regex=_flag)
_behavior = st.sampled_from(["Removed", "Isolated", "MergedWithPrevious", "Contiguous"])
_scheme = st.sampled_from(["always", "never", "first"])
_character = st.sampled_from("▁a é")
_metaspace = _step("Metaspace", replacement=_character, prepend_scheme=_scheme, split=_flag)
_STEPS = {
    "normalizer": [
        *[_replace] * 4,
        _step("Prepend", prepend=_text),
        _step("Precompiled", precompiled_charsmap=_charsmaps()),
        _step("Strip", strip_left=_flag, strip_right=_flag),
        *[_step(kind) for kind in ("NFC", "NFKD", "NFKC", "Lowercase", "StripAccents", "Nmt")],
        _step("ByteLevel"),
    ],
    "pre_tokenizer": [
        *[_step("Split", pattern=_pattern, behavior=_behavior, invert=_flag)] * 4,
        _byte_level,
        _metaspace,
        _step("Punctuation", behavior=_behavior),
        _step("Digits", individual_digits=_flag),
        _step("FixedLength", length=_number),
        *[_step(kind) for kind in ("BertPreTokenizer", "Whitespace", "UnicodeScripts")],
    ],
    "post_processor": [_byte_level, st.just(_content("BPE")["post_processor"])],
    "decoder": [
        *[_replace] * 2,
        _byte_level,
        _metaspace,
        _step("Strip", content=_character, start=_number, stop=_number),
        _step("WordPiece", prefix=_text, cleanup=_flag),
        _step("CTC", pad_token=_text, word_delimiter_token=_text, cleanup=_flag),
        _step("BPEDecoder", suffix=_text),
        *[_step(kind) for kind in ("Fuse", "ByteFallback")],
    ],
}


@st.composite
def _recombined(draw: Any, contents: Sequence[bytes]) -> bytes:
    """Draw a tokenizer.json with other steps, some of them many times, and another model."""
    content = json.loads(draw(st.sampled_from(contents)))
    for key in draw(st.lists(st.sampled_from([*_STEPS]), min_size=1, max_size=3, unique=True)):
        steps = draw(st.lists(st.one_of(*_STEPS[key]), min_size=1, max_size=4))
        steps = steps * draw(st.sampled_from([1, 1, 1, 1, 2, 10, 30]))
        content[key] = {"type": "Sequence", _STEP_LISTS[key]: steps}
    if draw(st.integers(0, 3)) == 0:
        content["model"] = _hostile_model(draw, content["model"])
    if draw(st.integers(0, 9)) == 0:
        content = draw(damaged_values([content]))
    return json.dumps(content).encode("utf-8", "surrogatepass")


def _hostile_model(draw: Any, model: dict[str, Any]) -> dict[str, Any]:
    model = copy.deepcopy(model)
    size = draw(st.sampled_from([1, 10, 300, 600]))
    name = draw(st.sampled_from(["a", "▁", "é", ""]))
    pieces = draw(st.sampled_from([[name * i for i in range(1, size)], [name * size * 50]]))
    if model["type"] == "Unigram":
        scores = st.sampled_from([0.0, -1.0, 1e308, -1e308, 1e-320])
        model["vocab"] += [[piece, draw(scores)] for piece in pieces[:20]]
        model["vocab"] += [[piece, -math.pi] for piece in pieces[20:]]
        model["byte_fallback"] = draw(_flag)
        model["unk_id"] = draw(st.sampled_from([None, 0, 1, 99]))
        return model
    model["vocab"] |= {piece: len(model["vocab"]) + i for i, piece in enumerate(pieces)}
    if model["type"] == "BPE":
        choices = [["a", "a"], ["aa", "a"], ["a", "aaa"], ["", "a"], ["a b", "c"]]
        model["merges"] += draw(st.lists(st.sampled_from(choices), max_size=3))
        model["dropout"] = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
        model["end_of_word_suffix"] = draw(st.none() | _text)
        model["continuing_subword_prefix"] = draw(st.none() | _text)
    if model["type"] == "WordPiece":
        model["max_input_chars_per_word"] = draw(_number)
        model["continuing_subword_prefix"] = draw(_text)
    return model


def damaged_tokenizers(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a tokenizer.json with other steps, wrong values or wrong bytes."""
    return st.one_of(*[_recombined(contents)] * 4, damaged_json(contents))


@st.composite
def _many_added_tokens(draw: Any) -> bytes:
    """Draw an added_tokens.json with many or long tokens."""
    size = draw(st.sampled_from([1, 40, 4000, 5000]))
    count = min(draw(st.sampled_from([1, 10, 1000, 100_000])), 2**21 // size)
    text = draw(st.sampled_from(["a", "▁", "é", "<", " "])) * size
    first = len(_content("BPE")["model"]["vocab"]) + draw(st.sampled_from([0, 0, 0, 1, -1, 2**30]))
    return json.dumps({f"{text}{i}": first + i for i in range(count)}).encode()


def _write_added_tokens(directory: Path) -> None:
    _writer("BPE")(directory)
    added = {"<new>": len(_content("BPE")["model"]["vocab"])}
    (directory / "added_tokens.json").write_text(json.dumps(added))


def _damaged_added_tokens(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(_many_added_tokens(), damaged_json(contents))


def tokenize(directory: Path) -> None:
    """Parse the tokenizer of a directory, and use it."""
    tokenizer = load_tokenizer_file(str(directory))
    (ids,) = tokenizer.encode_batch([TEXT])
    tokenizer.decode(ids)
    tokenizer.is_text()


def _parser(model: str) -> Parser:
    return Parser(
        file="tokenizer.json",
        prepare=_writer(model),
        parse=tokenize,
        damaged=damaged_tokenizers,
        share=2.0,
    )


PARSERS = {
    f"tokenizer.json with {model}": _parser(model) for model in ("BPE", "Unigram", "WordLevel")
} | {
    "added tokens": Parser(
        file="added_tokens.json",
        prepare=_write_added_tokens,
        parse=tokenize,
        damaged=_damaged_added_tokens,
    )
}
