"""Counts constructions that read like a literal translation: `python -m tests.prose [PATH ...]`.

Plain technical English has few of them (good projects have 2 to 6 in 10,000 words): noun clauses
instead of a noun ("what lies in host memory"), "that of" and "those of", "beside", "lies in", and
sentences that open with "Of", "Where" or "Beside". The command lists each of them with its file.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Largest number of constructions in 10,000 words.
LIMIT = 5

_CONSTRUCTIONS = re.compile(
    r"\bwhat (?!if\b|to\b|kind\b|happen)\w+"
    r"|\b(?:that|those) of\b"
    r"|\bbesides?\b"
    r"|\b(?:lie|lies|lay|lying) (?:in|on|at|within|there|between|by|inside|outside|where|side)\b"
    r"|(?:^|(?<=[.!?] ))(?:of|where|beside) ",
    re.IGNORECASE,
)
_FENCED_CODE = re.compile(r"```.*?```", re.DOTALL)
_WORD = re.compile(r"[A-Za-z']+")


def files_of(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files of these paths that belong to the project."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            relative = file.relative_to(ROOT)
            hidden = any(part.startswith(".") for part in relative.parts)
            is_chinese = relative.parts[:2] == ("docs", "zh")  # its few English words are code
            if file.suffix in (".py", ".md") and not hidden and not is_chinese:
                if file.name != Path(__file__).name:
                    yield file


def texts_of(file: Path) -> list[str]:
    """Return the docstrings and comments of a module, or the prose of a Markdown file."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        paragraphs = _FENCED_CODE.sub("", source).split("\n\n")
        return [" ".join(paragraph.split()) for paragraph in paragraphs]
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts += (ast.get_docstring(node) or "").split("\n\n")
    last_line = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment = token.string.lstrip("#: ")
            if last_line == token.start[0] - 1:
                texts[-1] += " " + comment
            else:
                texts.append(comment)
            last_line = token.start[0]
    return [" ".join(text.split()) for text in texts]


def constructions_in(text: str) -> list[str]:
    """Return each construction in a text, with some words on both sides."""
    return [
        text[max(0, match.start() - 30) : match.end() + 30]
        for match in _CONSTRUCTIONS.finditer(text)
    ]


def main(argv: list[str] | None = None) -> int:
    """Print every construction found, and the rate; return 1 if it is above LIMIT."""
    parser = argparse.ArgumentParser(prog="python -m tests.prose")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT])
    args = parser.parse_args(argv)
    num_words = 0
    num_found = 0
    for file in files_of([path.absolute() for path in args.paths]):
        for text in texts_of(file):
            num_words += len(_WORD.findall(text))
            for found in constructions_in(text):
                num_found += 1
                print(f"{file.relative_to(ROOT)}: … {found} …")
    rate = 10_000 * num_found / max(num_words, 1)
    print(f"{num_found} in {num_words:,} words: {rate:.1f} in 10,000 (limit {LIMIT})")
    return int(rate > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
