"""Finds lines about arguments in docstrings that break the style: `violations_in`."""

import ast
import re
from collections.abc import Iterator

#: Words that add nothing to the name of an argument.
_EMPTY = frozenset("the a an of its this that it to be in for as and run run's is are".split())
_ARTICLE = re.compile(r"(The|the|A|a|An|an) (?!same|few|little|other|only|more|most|former|latter)")
#: Capitalized words that may begin a description.
_PROPER = frozenset(["False", "Hugging", "None", "Taibai's", "Transformer", "True"])


def violations_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, rule) for every line about an argument or attribute that breaks a rule."""
    for line, name, text, is_whole in _argument_lines(source):
        first = re.match(r"[A-Z][a-z']+\b", text)
        if _ARTICLE.match(text) or (first and first[0] not in _PROPER):
            yield line, f"{name}: begin in lower case, without an article"
        is_plain = is_whole and re.fullmatch(r"[A-Za-z' ]+\.", text)
        if is_plain and not {*map(_stem, _words(text))} - {*map(_stem, name.split("_"))}:
            yield line, f"{name}: repeats its name; say more, or remove the line"


def _argument_lines(source: str) -> Iterator[tuple[int, str, str, bool]]:
    """Yield (line, name, first line of the description, whether there are no further lines)."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is None:
            continue
        text = node.body[0]
        indent = " " * text.col_offset
        is_inside = False
        assert text.end_lineno is not None
        for number in range(text.lineno, text.end_lineno):
            line = lines[number]
            if line.startswith(indent) and line[len(indent) : len(indent) + 1].strip():
                is_inside = line.strip() in ("Args:", "Attributes:")
            match = re.match(rf"{indent}    ([\w*]+): (.*)$", line)
            if is_inside and match:
                is_whole = not lines[number + 1].startswith(f"{indent}        ")
                yield number + 1, match[1].strip("*"), match[2], is_whole


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[A-Za-z']+", text.lower()) if word not in _EMPTY}


def _stem(word: str) -> str:
    return word.removesuffix("s") if len(word) > 3 else word
