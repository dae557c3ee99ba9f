"""Draws the map in docs/architecture.md from the imports: `python -m docs.draw_architecture`.

Every top-level folder is a box with its subfolders, in a row above everything that it imports. Its
last line names the folders that it imports, without those that follow: if a imports b and b imports
c, the box of a does not name c. A test keeps the picture up to date.
"""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
FOLDERS = (
    "launch",
    "benchmarks",
    "train",
    "generate",
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

_WIDTH = 960
_LINE = 18  # pixels per line of text
_GAP = 20  # pixels between boxes


def imported_folders(folder: str) -> set[str]:
    """Return the other folders that the modules of a folder import."""
    packages = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
    return packages & set(FOLDERS) - {folder}


def without_implied(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return an acyclic graph without the edges that longer paths imply."""
    reachable: dict[str, set[str]] = {}
    for folder in graphlib.TopologicalSorter(imports).static_order():
        below = imports[folder]
        reachable[folder] = below.union(*(reachable[other] for other in below))
    return {
        folder: {b for b in below if not any(b in reachable[other] for other in below)}
        for folder, below in imports.items()
    }


def rows_of(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the folders in rows, each below everything that imports it."""
    row_of = dict.fromkeys(imports, 0)
    for folder in reversed([*graphlib.TopologicalSorter(imports).static_order()]):
        for other in imports[folder]:
            row_of[other] = max(row_of[other], row_of[folder] + 1)
    return [[f for f in imports if row_of[f] == row] for row in sorted({*row_of.values()})]


def subfolders_of(folder: str) -> list[str]:
    """Return the subfolders of a folder that hold modules, such as "pipeline/runtime"."""
    paths = {file.parent for file in (ROOT / folder).rglob("*.py")} - {ROOT / folder}
    names = sorted(path.relative_to(ROOT / folder).as_posix() for path in paths)
    return [name for name in names if (ROOT / folder / name / "__init__.py").exists()]


def box(folder: str, imported: set[str], x: int, y: int, width: int, height: int) -> str:
    """Return one folder as SVG, in pixels: its name, its subfolders and what it imports."""
    lines = [("name", f"{folder}/"), *(("subfolder", f"{name}/") for name in subfolders_of(folder))]
    lines += [("imports", f"→ {name}") for name in sorted(imported)]
    texts = [
        f'<text x="{x + (22 if kind == "subfolder" else 10)}" y="{y + _LINE * (i + 1)}" '
        f'class="{kind}">{text}</text>'
        for i, (kind, text) in enumerate(lines)
    ]
    rectangle = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="box"/>'
    return "\n".join([rectangle, *texts])


def draw() -> str:
    """Return the picture as SVG."""
    imports = {folder: imported_folders(folder) for folder in FOLDERS}
    shown = without_implied(imports)
    parts = []
    top = _GAP
    for row in rows_of(imports):
        lines = max(1 + len(subfolders_of(folder)) + len(shown[folder]) for folder in row)
        height = _LINE * lines + _LINE // 2
        width = min(220, (_WIDTH - _GAP) // len(row) - _GAP)
        start = (_WIDTH - len(row) * (width + _GAP) + _GAP) // 2
        for i, folder in enumerate(row):
            parts.append(box(folder, shown[folder], start + i * (width + _GAP), top, width, height))
        top += height + _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" '
            f'viewBox="0 0 {_WIDTH} {top}">',
            "<style>",
            "svg { background: white; font: 13px sans-serif; }",
            ".box { fill: #eef3fb; stroke: #4a6fa5; }",
            ".name { font-weight: bold; }",
            ".subfolder { fill: #444; }",
            ".imports { fill: #4a6fa5; }",
            "</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
