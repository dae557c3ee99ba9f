"""Draws the idea of the project, docs/idea.svg: `python -m docs.draw_idea`.

A model names the axes of its arrays, rules map the names to axes of the mesh, and each device gets
its part. The rules are the project's own, and the numbers of the devices and the shapes follow from
them. A test keeps the picture up to date.
"""

import itertools
import math
from pathlib import Path

from sharding.rules import DEFAULT_RULES

PICTURE = Path(__file__).parent / "idea.svg"

#: Mesh of the picture, from the outermost axis to the innermost, as in sharding/mesh.py.
MESH = {"pipeline": 2, "data": 2, "model": 2}
#: Array of the picture: its logical axes with their sizes.
KERNEL = {"layers": 4, "embed": 128, "mlp": 512}
#: Logical axes whose rules are shown.
_SHOWN = ("layers", "batch", "heads", "mlp", "vocab", "embed")
_CODE = (
    "class Block(nnx.Module):",
    '  up = Linear({"embed": 128},',
    '              {"mlp": 512})',
    "",
    "blocks = Stack(Block, 4)",
)

_WIDTH = 960
_HEIGHT = 392
_LINE = 24  # pixels per line of text
_TOP = 84  # below the titles
_COLUMNS = (20, 345, 640)  # left edges
_WIDTHS = (275, 245, 300)
_CELL_WIDTH = 86  # pixels of a device
_CELL_HEIGHT = 30


def mesh_axes(logical: str) -> tuple[str, ...]:
    """Return the axes of the picture's mesh over which a logical axis is split."""
    return tuple(axis for axis in DEFAULT_RULES[logical] if axis in MESH)


def shard_shape() -> list[int]:
    """Return the shape of the part of the kernel that a device has."""
    return [
        size // math.prod(MESH[axis] for axis in mesh_axes(logical))
        for logical, size in KERNEL.items()
    ]


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" xml:space="preserve">{text}</text>'


def _rectangle(x: int, y: int, width: int, height: int, kind: str) -> str:
    size = f'width="{width}" height="{height}"'
    return f'<rect x="{x}" y="{y}" {size} rx="6" class="{kind}"/>'


def _model() -> list[str]:
    """Draw the model: code that names axes."""
    left = _COLUMNS[0]
    parts = [_text(left + 14, _TOP + _LINE * (i + 1), line, "code") for i, line in enumerate(_CODE)]
    last = _TOP + _LINE * (len(_CODE) + 2)
    parts.append(_text(left + 14, last, "An array, with the names of its axes:", "small"))
    names = (f'<tspan class="{_kind(name)}">{name} {size}</tspan>' for name, size in KERNEL.items())
    parts.append(_text(left + 14, last + _LINE, "  ".join(names), "code"))
    return parts


def _rules() -> list[str]:
    """Draw the rules: a row per logical axis, with the mesh axes in their colours."""
    left = _COLUMNS[1]
    parts = []
    for i, logical in enumerate(_SHOWN):
        y = _TOP + _LINE * (i + 1)
        axes = mesh_axes(logical)
        parts.append(_text(left + 14, y, logical, "code"))
        parts.append(_text(left + 95, y, "→", "code"))
        parts.append(_text(left + 125, y, ", ".join(axes) or "not split", _kind(logical)))
    return parts


def _kind(logical: str) -> str:
    """Return the style of a logical axis: the mesh axis that splits it."""
    return " ".join(["code", *mesh_axes(logical)])


def _part(name: str, number: int) -> str:
    """Return which part of an axis of the kernel a device has, such as "mlp 0–255"."""
    size = shard_shape()[list(KERNEL).index(name)]
    return f"{name} {number * size}–{(number + 1) * size - 1}"


def _mesh() -> list[str]:
    """Draw the mesh: a box per stage, in it a row per data replica, in it a device per column."""
    left = _COLUMNS[2]
    parts = []
    row_height = _CELL_HEIGHT + 10
    height = MESH["data"] * row_height + 34
    sizes = [range(size) for size in MESH.values()]
    for number, (stage, replica, column) in enumerate(itertools.product(*sizes)):
        y = _TOP + 8 + stage * (height + 10)
        x = left + 106 + column * (_CELL_WIDTH + 6)
        row = y + 30 + replica * row_height
        if replica == column == 0:
            parts.append(_rectangle(left + 8, y, _WIDTHS[2] - 16, height, "stage"))
            parts.append(_text(left + 18, y + 20, _part("layers", stage), "small pipeline"))
        if replica == 0:
            parts.append(_text(x, y + 20, _part("mlp", column), "small model"))
        if column == 0:
            parts.append(
                _text(left + 18, row + 20, f"batch {replica + 1}/{MESH['data']}", "small data")
            )
        parts.append(_rectangle(x, row, _CELL_WIDTH, _CELL_HEIGHT, f"device column{column}"))
        parts.append(_text(x + 10, row + 20, f"device {number}", "small"))
    return parts


def draw() -> str:
    """Return the picture as SVG."""
    titles = (
        ("Model", "written as if for one device"),
        ("Rules", "name of an axis → mesh axis"),
        ("Mesh", " × ".join(f"{axis}={size}" for axis, size in MESH.items())),
    )
    parts = []
    for left, width, (title, subtitle) in zip(_COLUMNS, _WIDTHS, titles, strict=True):
        parts.append(_rectangle(left, 20, width, _HEIGHT - 70, "box"))
        parts.append(_text(left + 14, 46, title, "title"))
        parts.append(_text(left + 14, 68, subtitle, "small"))
    for left, width in zip(_COLUMNS[:2], _WIDTHS[:2], strict=True):
        start = left + width + 8
        parts.append(f'<path d="M {start} 150 h 28 m -9 -7 l 9 7 l -9 7" class="arrow"/>')
    shape = " × ".join(map(str, shard_shape()))
    whole = " × ".join(map(str, KERNEL.values()))
    note = (
        f"The array is {whole}; each device has {shape}. Another mesh: another part, the same loss."
    )
    parts.append(_text(_COLUMNS[0], _HEIGHT - 18, note, "note"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}">',
            "<title>A model names axes, rules map them to the mesh, devices get parts</title>",
            "<style>",
            "svg { background: white; font: 15px sans-serif; }",
            ".box { fill: #f7f9fc; stroke: #4a6fa5; }",
            ".stage { fill: #e3ecf9; stroke: #1f5fbf; }",
            ".device { stroke: #2d7d3a; }",
            ".column0 { fill: #e9f6eb; }",
            ".column1 { fill: #bfe3c5; }",
            ".title { font-weight: bold; font-size: 18px; }",
            ".code { font: 14px monospace; }",
            ".small { font-size: 14px; }",
            ".pipeline { fill: #1f5fbf; font-weight: bold; }",
            ".data { fill: #b35900; font-weight: bold; }",
            ".model { fill: #2d7d3a; font-weight: bold; }",
            ".arrow { fill: none; stroke: #444; stroke-width: 2; }",
            "</style>",
            *parts,
            *_mesh(),
            *_rules(),
            *_model(),
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
