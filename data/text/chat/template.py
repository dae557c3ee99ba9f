"""Chat templates: Jinja programs that turn messages into one text, as in `transformers`.

A template comes with a tokenizer, as `chat_template.jinja` or in tokenizer_config.json. It runs in
Jinja's sandbox, which has neither files nor imports. In training it has no clock either, because a
model must not depend on the day of its training.

The text of the assistant is what the model learns. A template can mark it with
`{% generation %}…{% endgeneration %}`. For others, it is what a message adds to the text of the
messages before it, after the prompt for an answer.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from untrusted.documents import read_json
from untrusted.files import read_text
from untrusted.messages import shortened

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
#: Stand around the text of the assistant in a rendered text, until `spans` removes them.
_BEGIN = "\0generation:begin\0"
_END = "\0generation:end\0"

TEMPLATE_FILE = "chat_template.jinja"
#: The directory of other templates of a tokenizer, and the one for conversations with tools.
TEMPLATES = "additional_chat_templates"
TOOLS_FILE = f"{TEMPLATES}/tool_use.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_MAX_BYTES = 2**20
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")

#: Errors of a template that runs: wrong types and keys, and endless calls.
_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

#: Names of the reasoning before an answer, in messages and in templates.
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
#: First character and end of a part of a text.
Span = tuple[int, int]


class _Generation(jinja2.ext.Extension):
    """Marks the text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """A chat template.

    Args:
        text: The template.
        source: Its file or config key, for error messages.
        tokens: Names of special tokens that it may use, such as {"bos_token": "<s>"}.
        for_tools: The template of conversations with tools; None: `text` is.
        has_clock: Whether it may ask for the date and the time with `strftime_now`.

    Attributes:
        files: Name of a file of a tokenizer -> the template in it.

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
        has_clock: bool = False,
    ):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _raise
        if has_clock:
            environment.globals["strftime_now"] = _now
        self.files = {TEMPLATE_FILE: text}
        if for_tools is not None:
            self.files[TOOLS_FILE] = for_tools
        self._source = source
        self._tokens = tokens
        try:
            self._template = environment.from_string(text)
            self._for_tools = environment.from_string(for_tools or text)
        except jinja2.TemplateError as error:
            raise ValueError(f"{source} is not a chat template ({shortened(error)})") from None

    @property
    def key(self) -> str:
        """A string that changes whenever the texts may change."""
        return repr((sorted(self.files.items()), sorted(self._tokens.items())))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of messages.

        Args:
            messages: The messages, each with `role` and `content`.
            add_generation_prompt: Whether the text ends with the beginning of an answer.

        Raises:
            ValueError: The template refuses the messages.
        """
        rendered = self._rendered(messages, add_generation_prompt=add_generation_prompt)
        return rendered.replace(_BEGIN, "").replace(_END, "")

    def spans(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the parts of it that the assistant says.

        Args:
            messages: The messages, each with `role` and `content`.
            tools: Descriptions of functions that the assistant may call.

        Raises:
            ValueError: The template refuses the messages; or it has no tags, and renders earlier
                messages differently when others follow, or the assistant begins.
        """
        rendered = self._rendered(messages, tools)
        if _BEGIN in rendered:
            return _unmarked(rendered)
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise self._not_clear("renders no prompt before message 0, which is an answer")
            prompt = self._rendered(messages[:number], tools, add_generation_prompt=True)
            until = self._rendered(messages[: number + 1], tools)
            if not (rendered.startswith(until) and until.startswith(prompt)):
                raise self._not_clear(f"renders message {number} differently when others follow")
            found.append((len(prompt), len(until)))
        return rendered, found

    def _not_clear(self, problem: str) -> ValueError:
        return ValueError(
            f"{self._source} {problem}, so the text of the assistant is not clear; put "
            "{% generation %} and {% endgeneration %} around it in a copy of the template, and set "
            "data.chat_template to its path"
        )

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return (self._for_tools if tools else self._template).render(
                messages=[_normalized(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except _ERRORS as error:
            problem = f"{self._source} refuses messages: {shortened(error)}"
            if isinstance(error, jinja2.UndefinedError) and "strftime_now" in str(error):
                problem += (
                    "; training must not depend on the date, so write a date into a copy of the "
                    "template, and set data.chat_template to its path"
                )
            raise ValueError(problem) from None


def load_template(setting: str, tokenizer: Path | None, eos_token: str) -> ChatTemplate:
    """Load a chat template; takes the same arguments as `find_template`.

    Raises:
        ValueError: There is no template, or it cannot be read.
    """
    found = find_template(setting, tokenizer, eos_token)
    if found is None:
        where = f" in {_directory_of(tokenizer)}" if tokenizer else ""
        raise ValueError(
            f"this data.objective needs a chat template, but data.tokenizer has none{where}; set "
            "data.chat_template to the path of a Jinja file, or to 'roles'"
        )
    return found


def find_template(
    setting: str, tokenizer: Path | None, eos_token: str, *, has_clock: bool = False
) -> ChatTemplate | None:
    """Load a chat template if there is one.

    Args:
        setting: `data.chat_template`: "roles", the path of a file, or "" for the template of the
            tokenizer.
        tokenizer: The path of the tokenizer, or of its directory; None: it has no file.
        eos_token: The name of the tokenizer's end-of-document token.
        has_clock: As for `ChatTemplate`.

    Returns:
        The template; None if the tokenizer has none.

    Raises:
        ValueError: The template cannot be read.
    """
    directory = _directory_of(tokenizer)
    config: dict[str, Any] = {}
    if directory is not None and (directory / _CONFIG_FILE).is_file():
        config = read_json(directory / _CONFIG_FILE, within=directory)
    tokens = {"eos_token": eos_token} | {
        name: token for name in _TOKENS if (token := _token(config.get(name))) is not None
    }
    texts, source = _texts_of(setting, directory, config)
    text = texts.get("default")
    if text is None:
        return None
    for_tools = texts.get("tool_use")
    return ChatTemplate(text, source, tokens, for_tools=for_tools, has_clock=has_clock)


def _texts_of(
    setting: str, directory: Path | None, config: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Return templates by their names, "default" and "tool_use", if they exist; and their source.

    Args:
        setting: As for `find_template`.
        directory: The directory of the tokenizer; None: it has no file.
        config: The content of its tokenizer_config.json.
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
    given = config.get("chat_template")
    if not isinstance(given, list):
        given = [{"name": "default", "template": given}]
    named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    texts = {str(name): text for name, text in named.items() if isinstance(text, str)}
    return texts, f"{directory}/{_CONFIG_FILE}"


def _normalized(message: Message) -> Message:
    """Return a message as templates expect it, which is as `transformers` gives it to them.

    Fields that are null are left out, since templates render them or ask whether they exist. The
    reasoning before an answer has all names that templates have for it.
    """
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _directory_of(tokenizer: Path | None) -> Path | None:
    if tokenizer is None or tokenizer.is_dir():
        return tokenizer
    return tokenizer.parent


def _unmarked(rendered: str) -> tuple[str, list[Span]]:
    """Remove the marks of `{% generation %}` from a text; return it and the parts within them."""
    first, *marked = rendered.split(_BEGIN)
    text = first
    found = []
    for part in marked:
        inside, _, outside = part.partition(_END)
        found.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, found


def _token(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read(file: Path) -> str:
    try:
        return read_text(file, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ValueError(
            f"data.chat_template: {file} cannot be read ({error.strerror}); correct the path"
        ) from error


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    """Return the local time in a format of `strftime`."""
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
