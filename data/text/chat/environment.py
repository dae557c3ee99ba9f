"""The environment of chat templates, which is as in `transformers`: tags, filters and functions.

`{% generation %}…{% endgeneration %}` is around the text of the assistant. Marks, which the caller
chooses, are put there when the template runs. If the text must be repeatable, there is neither a
clock nor chance.

Source: transformers/utils/chat_template_utils.py.
"""

import datetime
import functools
import json
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

#: Functions and filters whose results differ between runs.
NOT_REPEATABLE = ("lipsum", "random", "strftime_now")


class Marks(NamedTuple):
    """Texts that stand around the text of the assistant."""

    begin: str = ""
    end: str = ""


NO_MARKS = Marks()


class Generation(jinja2.ext.Extension):
    """Marks the text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}
    marks = NO_MARKS  # only one template runs at a time
    is_used = False

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Parse the tag, for Jinja."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{Generation.marks.begin}{caller()}{Generation.marks.end}"


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that Python gives a meaning, such as `__class__`."""

    def __init__(*args: Any, **values: Any):
        self, *positional = args
        values = dict(*positional, **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The function `dict`, without the type's other attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@functools.lru_cache(maxsize=4)
def compile_template(text: str, is_repeatable: bool) -> jinja2.Template:
    """Compile a template.

    Args:
        is_repeatable: whether its text must be the same in every run.

    Raises:
        Exception: It is not a Jinja template; nested too deeply, it may be any error of Python.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    functions = {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _raise,
        "strftime_now": _now,
    }
    environment.globals.update(functions)
    if is_repeatable:
        for name in NOT_REPEATABLE:
            environment.globals.pop(name, None)
            environment.filters.pop(name, None)
    return environment.from_string(text)


def has_marks(template: jinja2.Template) -> bool:
    """Return whether a template has the tag `{% generation %}`."""
    extension = template.environment.extensions[Generation.identifier]
    return isinstance(extension, Generation) and extension.is_used


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the name {name!r}")


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
