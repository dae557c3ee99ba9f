"""Reports large files and folders, for judgement: `python -m tests.sizes`.

Size is a hint that a file has two subjects. It is no reason to cut one subject in two.
"""

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

from tests import prose

ROOT = Path(__file__).parents[1]
_USUAL_MODULES = 14  # per folder, not counting __init__.py
_USUAL_LINES = 350  # per file
MAX_FUNCTION_LINES = 60
#: Tables of settings, one file per model, may be long.
_TABLES = "configs"


def modules() -> Iterator[tuple[Path, str]]:
    """Yield (path, source) of every Python file, without the tables of settings."""
    for file in prose.files_of([ROOT]):
        path = file.relative_to(ROOT)
        if path.suffix == ".py" and path.parts[0] != _TABLES:
            yield path, file.read_text(encoding="utf-8")


def large_functions() -> list[str]:
    """Return the functions with more than MAX_FUNCTION_LINES lines, which a test refuses."""
    large = []
    for path, source in modules():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                    large.append(f"{path}: {node.name} has more than {MAX_FUNCTION_LINES} lines")
    return large


def main() -> None:
    """Print the files and folders that are larger than usual."""
    num_modules = collections.Counter()
    for path, source in modules():
        num_modules[path.parent] += path.name != "__init__.py"
        num_lines = source.count("\n")
        if num_lines > _USUAL_LINES:
            print(f"{path} has {num_lines} lines, more than {_USUAL_LINES}")
    for folder, count in sorted(num_modules.items()):
        if count > _USUAL_MODULES:
            print(f"{folder}/ has {count} modules, more than {_USUAL_MODULES}")


if __name__ == "__main__":
    main()
