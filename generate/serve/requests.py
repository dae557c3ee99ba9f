"""The requests of OpenAI's API as checked values.

    JSON ──> CompletionRequest ──> prompts as tokens

Source: https://platform.openai.com/docs/api-reference (completions, chat completions).
"""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from data.text.chat.template import ChatTemplate
from generate.prompts import TextCodec
from generate.sampling import Sampling
from untrusted.messages import shortened

#: Fields that are accepted if they are null or have one of these values, which change nothing.
#: Some of them are vLLM's.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (False, True),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
#: Fields that are accepted with any value: they say who asks, or how a service may save work.
_IGNORED = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_MOST_STOPS = 4


class BadRequest(ValueError):
    """Raised for a request that cannot be answered.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on a request."""

    max_length: int  # most tokens of a prompt and its continuation
    max_choices: int  # most continuations of a request


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request for continuations."""

    prompts: list[list[int]]  # as tokens
    sampling: Sampling  # how tokens are chosen
    num_choices: int  # number of continuations of each prompt
    max_new_tokens: list[int]  # most tokens of a continuation of each prompt
    stop: tuple[str, ...]  # texts that end a continuation, and are not part of it
    streams: bool  # whether the answer is sent piece by piece
    includes_usage: bool  # whether a stream ends with the numbers of tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))


def read_completion(
    fields: dict[str, Any], codec: TextCodec, vocab_size: int, limits: Limits
) -> CompletionRequest:
    """Return the request of `/v1/completions`.

    Raises:
        BadRequest: a field is missing, unknown, not supported or out of bounds.
    """
    known = _Fields(fields, ("prompt", "max_tokens"))
    prompt = known.get("prompt", None)
    is_many = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
    each: list[Any] = prompt if is_many and isinstance(prompt, list) else [prompt]
    prompts = [_tokens(one, codec, vocab_size) for one in each]
    if not prompts:
        raise BadRequest("prompt is an empty list; give at least one prompt")
    max_tokens = known.integer("max_tokens", 16)
    return _request(known, prompts, max_tokens, limits)


def read_chat(
    fields: dict[str, Any], codec: TextCodec, template: ChatTemplate | None, limits: Limits
) -> CompletionRequest:
    """Return the request of `/v1/chat/completions`.

    Raises:
        BadRequest: as for `read_completion`, or the template is missing or refuses the messages.
    """
    if template is None:
        raise BadRequest("the model has no chat template; use /v1/completions")
    names = ("messages", "max_tokens", "max_completion_tokens", "chat_template_kwargs")
    known = _Fields(fields, names)
    messages = known.get("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    checked = [_message(number, message) for number, message in enumerate(messages)]
    variables = _variables(known.get("chat_template_kwargs", {}))
    try:
        text = template.render(checked, add_generation_prompt=True, variables=variables)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    tokens = codec.encode(text, has_special_tokens=False)
    if not tokens:
        raise BadRequest("messages have no tokens; write at least one word")
    requested_tokens = known.integer("max_completion_tokens", known.integer("max_tokens", None))
    max_tokens = (
        max(1, limits.max_length - len(tokens)) if requested_tokens is None else requested_tokens
    )
    return _request(known, [tokens], max_tokens, limits)


class _Fields:
    """The fields of a request, all of which are known."""

    def __init__(self, fields: dict[str, Any], names: Sequence[str]):
        shared = ("model", "n", "stop", "stream", "stream_options", *_SAMPLING)
        for name, value in fields.items():
            if value is None:
                continue
            if name in _WITHOUT_EFFECT:
                # In Python, 1 equals True.
                if not any(type(value) is type(x) and value == x for x in _WITHOUT_EFFECT[name]):
                    raise BadRequest(f"{name}={shortened(value)} is not supported; leave it out")
            elif name not in (*names, *shared, *_IGNORED):
                raise BadRequest(f"the field {shortened(name)!r} is unknown; leave it out")
        self._fields = fields

    def get(self, name: str, default: Any) -> Any:
        """Return a field, or the default if it is absent or null."""
        value = self._fields.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any, least: int = 1) -> Any:
        """Return a whole number, or the default."""
        value = self.get(name, default)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadRequest(
                f"{name}={shortened(value)} must be a whole number of at least {least}"
            )
        return value

    def boolean(self, name: str) -> bool:
        """Return whether a field is true."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise BadRequest(f"{name}={shortened(value)} must be true or false")
        return value


def _request(
    known: _Fields, prompts: list[list[int]], max_tokens: int, limits: Limits
) -> CompletionRequest:
    """Return a request for continuations of prompts."""
    for number, tokens in enumerate(prompts):
        if len(tokens) >= limits.max_length:
            raise BadRequest(
                f"prompt {number} has {len(tokens)} tokens, but a prompt and its continuation have "
                f"at most {limits.max_length}; shorten it"
            )
    num_choices = known.integer("n", 1)
    if num_choices * len(prompts) > limits.max_choices:
        raise BadRequest(
            f"{len(prompts)} prompts × n={num_choices} are more than {limits.max_choices} "
            "continuations; ask for fewer"
        )
    options = known.get("stream_options", {})
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object")
    return CompletionRequest(
        prompts=prompts,
        sampling=_sampling(known),
        num_choices=num_choices,
        max_new_tokens=[min(max_tokens, limits.max_length - len(tokens)) for tokens in prompts],
        stop=_stops(known.get("stop", [])),
        streams=known.boolean("stream"),
        includes_usage=options.get("include_usage") is True,
    )


def _sampling(known: _Fields) -> Sampling:
    """Return how tokens are chosen; without a seed, at random."""
    values: dict[str, Any] = {}
    for name in _SAMPLING:
        value = known.get(name, None)
        if value is None:
            continue
        is_whole = name in ("top_k", "seed")
        is_number = isinstance(value, int if is_whole else int | float)
        if not is_number or isinstance(value, bool):
            raise BadRequest(f"{name}={shortened(value)} must be a number")
        values[name] = value
    values["seed"] = values["seed"] % 2**32 if "seed" in values else secrets.randbits(32)
    if values.get("top_k", 1) < 1:
        del values["top_k"]  # vLLM takes 0 and -1 for all tokens
    try:
        return Sampling(**values)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    is_valid = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not is_valid or len(stops) > _MOST_STOPS:
        raise BadRequest(f"stop must be a text, or a list of at most {_MOST_STOPS} texts")
    return tuple(stops)


def _tokens(prompt: Any, codec: TextCodec, vocab_size: int) -> list[int]:
    """Return a prompt, which is a text or a list of ids, as tokens."""
    if isinstance(prompt, str):
        tokens = codec.encode(prompt)
    elif isinstance(prompt, list) and all(type(one) is int for one in prompt):
        tokens = prompt
    else:
        raise BadRequest("prompt must be a text, a list of token ids, or a list of these")
    if not tokens:
        raise BadRequest("the prompt has no tokens; write at least one word")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise BadRequest(f"token ids must be from 0 to {vocab_size - 1}")
    return tokens


def _variables(variables: Any) -> dict[str, Any]:
    """Return vLLM's `chat_template_kwargs`, such as {"enable_thinking": false}."""
    if not isinstance(variables, dict):
        raise BadRequest("chat_template_kwargs must be an object")
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in variables:
            raise BadRequest(f"chat_template_kwargs must not have {name!r}; leave it out")
    return variables


def _message(number: int, message: Any) -> dict[str, str]:
    """Return a message as the template gets it: a role, and one text."""
    fields = message if isinstance(message, dict) else {}
    if fields.get("tool_calls"):
        raise BadRequest(
            f"messages[{number}] has tool_calls, which are not supported; leave it out"
        )
    content = fields.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        valid_texts = [text for text in texts if isinstance(text, str)]
        content = "".join(valid_texts) if len(valid_texts) == len(parts) else None
    if not isinstance(fields.get("role"), str) or not isinstance(content, str):
        raise BadRequest(f"messages[{number}] must have the texts 'role' and 'content'")
    return {"role": fields["role"], "content": content}
