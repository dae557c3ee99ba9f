"""Import rules: between top-level folders, as docs/architecture.md states them, and inside each.

Inside a folder the rule is the same at every level: its modules and subfolders can be sorted so
that each imports only those before it. A subfolder counts as one, so two subfolders never import
each other, and there is no import cycle between modules either.
"""

import ast
import graphlib
import re
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_BELOW_TRAIN = (
    "convert",
    "models",
    "data",
    "checkpoint",
    "predict",
    "pipeline",
    "distributed",
    "sharding",
    "fields",
    "untrusted",
)
#: folder -> the other folders, or single modules of them, that its files may import.
MAY_IMPORT = {
    "fields": (),
    "untrusted": (),
    "sharding": ("fields",),
    "distributed": ("sharding", "fields", "untrusted"),
    "pipeline": ("sharding", "fields", "untrusted"),
    "predict": ("pipeline", "sharding", "untrusted"),
    "data": ("fields", "untrusted"),
    "checkpoint": ("distributed", "fields", "untrusted"),
    "models": (
        "sharding.context_values",
        "sharding.logical",
        "sharding.ops",
        "sharding.hardware",
        "sharding.jaxprs",
        "fields",
        "untrusted",
    ),
    "convert": ("models", "data", "checkpoint", "sharding", "fields", "untrusted"),
    "generate": _BELOW_TRAIN,
    "train": ("generate.generator", "generate.prompts", "generate.sampling", *_BELOW_TRAIN),
    "configs": ("train.config.defaults",),
    "launch": (
        "train.lifecycle.exit_codes",
        "train.lifecycle.stop_signals",
        "distributed",
        "untrusted",
    ),
    "benchmarks": ("train", "generate", *_BELOW_TRAIN),
}
#: Folders that may import all folders, and that no folder may import.
OUTSIDE = ("docs", "tests")


def imported_modules(source: str, package: str) -> set[str]:
    """Return the dotted names that a module of `package` imports, at any place in the module.

    `from a.b import c` gives both a.b and a.b.c, since c may be a module.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else ()), *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def violations(source: str, package: str) -> list[str]:
    """Return the imports of project modules that a module of `package` must not have.

    For `from a import b`, only a.b counts: the folder a contains no code of its own.
    """
    folder = package.partition(".")[0]
    allowed = (folder, *MAY_IMPORT[folder])
    return sorted(
        name
        for name in imported_modules(source, package)
        if name.partition(".")[0] in (*MAY_IMPORT, *OUTSIDE)
        and not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
        and name not in (*MAY_IMPORT, *OUTSIDE)
    )


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files or not (ROOT / folder).exists()
    found = {}
    for file in files:
        package = ".".join(file.relative_to(ROOT).parent.parts)
        if bad := violations(file.read_text(encoding="utf-8"), package):
            found[str(file.relative_to(ROOT))] = bad
    assert found == {}


def test_page_on_the_architecture_names_the_same_imports():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    stated = {}
    for folder, imports in re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", page, re.M):
        if folder in MAY_IMPORT:
            names = set(re.findall(r"`([\w.]+)`", imports.replace("all below `train`", "")))
            stated[folder] = names | set(_BELOW_TRAIN if "all below" in imports else ())
    assert stated == {folder: set(names) for folder, names in MAY_IMPORT.items()}


def imports_between_siblings(imports: Mapping[str, Set[str]]) -> dict[str, dict[str, set[str]]]:
    """Group imports by the deepest folder that contains both the importer and the imported module.

    Args:
        imports: module -> the modules that it imports, as dotted names.

    Returns:
        Folder (dotted, "" for the root) -> child -> the siblings that the child imports.
    """
    levels: dict[str, dict[str, set[str]]] = {}
    for importer, targets in imports.items():
        for target in targets:
            mine = importer.split(".")
            theirs = target.split(".")
            pairs = enumerate(zip(mine, theirs, strict=False))
            fork = next((i for i, (a, b) in pairs if a != b), None)
            if fork is not None:
                siblings = levels.setdefault(".".join(mine[:fork]), {})
                siblings.setdefault(mine[fork], set()).add(theirs[fork])
    return levels


def project_imports() -> dict[str, set[str]]:
    """Return module -> the project modules that it imports, for all folders."""
    files = [file for folder in MAY_IMPORT for file in (ROOT / folder).rglob("*.py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    imports = {}
    for name, file in modules.items():
        found = imported_modules(file.read_text(encoding="utf-8"), name.rpartition(".")[0])
        imports[name] = {other for other in found if other in modules}
    return imports


def test_no_folder_has_an_import_cycle_among_its_modules_and_subfolders():
    cycles = {}
    for folder, siblings in imports_between_siblings(project_imports()).items():
        try:
            graphlib.TopologicalSorter(siblings).prepare()
        except graphlib.CycleError as error:
            cycles[folder] = error.args[1]
    assert cycles == {}


def test_imports_between_siblings_sees_cycles_through_subfolders():
    imports = {"a.b.x": {"a.c.y"}, "a.c.z": {"a.b.w"}, "a.b.w": {"a.b.x"}}
    assert imports_between_siblings(imports) == {
        "a": {"b": {"c"}, "c": {"b"}},
        "a.b": {"w": {"x"}},
    }


def test_imported_modules_sees_both_the_module_and_its_names():
    """A cycle of `from a.b import c` goes through a.b."""
    assert imported_modules("from a.b import c", "a") == {"a.b", "a.b.c"}
    assert imported_modules("from . import c\nimport a.d", "a") == {"a", "a.c", "a.d"}


def test_every_module_that_is_imported_is_seen():
    """Without the modules of `from module import name`, there would be almost no imports."""
    imports = project_imports()
    assert "train.config.train_config" in imports["train.config.schema"]


def test_every_top_level_folder_has_a_rule():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - set(OUTSIDE) <= set(MAY_IMPORT)


def test_every_folder_that_another_imports_is_installed_and_its_types_are_checked():
    with open(ROOT / "pyproject.toml", "rb") as file:
        tools = tomllib.load(file)["tool"]
    installed = {
        name.removesuffix("*") for name in tools["setuptools"]["packages"]["find"]["include"]
    }
    assert installed == set(MAY_IMPORT) - {"benchmarks"}
    assert set(tools["basedpyright"]["include"]) == {*MAY_IMPORT, "taibai.py", "tests"} - {
        "configs"
    }


@pytest.mark.parametrize(
    "source, package, expected",
    [
        ("import train.loop", "pipeline", ["train.loop"]),
        ("from sharding.logical import constrain, Rules", "models", []),
        ("from sharding import rules", "models", ["sharding.rules"]),
        ("from sharding import logical", "models", []),
        ("import sharding.logical_extra", "models", ["sharding.logical_extra"]),
        (
            "def f():\n    from models.text.gpt2 import GPT2",
            "checkpoint",
            ["models.text.gpt2", "models.text.gpt2.GPT2"],
        ),
        ("from ..sharding import mesh", "pipeline", []),
        ("from . import text\nimport database", "data", []),
        ("import tests.runs", "train", ["tests.runs"]),
    ],
)
def test_violations_finds_exactly_the_forbidden_imports(source, package, expected):
    assert violations(source, package) == expected
