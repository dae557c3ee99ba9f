r"""Renders conversations with a chat template, in a process with limits.

A template is a program that somebody else wrote, so only `render` here runs it, and template.py
calls `render` in such a process; see untrusted/limited.py. Arguments and results are JSON values.

The text of the assistant is between `{% generation %}` and `{% endgeneration %}`. The template runs
twice, with marks around that text and without. The marks are random, so that no message can contain
them, and the texts must be the same apart from the marks:

    with marks       <|user|>\nHi\n<|assistant|>\n(a3f0…Hello.</s>…a3f0)\n
    without marks    <|user|>\nHi\n<|assistant|>\nHello.</s>\n
    learned          (26, 36)
"""

import secrets
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from data.text.chat.environment import (
    NO_MARKS,
    NOT_REPEATABLE,
    Generation,
    Marks,
    compile_template,
    has_marks,
)
from untrusted.messages import shortened

Message = Mapping[str, Any]
#: First character and end of a part of a text.
Span = tuple[int, int]

#: Names of the reasoning before an answer, in messages and in templates.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Refused(ValueError):
    """Raised when a template does not render a conversation; the message is a sentence."""


def render(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Render conversations.

    Args:
        request: arguments of `_Program`, and `conversations`, each with

            messages: the messages, each with `role` and `content`
            tools: descriptions of functions that the assistant may call, or null
            add_generation_prompt: whether the text ends with the beginning of an answer
            variables: further variables of the template by name
            num_given: how many messages at the beginning are not learned; null if only the text is
                needed

    Returns:
        For each conversation `text` and, unless `num_given` is null, `spans`: the parts of the text
        that are learned; or `error`, a sentence.

    Raises:
        ValueError: A text is not a Jinja template.
    """
    conversations = request.pop("conversations")
    program = _Program(**request)
    results = []
    for each in conversations:
        try:
            results.append(program.rendered(**each))
        except _Refused as error:
            results.append({"error": str(error)})
    return results


class _Program:
    """A chat template that has been compiled.

    Args:
        for_tools: template of conversations with tools; None: `text` is.
        source: its file or config key, for error messages.
        tokens: names of special tokens that it may use.
        is_repeatable: whether its text must be the same in every run.
    """

    def __init__(
        self,
        *,
        text: str,
        for_tools: str | None,
        source: str,
        tokens: dict[str, str],
        is_repeatable: bool,
    ):
        self._source = source
        self._tokens = tokens
        try:
            self._template = compile_template(text, is_repeatable)
            self._for_tools = compile_template(for_tools or text, is_repeatable)
        except Exception as error:  # MemoryError and RecursionError, too
            raise ValueError(
                f"{source} is not a chat template ({_reason(error, is_repeatable)})"
            ) from None
        self._is_repeatable = is_repeatable

    def rendered(
        self,
        *,
        messages: list[Message],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        num_given: int | None,
    ) -> dict[str, Any]:
        """Return a result of `render`."""
        if num_given is None:
            return {"text": self._run(messages, tools, add_generation_prompt, variables=variables)}
        text, spans = self._spans(messages, tools, num_given)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _Refused(
                f"{self._source} renders the lone surrogate {shortened(text[error.start])}, which "
                "is not a character; correct the template"
            ) from None
        return {"text": text, "spans": spans}

    def _spans(
        self, messages: list[Message], tools: list[Any] | None, num_given: int
    ) -> tuple[str, list[Span]]:
        text = self._run(messages, tools)
        if not has_marks(self._for_tools if tools else self._template):
            spans = self._spans_by_message(text, messages, tools)
            return text, spans[_num_answers(messages[:num_given]) :]
        nonce = secrets.token_hex(16)
        marks = Marks(f"({nonce}", f"{nonce})")
        unmarked, spans = _remove_marks(self._run(messages, tools, marks=marks), marks)
        if unmarked != text:
            raise self._not_clear(
                "changes the text of {% generation %} after its end", remedy="print it as it is"
            )
        if not num_given:
            return text, spans
        return text, self._spans_after(text, spans, messages, tools, num_given)

    def _spans_after(
        self,
        text: str,
        spans: list[Span],
        messages: list[Message],
        tools: list[Any] | None,
        num_given: int,
    ) -> list[Span]:
        """Return the parts of a text that are not in the given messages."""
        given_messages = messages[:num_given]
        for add_generation_prompt in (True, False):
            start = self._run(given_messages, tools, add_generation_prompt)
            if text.startswith(start):
                first = len(start)
                return [(max(begin, first), end) for begin, end in spans if end > first]
        if len(spans) == _num_answers(messages):
            return spans[_num_answers(given_messages) :]
        raise self._not_clear(
            f"renders the first {num_given} messages differently when others follow",
            remedy="put {% generation %} and {% endgeneration %} around each answer once",
        )

    def _spans_by_message(
        self, text: str, messages: list[Message], tools: list[Any] | None
    ) -> list[Span]:
        """Return the part that each answer adds to the text of the messages before it."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise self._not_clear("renders no prompt before message 0, which is an answer")
            prompt = self._run(messages[:number], tools, add_generation_prompt=True)
            until = self._run(messages[: number + 1], tools)
            if not (text.startswith(until) and until.startswith(prompt)):
                raise self._not_clear(f"renders message {number} differently when others follow")
            spans.append((len(prompt), len(until)))
        return spans

    def _not_clear(
        self,
        problem: str,
        remedy: str = "put {% generation %} and {% endgeneration %} around it",
    ) -> _Refused:
        return _Refused(
            f"{self._source} {problem}, so the text of the assistant is not clear; {remedy} in a "
            "copy of the template, and set data.chat_template to its path"
        )

    def _run(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        add_generation_prompt: bool = False,
        *,
        variables: Mapping[str, Any] = types.MappingProxyType({}),
        marks: Marks = NO_MARKS,
    ) -> str:
        Generation.marks = marks
        try:
            return (self._for_tools if tools else self._template).render(
                {
                    **variables,
                    "messages": [_normalize(message) for message in messages],
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self._tokens,
                }
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever a program of somebody else may raise
            reason = _reason(error, self._is_repeatable)
            raise _Refused(f"{self._source} refuses messages: {reason}") from None


def _remove_marks(marked: str, marks: Marks) -> tuple[str, list[Span]]:
    """Remove marks from a text; return it and the parts within them, which may be nested."""
    text = ""
    spans = []
    first = depth = 0
    for number, part in enumerate(marked.split(marks.begin)):
        if number:
            first = first if depth else len(text)
            depth += 1
        for index, piece in enumerate(part.split(marks.end)):
            if index:
                depth -= 1
                if depth == 0:
                    spans.append((first, len(text)))
            text += piece
    return text, spans


def _num_answers(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _normalize(message: Message) -> Message:
    """Return a message as templates expect it, which is as `transformers` gives it to them.

    Fields that are null are left out, since templates render them or ask whether they exist. The
    reasoning before an answer has all names that templates have for it.
    """
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in _REASONING if key in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _reason(error: Exception, is_repeatable: bool) -> str:
    """Return why a template cannot be used."""
    if isinstance(error, RecursionError):
        return "its blocks or calls are nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    reason = shortened(error)
    missing = [name for name in NOT_REPEATABLE if f"'{name}'" in str(error)]
    if not (is_repeatable and missing and isinstance(error, jinja2.TemplateError)):
        return reason
    on = "the date" if missing == ["strftime_now"] else "chance"
    return (
        f"{reason}; training must not depend on {on}, so write a fixed text into a copy of the "
        "template, and set data.chat_template to its path"
    )
