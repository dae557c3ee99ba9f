"""Habits of the code that no linter checks: assignments, literals, sizes, first lines, English."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import docstrings, prose
from tests.sizes import large_functions, modules

ROOT = Path(__file__).parents[1]


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, rule) for every construct in a module that the project avoids."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)):
                if any(isinstance(each, ast.Call) for value in values for each in ast.walk(value)):
                    yield node.lineno, "assigns several calls at once; use one line for each"
            case ast.Assign(value=ast.Lambda()) | ast.AnnAssign(value=ast.Lambda()):
                yield node.lineno, "names a lambda; use def"
            case ast.Starred(value=ast.Tuple() | ast.List()):
                yield node.lineno, "unpacks a literal into a literal; write its elements"


@pytest.mark.parametrize(
    "source, num_found",
    [
        ("a, b = f(), g()", 1),
        ("a, b = x, -f(y)[0]", 1),
        ("a, b = b, a", 0),
        ("a, b = f()", 0),
        ("f = lambda x: x", 1),
        ("f: object = lambda: 0", 1),
        ("x = sorted(y, key=lambda z: z)", 0),
        ("x = [*(1, 2), 3]", 1),
        ("f(*[1, 2])", 1),
        ("x = [*y, *f()]", 0),
    ],
)
def test_violations_are_found(source, num_found):
    assert len([*violations(source)]) == num_found


@pytest.mark.thorough
def test_code_has_no_violations():
    found = []
    for file in prose.files_of([ROOT]):
        if file.suffix == ".py":
            source = file.read_text(encoding="utf-8")
            found += [
                f"{file.relative_to(ROOT)}:{line} {rule}" for line, rule in violations(source)
            ]
    assert found == []


@pytest.mark.thorough
def test_functions_are_small():
    assert large_functions() == []


@pytest.mark.parametrize(
    "text, num_found",
    [
        ("config: the run's config.", 2),
        ("config: run's config.", 1),
        ("config: config section `data`.", 0),
        ("steps: Number of steps.", 1),
        ("steps: number of steps.", 0),
        ("steps: the same as before.", 0),
        ("steps: steps.\n            None: all of them.", 0),
    ],
)
def test_docstring_violations_are_found(text, num_found):
    source = f'def f():\n    """Do it.\n\n    Args:\n        {text}\n    """'
    assert len([*docstrings.violations_in(source)]) == num_found


@pytest.mark.thorough
def test_lines_about_arguments_follow_the_style():
    broken_rules = [
        f"{path}:{line} {rule}"
        for path, source in modules()
        for line, rule in docstrings.violations_in(source)
    ]
    assert broken_rules == []


@pytest.mark.thorough
def test_first_line_of_every_file_states_its_purpose():
    bare = [
        str(path)
        for path, source in modules()
        if source and not ast.get_docstring(ast.parse(source))
    ]
    assert bare == []


@pytest.mark.parametrize(
    "text, num_found",
    [
        ("Where the stages share it, nothing is kept.", 1),
        ("It moves what lies in host memory.", 1),
        ("The mean is that of the first stage. Of these, one remains.", 2),
        ("It runs if the mesh has one device, and says what to do.", 0),
    ],
)
def test_prose_finds_literal_translations(text, num_found):
    assert len(prose.constructions_in(text)) == num_found


@pytest.mark.thorough
def test_prose_reads_like_english(capsys):
    assert prose.main([]) == 0, capsys.readouterr().out
