"""Tokenizers of strangers: an explosion or a crash of the library is refused before it happens."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from data.text.tokenization import tokenizer_checks
from data.text.tokenization.file_tokenizer import load_tokenizer_file
from data.text.tokenization.special_tokens import END_OF_TEXT


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": [*steps]}}


def pre_tokenizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps]}}


def split(pattern: str) -> dict[str, Any]:
    return {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    }


def charsmap(key: str, value: str, *, place: int = 0) -> dict[str, Any]:
    """A Precompiled normalizer whose map has one entry of one character.

    Args:
        key: ASCII character.
        value: its replacement.
        place: position of the replacement in the texts.
    """
    units = np.zeros(512, "<u4")
    units[0] = 256 << 10  # the children of the root are at 256 ^ label
    units[256 ^ ord(key)] = ord(key) | 1 << 8 | 1 << 10  # a key ends here; its value is at ^ 1
    units[256 ^ ord(key) ^ 1] = 1 << 31 | place
    content = len(units.tobytes()).to_bytes(4, "little") + units.tobytes() + value.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def unigram(*pieces: str) -> dict[str, Any]:
    vocab = [[piece, -1.0] for piece in ("<unk>", END_OF_TEXT, *pieces)]
    return {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}}


def template(*names: str) -> dict[str, Any]:
    one = [{"Sequence": {"id": name, "type_id": 0}} for name in names]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special: dict[str, Any] = {}
    return {"type": "TemplateProcessing", "single": one, "pair": pair, "special_tokens": special}


WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "<unk>",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 10**9,
    "vocab": {"<unk>": 0, END_OF_TEXT: 1, "a": 2, "##a": 3},
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}


def tokenizer_json(changes: dict[str, Any]) -> str:
    vocab = {"<unk>": 0, END_OF_TEXT: 1, "a": 2, "z": 3, "▁": 4}
    known = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    return json.dumps(json.loads(known.to_str()) | changes)


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "chained replacements": (
        normalizers(*[replace("a", "aa")] * 40),
        "its 40 steps make a text up to 1,099,511,627,776 times longer",
    ),
    "replacements of nothing": (normalizers(*[replace("", "x", "Regex")] * 10), "times longer"),
    "replacements by characters that Unicode expands": (
        normalizers(*[replace("a", "ﷺ"), {"type": "NFKD"}, replace("ص", "a")] * 3),
        "times longer",
    ),
    "a long prefix": (normalizers({"type": "Prepend", "prepend": "x" * 10**6}), "times longer"),
    "chained byte levels": (pre_tokenizers(*[BYTE_LEVEL] * 25), "times longer"),
    "many steps": (normalizers(*[{"type": "NFC"}] * 101), "it has 101 steps"),
    "chained decoders": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 30}},
        "times longer",
    ),
    "templates that repeat the text": (
        {"post_processor": {"type": "Sequence", "processors": [template("A", "A")] * 20}},
        "times longer",
    ),
    "a map without content": (
        normalizers({"type": "Precompiled", "precompiled_charsmap": ""}),
        "is not a readable tokenizer.json",
    ),
    "a map that is said to have gigabytes": (
        normalizers({"type": "Precompiled", "precompiled_charsmap": "////fwAA" + "A" * 64}),
        "is not a readable tokenizer.json|crashes|MiB of memory",
    ),
    "a map with long replacements": (
        normalizers(charsmap("a", "x" * 1000)),
        "up to 1,000 times longer",
    ),
    "a map with a wrong position": (
        normalizers(charsmap("a", "x", place=99)),
        "its Precompiled map is damaged",
    ),
    "a long piece": (unigram("a" * 5000), "its longest piece has 5,000 bytes"),
    "a piece that overflows the stack": (
        unigram("a" * 200_000),
        "crashes the process .*SIGSEGV|its longest piece has",
    ),
    "nested pieces": (unigram(*("a" * i for i in range(1, 400))), "more than 256 of its pieces"),
    "long words": ({"model": WORD_PIECE}, "its max_input_chars_per_word is 1,000,000,000"),
    "a pattern that takes exponential time": (split("(z+)+y"), "cannot encode a text .*limit"),
    "a pattern that is none": (split("(z"), "unmatched parenthesis"),
}


@pytest.mark.drawn(9)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers_are_refused(name, tmp_path):
    changes, message = HOSTILE[name]
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_json(changes))
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer_file(str(file))
    assert str(error.value).startswith(f"data.tokenizer='{file}' ")
    assert str(error.value).endswith("set data.tokenizer to 'bpe' or 'bytes'")


METASPACE = {
    "type": "Metaspace",
    "replacement": "▁",
    "prepend_scheme": "always",
    "split": True,
}
#: The steps of published tokenizers.
KNOWN = {
    "LLaMA": normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
    "ALBERT": normalizers(
        replace("``", '"'),
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        charsmap("a", "b"),
        replace(" {2,}", " ", "Regex"),
    )
    | pre_tokenizers(METASPACE),
    "T5": normalizers(charsmap("a", "b")) | pre_tokenizers({"type": "WhitespaceSplit"}, METASPACE),
    "GPT-4": split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "nested spaces": unigram(*("▁" * i for i in range(1, 129))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_steps_of_published_tokenizers_pass(name, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_json(KNOWN[name]))
    assert load_tokenizer_file(str(file)).vocab_size > 0


def _save(directory: Path, content: str) -> str:
    (directory / "tokenizer.json").write_text(content)
    return str(directory)


def test_a_file_is_checked_once(tmp_path, monkeypatch):
    calls = []
    real = tokenizer_checks.run_limited
    monkeypatch.setattr(
        tokenizer_checks, "run_limited", lambda *args: (calls.append(args), real(*args))
    )
    path = _save(tmp_path, tokenizer_json({}))
    load_tokenizer_file(path)
    load_tokenizer_file(path)
    assert len(calls) == 1
    load_tokenizer_file(_save(tmp_path, tokenizer_json({}) + " "))
    assert len(calls) == 2


def test_verdicts_are_not_taken_from_a_directory_that_others_may_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = _save(tmp_path, tokenizer_json({}))
    load_tokenizer_file(path)
    directory = tmp_path / "taibai" / "checked_tokenizers"
    assert len([*directory.iterdir()]) == 1
    directory.chmod(0o777)
    monkeypatch.setattr(tokenizer_checks, "run_limited", lambda *_: pytest.fail("checked"))
    with pytest.raises(pytest.fail.Exception, match="checked"):
        load_tokenizer_file(path)
