"""Layouts of conversations in other projects, rewritten as `messages`.

    ShareGPT    {"system": "…", "conversations": [{"from": "human", "value": "2 + 2?"}, …]}
    Alpaca      {"instruction": "Add.", "input": "2 and 2", "output": "4", "history": [["…", "…"]]}

and for preferences, the same with `chosen` and `rejected` in place of the answer.

Source: github.com/hiyouga/LLaMA-Factory, data/README.md; github.com/tatsu-lab/stanford_alpaca.
"""

from collections.abc import Mapping
from typing import Any

from data.text.chat.rendering import Message
from untrusted.messages import shortened

SHAREGPT = "ShareGPT"
ALPACA = "Alpaca"
#: Layout -> how its fields are read, for the log.
READ_AS = {
    SHAREGPT: "'from' and 'value' of its 'conversations' are read as 'role' and 'content'",
    ALPACA: "'instruction' and 'input' are read as the user's message, 'output' as the answer",
}
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def layout_of(record: Mapping[str, Any], field: str) -> str | None:
    """Return the layout of a line, or None if `field`, or nothing that is known, has its messages.

    Args:
        field: field of the messages, or of the prompt of a preference.
    """
    value = record.get(field)
    if isinstance(value, list) and any(isinstance(each, dict) and "from" in each for each in value):
        return SHAREGPT
    if field in record:
        return None
    if isinstance(record.get("conversations"), list):
        return SHAREGPT
    return ALPACA if isinstance(record.get("instruction"), str) else None


def messages_of(record: Mapping[str, Any], layout: str, field: str, where: str) -> list[Message]:
    """Return the messages of a line in a layout.

    Args:
        field: field of the messages if it is there.
        where: file and number of the line, for messages.

    Raises:
        ValueError: A field is missing, or has another type.
    """
    system = record.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    if layout == SHAREGPT:
        turns = record[field] if field in record else record["conversations"]
        return [*first, *(turn_of(turn, where) for turn in turns)]
    messages = first
    for pair in record.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair))):
            raise ValueError(
                f"{where}: 'history' has {shortened(pair)}, but must be a list of pairs of a "
                "question and an answer; fix the line"
            )
        messages += _pair(*pair)
    given = record.get("input") or ""
    if not _is_text(given):
        raise ValueError(f"{where}: 'input' is {shortened(given)}, but must be a text")
    question = "\n".join(filter(None, [record["instruction"], given]))
    messages += _pair(question, "")[:1]
    if "output" in record:
        if not _is_text(record["output"]):
            raise ValueError(
                f"{where}: 'output' is {shortened(record['output'])}, but must be a text"
            )
        messages += _pair("", record["output"])[1:]
    return messages


def turn_of(turn: Any, where: str) -> Message:
    """Return a turn of ShareGPT's layout as a message.

    Raises:
        ValueError: It is something else, or from somebody unknown.
    """
    fields = turn if isinstance(turn, dict) else {}
    role = _ROLES.get(str(fields.get("from")))
    if role is None or not _is_text(fields.get("value")):
        raise ValueError(
            f"{where}: the turn {shortened(turn)} must have a text in 'value' and in 'from' one of "
            f"{', '.join(_ROLES)}; fix the line"
        )
    return {"role": role, "content": fields["value"]}


def _pair(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
