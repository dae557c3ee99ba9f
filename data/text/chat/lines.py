"""Lines of .jsonl files that hold conversations, each parsed and checked when it is read.

A line has one conversation, or a pair of answers of which one was preferred. The answers of a pair
are texts or lists of messages, and so is their prompt. A prompt may also be the beginning that both
lists of messages share, and is not repeated if the answers begin with it:

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", …}]}

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "Who knows?"}
    {"prompt": [{"role": "user", …}], "chosen": [{"role": "assistant", …}], "rejected": […]}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}
"""

import abc
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from data.config import DataConfig
from data.text.chat.layouts import READ_AS, layout_of, messages_of, turn_of
from data.text.chat.rendering import Message
from data.text.chat.template import Dialogue
from data.text.spans import DocumentSpans
from untrusted.documents import parse_json
from untrusted.messages import shortened

_log = logging.getLogger(__name__)

#: An escape sequence that may be half of a character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ChatLines(Sequence[tuple[Dialogue, ...]], abc.ABC):
    """Lines of conversations."""

    #: How many conversations a line has.
    num_dialogues = 1

    def __init__(self, spans: DocumentSpans, config: DataConfig, announced: set[str]):
        """Open lines.

        Args:
            announced: layouts of conversations that the log has explained; added to.
        """
        self.spans = spans
        self.config = config
        self._announced = announced

    def __len__(self) -> int:
        return len(self.spans)

    def record(self, index: int) -> tuple[dict[str, Any], str]:
        """Return a line's JSON object, and where it is, for messages."""
        content = self.spans.read(index)
        where = f"data.paths: {self.spans.place_of(index)}"
        record = parse_json(content, where, allows_nan=True)
        if _SURROGATE.search(content):
            _check_characters(record, where)
        return record, where

    def in_layout(self, record: dict[str, Any], field: str, where: str) -> list[Message] | None:
        """Return messages in the layout of another project; None if `field` has them.

        The first line in each layout is logged.
        """
        layout = layout_of(record, field)
        if layout is None:
            return None
        messages = messages_of(record, layout, field, where)
        if layout not in self._announced:
            self._announced.add(layout)
            _log.info("%s has the layout of %s: %s", where, layout, READ_AS[layout])
        return messages


class Conversations(ChatLines):
    """A sequence of conversations; an item is a conversation whose answers are all learned."""

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        record, where = self.record(index)
        field = self.config.messages_field
        messages = self.in_layout(record, field, where)
        if messages is None:
            messages = _parsed(record.get(field), f"{where}: {field}")
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"{where} has the fields {sorted(record)}, but no messages in data.messages_field="
                f"{field!r}; set data.messages_field to the field with the list of messages"
            )
        messages = checked_messages(messages, where)
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError(
                f"{where} has no message of the role 'assistant', so there is nothing to learn; "
                "remove the line"
            )
        return (Dialogue(messages, tools=tools_of(record, where)),)


class Preferences(ChatLines):
    """A sequence of pairs: the conversation with the chosen answer, and with the rejected one.

    Only messages that the two do not share are learned.
    """

    num_dialogues = 2

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        record, where = self.record(index)
        prompt_field, *answer_fields = self.config.preference_fields
        prompt = self.in_layout(record, prompt_field, where)
        if prompt is None:
            prompt = _messages(record.get(prompt_field, []), "user", prompt_field, where)
        both = []
        for field in answer_fields:
            if field not in record:
                raise ValueError(
                    f"{where} has the fields {sorted(record)}, but not {field!r}; set "
                    "data.preference_fields to the fields of the prompt, of the chosen and of the "
                    "rejected answer"
                )
            answer = _messages(record[field], "assistant", field, where)
            has_prompt = answer[: len(prompt)] == prompt  # the answer is the whole conversation
            both.append(answer if has_prompt else prompt + answer)
        num_shared = _num_shared(*both)
        for field, messages in zip(answer_fields, both, strict=True):
            roles = [message["role"] for message in messages[num_shared:]]
            if num_shared == 0 or "assistant" not in roles:
                raise ValueError(
                    f"{where}: {field!r} must have an answer of the role 'assistant' after a "
                    "prompt that is the same for both answers; fix or remove the line"
                )
        tools = tools_of(record, where)
        return tuple(Dialogue(messages, num_given=num_shared, tools=tools) for messages in both)


def _parsed(value: Any, where: str) -> Any:
    """Return messages; a .csv file has them as JSON."""
    is_json = isinstance(value, str) and value.lstrip().startswith("[")
    return parse_json(value, where, list) if is_json else value


def _messages(value: Any, role: str, field: str, where: str) -> list[Message]:
    """Return a field as messages; a text becomes a message of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict) and "from" in value:
        return [turn_of(value, where)]
    if isinstance(value, list) and any(isinstance(x, dict) and "from" in x for x in value):
        return [turn_of(turn, where) for turn in value]
    if not isinstance(value, list):
        raise ValueError(
            f"{where}: the field {field!r} must be a text or a list of messages; fix the line, or "
            "set data.preference_fields to other fields"
        )
    return checked_messages(value, where)


def _num_shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Return how many messages two conversations share at the beginning, before their last ones."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    differs = [one != other for one, other in pairs]
    return differs.index(True) if True in differs else len(differs)


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
