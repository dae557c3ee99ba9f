"""Lines of .jsonl files that hold conversations, each parsed and checked when it is read."""

import abc
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.text.chat.template import Dialogue
from data.text.spans import DocumentSpans
from untrusted.documents import parse_json
from untrusted.messages import shortened

Message = dict[str, Any]
#: An escape sequence that may be half of a character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ChatLines(Sequence[tuple[Dialogue, ...]], abc.ABC):
    """Lines of conversations.

    Args:
        files: files that `spans` refers to.
        spans: position of each line in its file.
    """

    #: How many conversations a line has.
    num_dialogues = 1

    def __init__(self, files: list[Path], spans: DocumentSpans, config: DataConfig):
        self._files = files
        self._spans = spans
        self.config = config

    def __len__(self) -> int:
        return len(self._spans)

    def record(self, index: int) -> tuple[dict[str, Any], str]:
        """Return a line's JSON object, and where it is, for messages."""
        content, file, line = self._spans.read(index, self._files)
        where = f"data.paths: {file} line {line}"
        record = parse_json(content, where, allows_nan=True)
        if _SURROGATE.search(content):
            _check_characters(record, where)
        return record, where

    def num_bytes(self, index: int) -> int:
        """Return the size of a line."""
        _, start, stop, _ = self._spans[index]
        return stop - start

    def place(self, index: int) -> str:
        """Return the file and the line number of a line, for messages."""
        file_number, _, _, line = self._spans[index]
        return f"{self._files[file_number]} line {line}"


def _check_characters(record: dict[str, Any], where: str) -> None:
    """Check that a record has no half of a character, which JSON has as an escape sequence."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where} has the lone surrogate {shortened(half)}, which is half of a character; fix "
            "or remove the line"
        ) from None


def tools_of(record: dict[str, Any], where: str) -> list[Any] | None:
    """Return the field `tools` of a line, a list or the JSON of one; None if it has none.

    Args:
        where: its file and number, for the error.

    Raises:
        ValueError: It is something else.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        has_none = tools.strip() in ("", "null")
        tools = None if has_none else parse_json(tools, f"{where}: tools", list)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(
            f"{where}: 'tools' is {shortened(tools)}, but must be a list of functions; fix the line"
        )
    return tools or None


def checked_messages(messages: list[Any], where: str) -> list[Message]:
    """Return messages, which have the strings `role` and `content`.

    The content of a message that calls tools may be null or absent.

    Args:
        where: line that they are from, for the error.

    Raises:
        ValueError: A message does not.
    """
    for number, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        only_calls = bool(fields.get("tool_calls")) and fields.get("content") is None
        has_content = isinstance(fields.get("content"), str) or only_calls
        if not (isinstance(fields.get("role"), str) and has_content):
            raise ValueError(
                f"{where}: message {number} is {shortened(message)}, but must have the strings "
                "'role' and 'content'; fix the line"
            )
    return messages
