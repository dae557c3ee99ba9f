"""Prints the reference of all config keys: docs/config.md and the text of `--help`.

`python -m train.config.reference` prints the page, and `--docs` writes it to docs/config.md. Both
texts come from the declared fields of RunConfig and of its sections.
"""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fields.field import Declaration, declarations, join_values
from train.config.schema import SECTIONS, RunConfig
from untrusted.commands import command_parser, run_command

PAGE = Path(__file__).parents[2] / "docs" / "config.md"

_INTRODUCTION = """\
# Config keys

Here you can look up every config key, with its values and its default. `python -m
train.config.reference --docs` writes this page from the dataclasses that declare the keys; do not
edit it.

A config file starts from the defaults on this page (`get_config()` of `configs/common.py`) and
changes the keys that it needs. You can set any key on the command line:
`--config.section.key=value`. A tuple is written with commas, as in `--config.images.blur=1.0,0.1`.
Unless its row states another bound, an integer is at most 2**31 - 1, and a float is finite and at
most 3.4e38. An invalid value is rejected before the run starts; `--check` ends a run there, so that
you can try a config. Keys of earlier versions are translated, and a warning says what to write
instead.
"""
_WIDTH = 100  # columns of the text of --help


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of the config, as the reference shows it."""

    name: str  # as on the command line: "train.seed"
    declaration: Declaration
    annotation: Any  # type of the field

    @property
    def default(self) -> str:
        """The default as it is written on the command line."""
        value = self.declaration.default
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return "" if value == {} else str(value)

    @property
    def values(self) -> str:
        """Type and rule in Markdown: "int, at least 1, or -1", or the choices."""
        declaration = self.declaration
        if declaration.choices:
            shown = [f"`{choice}`" for choice in declaration.choices]
            return join_values([*shown, *(["None"] if declaration.is_optional else [])])
        kind = _kind(self.annotation)
        rule = declaration.rule
        if declaration.length is not None or declaration.nonempty:
            return rule.removeprefix("a ")
        if declaration.is_optional and not rule:
            return f"{kind} or None"
        return f"{kind}, {rule}" if rule else kind


def keys_of(section: type, prefix: str = "") -> list[Key]:
    """Return the keys that a dataclass declares.

    Args:
        section: section, or RunConfig for the keys outside all sections.
        prefix: start of the keys' names, such as "train.".
    """
    annotations = {each.name: each.type for each in dataclasses.fields(section)}
    return [
        Key(name=prefix + name, declaration=declaration, annotation=annotations[name])
        for name, declaration in declarations(section).items()
    ]


def groups() -> Iterator[tuple[str, str, list[Key]]]:
    """Yield (title, introduction, keys) of each section, and of each key outside all sections.

    They come in the order of RunConfig's fields.
    """
    outside = {key.name: key for key in keys_of(RunConfig)}
    for each in dataclasses.fields(RunConfig):
        if each.name in SECTIONS:
            section = SECTIONS[each.name]
            text = inspect.cleandoc(section.__doc__ or "")
            yield each.name, text, keys_of(section, f"{each.name}.")
        elif each.name in outside:
            yield each.name, "", [outside[each.name]]


def page() -> str:
    """Return docs/config.md."""
    parts = [_INTRODUCTION]
    for title, introduction, keys in groups():
        rows = [
            f"| `{key.name}` | {_cell(key.values)} | {_default_cell(key)} "
            f"| {_cell(_link_pages(key.declaration.doc))} |"
            for key in keys
        ]
        parts.append(f"## {title}\n")
        if introduction:
            parts.append(f"{_link_pages(introduction)}\n")
        parts.append("| key | values | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def help_text() -> str:
    """Return every key with its default and the first sentence of its meaning, for `--help`."""
    lines = ["config keys (docs/config.md describes them in full):"]
    for title, introduction, keys in groups():
        summary = introduction.partition("\n\n")[0]
        lines.append("")
        lines.append(f"{title}: {summary}" if summary else title)
        for key in keys:
            flag = f"  --config.{key.name}"
            lines.append(
                flag + (".KEY=VALUE" if key.declaration.default == {} else f"={key.default}")
            )
            lines.append(
                textwrap.indent(textwrap.fill(key.declaration.summary, _WIDTH - 6), " " * 6)
            )
    return "\n".join(lines)


def _kind(annotation: Any) -> str:
    """Return the name of a field's type, without None."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else [annotation]
    names = [kind.__name__ for kind in kinds if kind is not types.NoneType]
    name = str(names[0])
    return {"bool": "True or False", "Mapping": "rows"}.get(name, name)


def _default_cell(key: Key) -> str:
    return f"`{key.default}`" if key.default else "empty"


def _cell(text: str) -> str:
    """Escape characters that would end a cell of a Markdown table."""
    return text.replace("|", r"\|")


def _link_pages(text: str) -> str:
    """Turn names of pages, such as docs/meshes.md, into links from a page in docs/."""
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = command_parser("train.config.reference")
    parser.add_argument("--docs", action="store_true", help="write docs/config.md")
    if parser.parse_args(argv).docs:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    run_command(main)
