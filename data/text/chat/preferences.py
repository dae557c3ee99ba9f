"""Pairs of answers, of which one was preferred, in .jsonl files and tables.

A line has the answers as texts or as lists of messages, and the prompt as either; a prompt may also
be the beginning that both lists of messages share:

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "Who knows?"}
    {"prompt": [{"role": "user", …}], "chosen": [{"role": "assistant", …}], "rejected": […]}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}

The prompt is not repeated if the answers begin with it.
"""

from typing import Any

from data.text.chat.lines import ChatLines, Message, checked_messages, tools_of
from data.text.chat.template import Dialogue


class Preferences(ChatLines):
    """A sequence of pairs: the conversation with the chosen answer, and with the rejected one.

    Only messages that the two do not share are learned.
    """

    num_dialogues = 2

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        record, where = self.record(index)
        prompt_field, *answer_fields = self.config.preference_fields
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


def _messages(value: Any, role: str, field: str, where: str) -> list[Message]:
    """Return a field as messages; a text becomes a message of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
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
