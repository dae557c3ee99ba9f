"""Imports run one way: from launch and benchmarks down to sharding, as the map says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: room -> what its files may import of ours: rooms, or single modules, beside the room itself.
MAY_IMPORT = {
    "sharding": (),
    "data": (),
    "configs": (),
    "checkpoint": ("sharding",),
    "models": ("sharding.logical", "sharding.ops", "sharding.hardware"),
    "convert": ("models", "data", "checkpoint", "sharding"),
    "train": ("convert", "models", "data", "checkpoint", "sharding"),
    "launch": ("train", "convert", "models", "data", "checkpoint", "sharding"),
    "benchmarks": ("train", "convert", "models", "data", "checkpoint", "sharding"),
}
#: Code about ours, which no room imports and which may import all of them.
OUTSIDE = ("docs", "tests")


def imported_modules(source: str, package: str) -> set[str]:
    """Returns the dotted names that a module of `package` imports, wherever in it they stand.

    `from a.b import c` gives both a.b and a.b.c, since c may be a module.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else ()), *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def violations(source: str, package: str) -> list[str]:
    """Returns the imports of ours that a module of `package` must not have."""
    room = package.partition(".")[0]
    allowed = (room, *MAY_IMPORT[room])
    return sorted(
        name
        for name in imported_modules(source, package)
        if name.partition(".")[0] in (*MAY_IMPORT, *OUTSIDE)
        and not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
    )


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files or not (ROOT / room).exists()
    found = {}
    for file in files:
        package = ".".join(file.relative_to(ROOT).parent.parts)
        if bad := violations(file.read_text(encoding="utf-8"), package):
            found[str(file.relative_to(ROOT))] = bad
    assert found == {}


def test_every_room_has_its_rule():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - set(OUTSIDE) <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "source, package, expected",
    [
        ("import train.step", "sharding.pipeline", ["train.step"]),
        ("from sharding.logical import constrain, Rules", "models", []),
        ("from sharding import rules", "models", ["sharding.rules"]),
        ("from sharding import logical", "models", []),
        ("import sharding.logical_extra", "models", ["sharding.logical_extra"]),
        ("def f():\n    from models.gpt2 import GPT2", "checkpoint", ["models.gpt2.GPT2"]),
        ("from ..sharding import mesh", "sharding.pipeline", []),
        ("from . import text\nimport database", "data", []),
        ("import tests.runs", "train", ["tests.runs"]),
    ],
)
def test_violations_finds_what_is_forbidden_and_nothing_else(source, package, expected):
    assert violations(source, package) == expected
