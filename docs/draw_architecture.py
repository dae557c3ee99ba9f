"""Draws the map in docs/architecture.md from the imports: `python -m docs.draw_architecture`.

Every top-level folder is a box with its subfolders, and every arrow is an import. Implied arrows
are omitted: if a imports b and b imports c, no arrow is drawn from a to c. A test keeps the picture
up to date.
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
    "sharding",
    "metrics",
    "fields",
    "untrusted",
)

_WIDTH = 960
_LINE = 18  # pixels per line of text
_GAP = 40  # pixels between rows, for the arrows


def imported_folders(folder: str) -> set[str]:
    """Return the other folders that the modules of a folder import."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
    return found & set(FOLDERS) - {folder}


def reduced(imports: dict[str, set[str]]) -> dict[str, set[str]]:
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


def draw() -> str:
    """Return the picture as SVG."""
    imports = {folder: imported_folders(folder) for folder in FOLDERS}
    boxes: dict[str, tuple[int, int, int, int]] = {}  # folder -> left, top, width, height
    top = 10
    for row in rows_of(imports):
        height = max(_LINE * (2 + len(subfolders_of(folder))) for folder in row)
        width = min(220, (_WIDTH - 20) // len(row) - 20)
        start = (_WIDTH - len(row) * (width + 20) + 20) // 2
        for i, folder in enumerate(row):
            boxes[folder] = (start + i * (width + 20), top, width, height)
        top += height + _GAP
    parts = []
    for folder, (x, y, width, height) in boxes.items():
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="box"/>'
        )
        parts.append(f'<text x="{x + 10}" y="{y + _LINE}" class="name">{folder}/</text>')
        for i, name in enumerate(subfolders_of(folder)):
            line = y + _LINE * (i + 2)
            parts.append(f'<text x="{x + 22}" y="{line}" class="subfolder">{name}/</text>')
    for folder, below in reduced(imports).items():
        x, y, width, height = boxes[folder]
        for other in sorted(below):
            to_x, to_y, to_width, _ = boxes[other]
            parts.append(
                f'<line x1="{x + width // 2}" y1="{y + height}" '
                f'x2="{to_x + to_width // 2}" y2="{to_y - 2}" class="arrow"/>'
            )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top - _GAP + 10}">',
            "<style>",
            "svg { background: white; font: 13px sans-serif; }",
            ".box { fill: #eef3fb; stroke: #4a6fa5; }",
            ".name { font-weight: bold; }",
            ".subfolder { fill: #444; }",
            ".arrow { stroke: #4a6fa5; marker-end: url(#head); }",
            "</style>",
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#4a6fa5"/></marker>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
