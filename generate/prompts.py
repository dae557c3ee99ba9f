"""Prompts from the command line or a file, and their continuations as lines of JSON."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from convert.model_on_disk import Source
from data.text.tokenization.file_tokenizer import FileTokenizer, load_tokenizer_file
from untrusted.documents import parse_json, read_json
from untrusted.files import read_text
from untrusted.messages import shortened, without_surrogates
from untrusted.schema import check

#: How many tokens before a token may change its text.
_CONTEXT = 8
#: Most tokens of a character, which are the bytes of UTF-8.
_CHARACTER = 4
#: The text that tokenizers have for an incomplete character.
INCOMPLETE = "\ufffd"


class TextCodec:
    """Turns texts into the tokens that a model was trained on, and back."""

    def __init__(self, tokenizer: FileTokenizer):
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, has_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, with the special ones that the tokenizer adds to a text."""
        text = without_surrogates(text)  # which no tokenizer accepts
        return self._tokenizer.encode(text, add_special_tokens=has_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, has_special_tokens: bool = False) -> str:
        """Return the text of tokens, without special ones unless asked for."""
        return self._tokenizer.decode([*tokens], skip_special_tokens=not has_special_tokens)

    def decode_after(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add to a prompt.

        Some tokenizers leave out a space at the beginning of a text, but not within it.
        """
        context = self.context(prompt)
        return self.decode([*context, *tokens])[len(self.decode(context)) :]

    def context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt, those that may change the text of further ones.

        They begin with a whole character: some tokenizers decode no byte of a row of bytes if one
        character in it is incomplete. There are none if the prompt is no text.
        """
        for size in range(_CONTEXT, _CONTEXT + _CHARACTER):
            if not self.decode(prompt[-size:]).startswith(INCOMPLETE):
                return [*prompt[-size:]]
        return []


def tokenizer_of(source: Source) -> FileTokenizer | None:
    """Return the tokenizer of a model on disk; None if it has none."""
    return None if source.tokenizer is None else load_tokenizer_file(str(source.tokenizer))


def stop_tokens_of(source: Source, tokenizer: FileTokenizer | None) -> list[int]:
    """Return the ids of the tokens that end a text.

    generation_config.json lists them, or else config.json. If neither does, the end-of-text token
    of the tokenizer ends a text.

    Raises:
        ValueError: the ids in a file are not numbers.
    """
    setting = _setting(source, "eos_token_id", int | list[int])
    if setting is None:
        return [] if tokenizer is None else [tokenizer.eos_id]
    return [setting] if isinstance(setting, int) else setting


def start_token_of(source: Source, tokenizer: FileTokenizer | None) -> int | None:
    """Return the id of the token that the decoder of a sequence-to-sequence model begins with.

    generation_config.json has it, or else config.json. If neither does, it is the padding token of
    the tokenizer, as in training; None without a tokenizer.

    Raises:
        ValueError: the id in a file is not a number.
    """
    token_id = _setting(source, "decoder_start_token_id", int)
    if token_id is None and tokenizer is not None:
        return tokenizer.special_ids.get("pad", tokenizer.eos_id)
    return token_id


def have_same_tokens(one: FileTokenizer, other: FileTokenizer) -> bool:
    """Return whether two tokenizers have the same tokens, with the same ids."""
    first, second = (
        tokenizers.Tokenizer.from_str(each.content).get_vocab() for each in (one, other)
    )
    return first == second


def _setting(source: Source, key: str, type_: Any) -> Any:
    """Return a value of generation_config.json, or else of config.json; None if neither has it."""
    for name, config in (
        ("generation_config.json", generation_config_of(source)),
        ("config.json", source.hf_config or {}),
    ):
        if config.get(key) is not None:
            check(config[key], type_, f"{source.path / name}: {key}")
            return config[key]
    return None


def generation_config_of(source: Source) -> dict[str, Any]:
    """Return the content of generation_config.json; empty without such a file.

    Raises:
        ValueError: the file is damaged.
    """
    file = source.hf_file("generation_config.json")
    return {} if file is None else read_json(file, within=file.parent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt; its text is None if it was given as tokens."""

    text: str | None
    tokens: list[int]


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON object on each line of a file, after its place; empty lines are skipped.

    Raises:
        ValueError: a line is something else.
        OSError: the file cannot be read.
    """
    text = read_text(path).removeprefix("\ufeff")  # the mark that some editors begin files with
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse_json(line, where)


def read_prompts(path: Path, codec: TextCodec | None) -> list[Prompt]:
    """Read a file with a JSON object per line, which has `prompt` (text) or `tokens` (ids).

    Raises:
        ValueError: a line is something else, or a text needs a tokenizer.
        OSError: the file cannot be read.
    """
    prompts = []
    for where, values in read_json_lines(path):
        if [*values] not in (["prompt"], ["tokens"]):
            raise ValueError(
                f"{where} has the keys {shortened([*values])}; give each line either prompt, a "
                "text, or tokens, a list of ids"
            )
        if "tokens" in values:
            check(values["tokens"], list[int], f"{where}: tokens")
            prompts.append(Prompt(text=None, tokens=values["tokens"]))
        else:
            check(values["prompt"], str, f"{where}: prompt")
            prompts.append(as_prompt(values["prompt"], codec))
    if not prompts:
        raise ValueError(f"{path} has no prompts; give one per line")
    return prompts


def as_prompt(text: str, codec: TextCodec | None) -> Prompt:
    """Return a prompt that is given as text.

    Raises:
        ValueError: the model has no tokenizer, or the text has no tokens.
    """
    if codec is None:
        raise ValueError("the model has no tokenizer.json; put it beside the model, or pass tokens")
    tokens = codec.encode(text)
    if not tokens:
        raise ValueError(f"the prompt {shortened(text)!r} has no tokens; write at least one word")
    return Prompt(text=text, tokens=tokens)


def as_line(
    prompt: Prompt, tokens: list[int], codec: TextCodec | None, *, follows_prompt: bool
) -> str:
    """Return a continuation as a line of JSON, with the keys prompt, tokens and text."""
    before = prompt.tokens if follows_prompt else []
    text = None if codec is None else codec.decode_after(before, tokens)
    prompt_value = prompt.tokens if prompt.text is None else prompt.text
    line = json.dumps({"prompt": prompt_value, "tokens": tokens, "text": text}, ensure_ascii=False)
    return without_surrogates(line)
