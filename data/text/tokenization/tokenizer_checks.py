"""Checks a stranger's tokenizer.json before this process loads it.

The `tokenizers` library aborts the process for some files, and for others a short text becomes
gigabytes: 40 normalizers that replace "a" by "aa" turn one letter into 10^12. A process with limits
therefore loads the file first, and checks there

    growth       each step of the normalizer, the pre-tokenizer, the post-processor and the decoder
                 makes a text at most so many times longer; the product of their factors is limited
    cost         long pieces overflow the stack; nested pieces and long words take quadratic time
    a sample     is encoded and decoded, to find patterns that take exponential time

Files that passed are remembered by their SHA-256, so only the first start with a file is slower.
"""

import base64
import contextlib
import functools
import hashlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from data.text.tokenization.refusing import refusing
from fields.paths import cache_path
from untrusted.cached import others_may_write
from untrusted.files import make_private_directory, write_with
from untrusted.limited import LimitExceeded, run_limited
from untrusted.limited_process import Limits

#: Part of the names of remembered verdicts. Increase it when the checks become stricter.
_REVISION = 1
_REMEDY = "replace the file, or set data.tokenizer to 'bpe' or 'bytes'"

# Factors in bytes of UTF-8. LLaMA's tokenizer has 12: "▁" takes 3 bytes, and one begins each text.
_MAX_GROWTH = 100
_MAX_STEPS = 100
# A step that inserts one character into each piece, next to a byte that becomes one of two bytes.
_GROWTH_OF_TYPE = {"ByteLevel": 3.0, "Metaspace": 4.0, "BertNormalizer": 2.0}
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "BertNormalizer")
_MAX_PIECE_BYTES = 4096
_MAX_NESTED_PIECES = 256
_MAX_WORD_CHARACTERS = 1000
_MAX_SPECIAL_TOKENS = 100

# The library loads 5 to 20 MB of a tokenizer.json per second into about 10 times its size.
_MIN_CPU_S = 4.0
_BYTES_PER_S = 2_000_000
_MIN_MEMORY_BYTES = 2**29
_MEMORY_PER_BYTE = 40

_SAMPLE = """The quick brown fox's 3 dogs, we'll see... don't!? (x_1+y)**2 == 10^6; http://a.b/c?d=e&f
\tif x:\r\n\r\n    return  [1,2,3]      # 1234567890 ---------- ==========

数据集和模型。日本語のテキスト、한국어 문장, Größe naïve Ω≈ç√∫ Привет мир, שלום, مرحبا ﷺ, हिन्दी ไทย
🙂👩‍👩‍👧 e\u0301 ﬁ ① Ⅷ ㎏ İ ẞ \u200b\u00a0\u3000\ufeff\x00\x1b ~~~ <s> </s> [MASK] ▁ Ġ ##
"""
_RUN_CHARACTERS = 200
_MAX_RUNS = 100


def check_tokenizer(content: str, source: str) -> None:
    """Check a tokenizer.json in a process with limits, unless it passed before.

    Args:
        source: path of the file, as in `data.tokenizer`.

    Raises:
        ValueError: The file is not a tokenizer, or would take too much time or memory.
    """
    encoded = content.encode()
    verdict = _verdict_file(encoded)
    if verdict is not None and verdict.is_file():
        return
    limits = Limits(
        cpu_s=_MIN_CPU_S + len(encoded) / _BYTES_PER_S,
        memory_bytes=_MIN_MEMORY_BYTES + _MEMORY_PER_BYTE * len(encoded),
    )
    try:
        run_limited(_check, [content, source], f"data.tokenizer={source!r}", limits)
    except LimitExceeded as error:
        raise ValueError(f"{error}; {_REMEDY}") from None
    if verdict is not None:
        with contextlib.suppress(OSError):  # such as a full disk: it is checked again
            write_with(verdict, lambda file: file.write(b"passed\n"))


def _verdict_file(content: bytes) -> Path | None:
    """Return the file that exists if a content passed; None if there is no safe place for it.

    A config may name another cache directory, to which a stranger could write verdicts.
    """
    digest = hashlib.sha256(b"%d " % _REVISION + tokenizers.__version__.encode() + b" " + content)
    try:
        directory = cache_path() / "checked_tokenizers"
        make_private_directory(directory)
        is_unsafe = others_may_write(directory)
    except (OSError, ValueError, RuntimeError):  # a RuntimeError without a home directory
        return None
    return None if is_unsafe else directory / digest.hexdigest()


def _check(argument: list[str]) -> None:
    """Check [content, source]; in a process with limits."""
    content, source = argument
    with refusing(f"data.tokenizer={source!r} is not a readable tokenizer.json", remedy=_REMEDY):
        tokenizer = tokenizers.Tokenizer.from_str(content)
    with refusing(f"data.tokenizer={source!r} cannot be used safely", remedy=_REMEDY):
        encoder = [*_steps_of(tokenizer.normalizer), *_steps_of(tokenizer.pre_tokenizer)]
        decoder = _steps_of(tokenizer.decoder)
        _check_growth(encoder)
        _check_growth(decoder)
        _check_growth(_steps_of(tokenizer.post_processor))
        _check_model(tokenizer)
    with refusing(f"data.tokenizer={source!r} cannot encode a text", remedy=_REMEDY):
        _try_sample(tokenizer, _sample_for([*encoder, *decoder]))


def _steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the JSON of a component of a tokenizer; several if it is a sequence of components."""
    if component is None:
        return []
    steps = []
    stack = [json.loads(component.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] != "Sequence":
            steps.append(step)
        for key in ("normalizers", "pretokenizers", "processors", "decoders"):
            stack += reversed(step.get(key, []))
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"it has {len(steps):,} steps in a sequence, but at most {_MAX_STEPS}")
    return steps


def _check_growth(steps: list[dict[str, Any]]) -> None:
    """Check how much longer the steps together can make a text.

    A Unicode form such as NFKD makes some characters 11 times longer. Rare characters of a text
    don't matter here, but a step before it may replace every character of the text by such a one.
    """
    growth = 1.0
    unicode_growth = 1.0  # for text inserted by earlier steps
    for step in steps:
        if step["type"] in _UNICODE_FORMS:
            growth *= unicode_growth
        growth *= _growth_of(step)
        for text in _inserted_texts(step):
            unicode_growth = max(unicode_growth, _unicode_growth_of(text))
    if growth > _MAX_GROWTH:
        raise ValueError(
            f"its {len(steps)} steps make a text up to {growth:,.0f} times longer, but at most "
            f"{_MAX_GROWTH} times is allowed"
        )


def _growth_of(step: dict[str, Any]) -> float:
    kind = step["type"]
    if kind == "Replace":
        num_matched = len(step["pattern"].get("String", "").encode())
        num_bytes = len(step["content"].encode())
        # A regular expression may match at every position, even without a character.
        return max(1.0, num_bytes / num_matched) if num_matched else 1.0 + num_bytes
    if kind == "Prepend":
        return 1.0 + len(step["prepend"].encode())
    if kind == "Precompiled":
        entries = _entries_of(step["precompiled_charsmap"])
        return max([1.0, *(_growth_of_entry(*entry) for entry in entries)])
    if kind == "TemplateProcessing":
        return max(
            _growth_of_template(step, step["single"]), _growth_of_template(step, step["pair"])
        )
    return _GROWTH_OF_TYPE.get(kind, 1.0)


def _growth_of_entry(key: str, value: str) -> float:
    """Return the growth of an entry of a map, compared with Unicode's form of the key."""
    num_bytes = max(len(form.encode()) for form in (key, unicodedata.normalize("NFKD", key)))
    return len(value.encode()) / num_bytes


def _growth_of_template(step: dict[str, Any], template: list[dict[str, Any]]) -> int:
    """Return how often a template repeats a text, and check its special tokens."""
    names = [part[kind]["id"] for part in template for kind in part]
    special = step["special_tokens"]
    if sum(len(special[name]["ids"]) for name in names if name in special) > _MAX_SPECIAL_TOKENS:
        raise ValueError(f"its template has more than {_MAX_SPECIAL_TOKENS} special tokens")
    return max([1, *(names.count(name) for name in ("A", "B"))])


def _inserted_texts(step: dict[str, Any]) -> list[str]:
    if step["type"] == "Precompiled":
        return [value for _, value in _entries_of(step["precompiled_charsmap"])]
    return [step[key] for key in ("content", "prepend", "replacement") if key in step]


def _unicode_growth_of(text: str) -> float:
    """Return how much longer a Unicode form makes the character of a text that grows most."""
    forms = ((each, unicodedata.normalize("NFKD", each)) for each in set(text))
    return max([1.0, *(len(form.encode()) / len(each.encode()) for each, form in forms)])


@functools.lru_cache(maxsize=4)
def _entries_of(charsmap: str) -> list[tuple[str, str]]:
    """Return (key, replacement) of the map of a Precompiled normalizer.

    The map is the size of a double-array trie in bytes, the trie as uint32, and the replacements,
    each with a zero at its end. A unit of the trie has a label, an offset to its children, and a
    bit that says whether a key ends there.
    Source: darts-clone and sentencepiece, normalizer.cc.
    """
    content = base64.b64decode(charsmap)
    size = int.from_bytes(content[:4], "little")
    units = np.frombuffer(content[4 : 4 + size // 4 * 4], "<u4").astype(np.int64)
    texts = content[4 + size :]
    labels = np.arange(1, 256)
    entries = []
    seen = np.zeros(len(units), bool)
    with refusing("its Precompiled map is damaged", remedy="a position is outside the map"):
        frontier = [(b"", int(units[0] >> 10 << ((units[0] & 0x200) >> 6)))]
        while frontier:
            key, position = frontier.pop()
            if seen[position]:
                continue
            seen[position] = True
            children = position ^ labels
            child_units = units[children]
            matches = (child_units & 0x800000FF) == labels
            for child, unit in zip(children[matches], child_units[matches], strict=True):
                name = key + bytes([int(child ^ position)])
                place = int(child ^ (unit >> 10 << ((unit & 0x200) >> 6)))
                frontier.append((name, place))
                if unit & 0x100:
                    start = int(units[place] & 0x7FFFFFFF)
                    value = texts[start : texts.index(b"\0", start)]
                    entries.append((name.decode(errors="replace"), value.decode()))
    return entries


def _check_model(tokenizer: tokenizers.Tokenizer) -> None:
    longest = max([0, *(len(piece.encode()) for piece in tokenizer.get_vocab())])
    if longest > _MAX_PIECE_BYTES:
        raise ValueError(
            f"its longest piece has {longest:,} bytes, but at most {_MAX_PIECE_BYTES:,} are allowed"
        )
    model = tokenizer.model
    if isinstance(model, tokenizers.models.WordPiece):
        if model.max_input_chars_per_word > _MAX_WORD_CHARACTERS:
            raise ValueError(
                f"its max_input_chars_per_word is {model.max_input_chars_per_word:,}, but at most "
                f"{_MAX_WORD_CHARACTERS:,} is allowed"
            )
    if isinstance(model, tokenizers.models.Unigram):
        nested: list[str] = []
        for piece in sorted(tokenizer.get_vocab(with_added_tokens=False)):
            while nested and not piece.startswith(nested[-1]):
                nested.pop()
            nested.append(piece)
            if len(nested) > _MAX_NESTED_PIECES:
                raise ValueError(
                    f"more than {_MAX_NESTED_PIECES} of its pieces begin with each other"
                )


def _sample_for(steps: list[dict[str, Any]]) -> str:
    """Return a text with repeated characters, also those that occur in the patterns of the steps.

    A pattern such as (x+)+y takes exponential time for a text that has many x and no y.
    """
    patterns = "".join(str(step.get("pattern", "")) for step in steps)
    characters = [*dict.fromkeys(" \na1.é中" + patterns)][:_MAX_RUNS]
    return _SAMPLE * 20 + "\n".join(each * _RUN_CHARACTERS for each in characters)


def _try_sample(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for encodes_names in (False, True):  # encode the names of special tokens as text
        tokenizer.encode_special_tokens = encodes_names
        ids = tokenizer.encode(text, add_special_tokens=not encodes_names).ids
        tokenizer.decode(ids, skip_special_tokens=False)
