"""Writes docs/commands.md from the commands' own parsers: `python -m docs.command_reference`.

A parser is made when its command runs. The command is therefore called, up to the place where the
parser would read the arguments.
"""

import argparse
import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import taibai

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"

_INTRODUCTION = """\
# Commands

Here you can look up every option of every command. `python -m docs.command_reference` writes this
page from the commands' parsers; do not edit it.

`taibai train …` is the same as `python -m train.main …`, and works in any folder. With `--help`, a
command prints the same options as this page. A command whose arguments are wrong ends with one
sentence and exit code 2. [many_hosts.md](many_hosts.md#exit-codes) lists the exit codes of a run.
`train`, `plan` and `compile` also accept every [config key](config.md), such as
`--config.train.seed=1`.
"""


class _ParserMade(Exception):
    """A command has made its parser, which is the argument."""


def commands() -> dict[str, str]:
    """Return name -> module of every command, such as "convert to_hf"."""
    modules = {}
    for name, module in taibai.COMMANDS.items():
        if module:
            modules[name] = module
        else:
            modules |= {f"{name} {word}": target for word, target in taibai.CONVERSIONS.items()}
    return modules


def parser_of(name: str, module: str) -> argparse.ArgumentParser:
    """Return the parser that a command makes.

    Args:
        name: name of the command after `taibai`, which the parser shows.
        module: its module, or its package.
    """

    def raise_parser(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _ParserMade(parser)

    main = importlib.import_module(_file_module(module)).main
    with (
        mock.patch.object(sys, "argv", [f"taibai {name}"]),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", raise_parser),
    ):
        try:
            main([])
        except _ParserMade as made:
            return made.args[0]
    raise AssertionError(f"{module} has not made a parser")


def page() -> str:
    """Return docs/commands.md."""
    parts = [_INTRODUCTION]
    for name, module in commands().items():
        parts.append(f"## taibai {name}\n")
        parts += _description(module)
        parser = parser_of(name, module)
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
        usage = usage if "..." in usage and "[-h]" not in usage else ""
        parts += [f"`{usage}`\n"] if usage else []
        subparsers = [*_subparsers(parser)]
        if not subparsers:
            parts += _table(parser)
        for word, subparser in subparsers:
            about = (subparser.description or "").rstrip(".")
            parts.append(f"`taibai {name} {word}`" + (f": {about}\n" if about else "\n"))
            parts += _table(subparser)
    return "\n".join(parts)


def _description(module: str) -> Iterator[str]:
    """Yield the first sentence about a command, and the page that explains it."""
    spec = importlib.util.find_spec(_file_module(module))
    assert spec is not None and spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    yield re.sub(r":[^:]*`python -m [^`]*`\.$", ".", first) + "\n"
    if guide := re.search(r"docs/(\w+\.md)", text):
        yield f"More: [{guide[1]}]({guide[1]}).\n"


def _file_module(module: str) -> str:
    """Return the module that runs for `python -m MODULE`."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    return f"{module}.__main__" if spec.submodule_search_locations else module


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _table(parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments of a command as a table in Markdown."""
    rows = [_row(action) for action in parser._actions if action.dest != "help"]
    if not rows:
        return []
    return ["| argument | default | meaning |\n|---|---|---|", "\n".join(rows) + "\n"]


def _row(action: argparse.Action) -> str:
    name = action.option_strings[-1] if action.option_strings else ""
    metavar = action.metavar or action.dest.upper()
    if action.nargs == 0:
        shown = name
    elif name:
        shown = f"{name}={{{','.join(action.choices)}}}" if action.choices else f"{name}={metavar}"
    else:
        shown = f"{metavar}" + (" …" if action.nargs in ("*", "+") else "")
    default = action.default
    is_given = action.nargs != 0 and default not in (None, argparse.SUPPRESS, "", [], ())
    cells = (
        f"`{shown}`",
        f"`{default}`" if is_given else "required" if action.required else "",
        action.help or "",
    )
    escaped = [cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells]
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
