"""Chat templates: Jinja programs that turn messages into one text, as in `transformers`.

A template comes with a tokenizer, as `chat_template.jinja` or in tokenizer_config.json. It runs in
Jinja's sandbox, which has neither files nor imports, and in a process with limits; see rendering.py
about that process. In training it has neither a clock nor chance, because a model must not depend
on the day of its training.

The model learns the text of the assistant. A template can mark it with
`{% generation %}…{% endgeneration %}`. For others, it is the part that a message adds to the text
of the messages before it, after the prompt for an answer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.text.chat import rendering
from data.text.chat.rendering import Message, Span
from data.text.tokenization.settings import CONFIG_FILE, read_settings
from untrusted.files import read_text
from untrusted.limited import LimitedProcesses, LimitExceeded
from untrusted.limited_process import Limits
from untrusted.messages import without_surrogates

#: The template `data.chat_template=roles`.
ROLES = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
TEMPLATE_FILE = "chat_template.jinja"
#: The directory of other templates of a tokenizer, and the one for conversations with tools.
TEMPLATES = "additional_chat_templates"
TOOLS_FILE = f"{TEMPLATES}/tool_use.jinja"
_MAX_BYTES = 2**20

#: Limits of a few conversations that are learned. Most take less than 1 ms each.
_TRAINING = LimitedProcesses(
    rendering.render,
    Limits(cpu_s=20, memory_bytes=2**31, wall_s=300, reply_bytes=2**28),
)


class Dialogue(NamedTuple):
    """A conversation.

    Attributes:
        messages: its messages, each with the strings `role` and `content`.
        num_given: how many of them, at the beginning, are not learned.
        tools: descriptions of functions that the assistant may call; None for none.
    """

    messages: Sequence[Message]
    num_given: int = 0
    tools: Sequence[Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: rendered conversation.
        spans: parts of it that are learned, which the assistant says.
    """

    text: str
    spans: list[Span]


class ChatTemplate:
    """A chat template.

    Args:
        source: its file or config key, for error messages.
        tokens: names of special tokens that it may use, such as {"bos_token": "<s>"}.
        for_tools: template of conversations with tools; None: `text` is.
        is_repeatable: whether its text must be the same in every run; otherwise it may ask for the
            time with `strftime_now`, and choose at random.
        processes: processes that call `rendering.render` with limits.

    Attributes:
        files: name of a file of a tokenizer -> the template in it.

    Raises:
        ValueError: It is not a Jinja template.
    """

    def __init__(
        self,
        text: str,
        source: str,
        tokens: Mapping[str, str],
        *,
        for_tools: str | None = None,
        is_repeatable: bool = True,
        processes: LimitedProcesses = _TRAINING,
    ):
        self.files = {TEMPLATE_FILE: text}
        if for_tools is not None:
            self.files[TOOLS_FILE] = for_tools
        self._source = source
        self._tokens = tokens
        self._processes = processes
        self._program = {
            "text": text,
            "for_tools": for_tools,
            "source": source,
            "tokens": tokens,
            "is_repeatable": is_repeatable,
        }
        if any(_has_surrogate(each) for each in (*self.files.values(), *tokens.values())):
            raise ValueError(
                f"{source}, or a special token next to it, has a lone surrogate (\\ud800 to "
                "\\udfff), which is not a character; correct it"
            )
        self._call([])

    @property
    def key(self) -> str:
        """A string that changes whenever the texts may change."""
        return repr((sorted(self.files.items()), sorted(self._tokens.items())))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages.

        Args:
            add_generation_prompt: whether the text ends with the beginning of an answer.
            variables: further variables of the template by name, such as `enable_thinking`.

        Raises:
            ValueError: The template refuses the messages, or exceeds the limits.
        """
        request = _request(messages, add_generation_prompt=add_generation_prompt)
        (result,) = self._call([request | {"variables": dict(variables or {})}])
        if "error" in result:
            raise ValueError(result["error"])
        return result["text"]

    def learned(self, dialogue: Dialogue) -> Rendered:
        """Return the text of a conversation, and its learned parts.

        Raises:
            ValueError: The template refuses the messages, or exceeds the limits; or it has no tags,
                and renders earlier messages differently when others follow, or the assistant
                begins.
        """
        (result,) = self.learned_of_all([dialogue])
        if isinstance(result, ValueError):
            raise result
        return result

    def learned_of_all(self, dialogues: Sequence[Dialogue]) -> list[Rendered | ValueError]:
        """Return the result of `learned` for each conversation, up to the first error.

        The conversations share the limits. If they exceed them, each is rendered on its own.

        Returns:
            The results; the last one may be the error that `learned` raises.
        """
        requests = [
            _request(each.messages, each.tools, num_given=each.num_given) for each in dialogues
        ]
        outcomes: list[Rendered | ValueError] = []
        try:
            results = self._call(requests)
        except ValueError as error:
            if len(dialogues) == 1:
                return [error]
            for each in dialogues:
                outcomes += self.learned_of_all([each])
                if isinstance(outcomes[-1], ValueError):
                    break
            return outcomes
        for each in results:
            if "error" in each:
                return [*outcomes, ValueError(each["error"])]
            spans = [(start, stop) for start, stop in each["spans"]]
            outcomes.append(Rendered(text=each["text"], spans=spans))
        return outcomes

    def _call(self, conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        request = self._program | {"conversations": conversations}
        try:
            return self._processes.call(request, self._source)
        except LimitExceeded as error:
            raise LimitExceeded(f"{error}; correct or replace the chat template") from None


def _request(
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    add_generation_prompt: bool = False,
    num_given: int | None = None,
) -> dict[str, Any]:
    """Return a conversation for `rendering.render`."""
    return {
        "messages": [*messages],
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "variables": {},
        "num_given": num_given,
    }


def load_template(setting: str, tokenizer: Path | None, eos_token: str) -> ChatTemplate:
    """Load a chat template; takes the same arguments as `find_template`.

    Raises:
        ValueError: There is no template, or it cannot be read.
    """
    template = find_template(setting, tokenizer, eos_token)
    if template is None:
        where = f" in {_directory_of(tokenizer)}" if tokenizer else ""
        raise ValueError(
            f"this data.objective needs a chat template, but data.tokenizer has none{where}; set "
            "data.chat_template to the path of a Jinja file, or to 'roles'"
        )
    return template


def find_template(
    setting: str, tokenizer: Path | None, eos_token: str, **options: Any
) -> ChatTemplate | None:
    """Load a chat template; None if the tokenizer has none.

    Args:
        setting: `data.chat_template`: "roles", the path of a file, or "" for the template of the
            tokenizer.
        tokenizer: path of the tokenizer, or of its directory; None: it has no file.
        eos_token: name of the tokenizer's end-of-document token.
        **options: options `is_repeatable` and `processes` of `ChatTemplate`.

    Raises:
        ValueError: The template cannot be read.
    """
    directory = _directory_of(tokenizer)
    config: Mapping[str, Any] = {}
    tokens = {"eos_token": eos_token}
    if directory is not None:
        settings = read_settings(directory, within=directory)
        config = settings.options
        tokens |= {f"{use}_token": token.content for use, token in settings.named.items()}
    texts, source = _texts_of(setting, directory, config)
    text = texts.get("default")
    if text is None:
        return None
    for_tools = texts.get("tool_use")
    return ChatTemplate(text, source, tokens, for_tools=for_tools, **options)


def _texts_of(
    setting: str, directory: Path | None, config: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Return templates by their names, "default" and "tool_use", if they exist; and their source.

    Args:
        setting: as for `find_template`.
        directory: directory of the tokenizer; None: it has no file.
        config: content of its tokenizer_config.json.
    """
    if setting == "roles":
        return {"default": ROLES}, "data.chat_template='roles'"
    if setting:
        text = _read(Path(setting).expanduser())
        return {"default": text}, f"data.chat_template={setting!r}"
    if directory is not None and (directory / TEMPLATE_FILE).is_file():
        files = {"default": directory / TEMPLATE_FILE, "tool_use": directory / TOOLS_FILE}
        texts = {name: _read(file) for name, file in files.items() if file.is_file()}
        return texts, str(files["default"])
    templates = config.get("chat_template")
    if not isinstance(templates, list):
        templates = [{"name": "default", "template": templates}]
    named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
    texts = {str(name): text for name, text in named.items() if isinstance(text, str)}
    return texts, f"{directory}/{CONFIG_FILE}"


def _directory_of(tokenizer: Path | None) -> Path | None:
    if tokenizer is None or tokenizer.is_dir():
        return tokenizer
    return tokenizer.parent


def _read(file: Path) -> str:
    try:
        return read_text(file, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ValueError(
            f"data.chat_template: {file} cannot be read ({error.strerror}); correct the path"
        ) from error


def _has_surrogate(text: str) -> bool:
    return without_surrogates(text) != text
