"""Conversations in .jsonl files and tables, as tokens and a mark for each that is learned.

A line is `{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", …}]}`.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.array_cache import read_array, write_array
from data.config import DataConfig
from data.locks import locked
from data.text.chat.template import ChatTemplate, Span
from data.text.records import find_lines
from data.text.spans import DocumentSpans
from data.text.text_files import split_files
from data.text.tokenization.tokenizer import Tokenizer
from untrusted.documents import parse_json
from untrusted.messages import shortened

_log = logging.getLogger(__name__)

#: Increase this when conversations are encoded in another way.
_REVISION = 1


class Conversations(Sequence[list[dict[str, Any]]]):
    """A sequence of conversations, each parsed and checked when it is read.

    Args:
        files: The files that `spans` refers to.
        spans: The position of each line in its file.
        config: The config section `data`, which names the field of the messages.
    """

    def __init__(self, files: list[Path], spans: DocumentSpans, config: DataConfig):
        self._files = files
        self._spans = spans
        self._field = config.messages_field

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        content, file, line = self._spans.read(index, self._files)
        where = f"data.paths: {file} line {line}"
        record = parse_json(content, where, allows_nan=True)
        messages = record.get(self._field)
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"{where} has the fields {sorted(record)}, but no messages in data.messages_field="
                f"{self._field!r}; set data.messages_field to the field with the list of messages"
            )
        for number, message in enumerate(messages):
            fields = message if isinstance(message, dict) else {}
            if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
                raise ValueError(
                    f"{where}: message {number} is {shortened(message)}, but must have the strings "
                    "'role' and 'content'; fix the line"
                )
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError(
                f"{where} has no message of the role 'assistant', so there is nothing to learn; "
                "remove the line"
            )
        return messages

    def place(self, index: int) -> str:
        """Return the file and the line number of a conversation, for messages."""
        file_number, _, _, line = self._spans[index]
        return f"{self._files[file_number]} line {line}"


class MessageTexts(Sequence[str]):
    """The contents of each conversation's messages as one document, to train a tokenizer on."""

    def __init__(self, conversations: Conversations):
        self._conversations = conversations

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        return "\n".join(message["content"] for message in self._conversations[index])


@dataclass(frozen=True, kw_only=True)
class EncodedChats:
    """The tokens of conversations, one after another.

    Attributes:
        tokens: int32[number of tokens].
        is_learned: bool[number of tokens], whether the assistant says the token.
        ends: int64[number of conversations], the end of each among the tokens.
    """

    tokens: np.ndarray
    is_learned: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start = self.ends[index - 1] if index else 0
        part = slice(start, self.ends[index])
        return self.tokens[part], self.is_learned[part]

    @property
    def digest(self) -> str:
        """A hash of everything."""
        found = hashlib.sha256(self.tokens.tobytes())
        found.update(self.is_learned.tobytes())
        found.update(self.ends.tobytes())
        return found.hexdigest()


def open_conversations(config: DataConfig) -> dict[str, Conversations]:
    """Split the lines of `data.paths` into train and validation, without parsing them.

    Args:
        config: The config section `data`.

    Returns:
        Split -> its conversations.

    Raises:
        FileNotFoundError: A glob matches nothing.
        ValueError: A file is of another kind, or there are too few lines for the splits.
    """
    files = find_lines(config)
    splits = split_files(files, config.validation_fraction, config.sequence_length)
    return {split: Conversations(files, spans, config) for split, spans in splits.items()}


def encode(
    conversations: Conversations, template: ChatTemplate, tokenizer: Tokenizer, config: DataConfig
) -> EncodedChats:
    """Encode conversations; those that are longer than a sequence are cut.

    The result is cached. A conversation of which nothing learned is left is left out.

    Args:
        conversations: The conversations.
        template: The chat template.
        tokenizer: The tokenizer.
        config: The config section `data`.

    Raises:
        ValueError: A conversation is not valid, or the template refuses it.
    """
    digest = hashlib.sha256(f"{_REVISION} {config.sequence_length}\0".encode())
    for part in (template.key, tokenizer.fingerprint, *map(repr, conversations)):
        digest.update(f"{part}\0".encode("utf-8", "replace"))
    name = config.cache_path / f"chat-{digest.hexdigest()[:24]}"
    with locked(name):
        # Each token is 2 × its id, plus 1 if it is learned.
        marked = read_array(Path(f"{name}-tokens.npy"))
        ends = read_array(Path(f"{name}-ends.npy"))
        if marked is None or ends is None:
            parts = [*_encoded(conversations, template, tokenizer, config.sequence_length + 1)]
            marked = np.concatenate([np.zeros(0, np.int64), *parts])
            ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
            write_array(Path(f"{name}-tokens.npy"), marked)
            write_array(Path(f"{name}-ends.npy"), ends)
    return EncodedChats(
        tokens=(marked >> 1).astype(np.int32), is_learned=(marked & 1).astype(bool), ends=ends
    )


def _encoded(
    conversations: Conversations, template: ChatTemplate, tokenizer: Tokenizer, most: int
) -> Iterator[np.ndarray]:
    """Yield 2 × id + is_learned for the tokens of each conversation, at most `most`."""
    num_cut = num_lost = 0
    for index, messages in enumerate(conversations):
        try:
            text, spans = template.spans(messages)
        except ValueError as error:
            raise ValueError(f"data.paths: {conversations.place(index)}: {error}") from None
        ids, offsets = tokenizer.encode_with_offsets(text)
        marked = 2 * ids[:most].astype(np.int64) + _is_within(offsets[:most], spans)
        num_cut += len(ids) > most
        if (marked[1:] & 1).any():
            yield marked
        else:
            num_lost += 1
    if num_cut:
        _log.warning(
            "%d of %d conversations are longer than data.sequence_length and are cut; %d of them "
            "have no answer before that and are left out",
            num_cut,
            len(conversations),
            num_lost,
        )


def _is_within(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return bool[n], whether a token overlaps one of the parts of the text.

    Args:
        offsets: int[n, 2], first character and end of each token.
        spans: The parts.
    """
    found = np.zeros(len(offsets), bool)
    for start, stop in spans:
        found |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return found
