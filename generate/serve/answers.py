"""The objects of OpenAI's API that the server answers with.

Source: https://platform.openai.com/docs/api-reference (completions, chat completions).
"""

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How the objects of one kind of answer look."""

    prefix: str  # beginning of their ids
    kind: str  # field `object` of a whole answer
    kind_of_piece: str  # field `object` of a piece of an answer
    choice: Callable[[str], dict[str, Any]]  # text -> the fields of a choice that contain it
    # (text, whether it is the first of its choice) -> the same for a piece
    piece: Callable[[str, bool], dict[str, Any]]


TEXT = Format(
    prefix="cmpl",
    kind="text_completion",
    kind_of_piece="text_completion",
    choice=lambda text: {"text": text},
    piece=lambda text, is_first: {"text": text},
)
CHAT = Format(
    prefix="chatcmpl",
    kind="chat.completion",
    kind_of_piece="chat.completion.chunk",
    choice=lambda text: {"message": {"role": "assistant", "content": text}},
    piece=lambda text, is_first: {
        "delta": ({"role": "assistant"} if is_first else {}) | {"content": text}
    },
)


def new_answer(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the fields that all objects of an answer begin with."""
    created = int(time.time())
    answer_id = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the field `usage`."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def error(message: str, status: int) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
