"""Draws which device has which part of activations and kernels in the modes of tensor parallelism.

    python -m docs.draw_tensor_modes     # writes docs/tensor_modes.svg

The parts are those that jax gives to the devices for the rules of sharding/rules.py.
"""

from pathlib import Path

import jax
import matplotlib
from jax.sharding import NamedSharding

from sharding.logical import to_spec
from sharding.mesh import MeshConfig, make_mesh
from sharding.rules import make_rules
from sharding.tensor import TensorConfig

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

_FILE = Path(__file__).parent / "tensor_modes.svg"
#: Title -> (mesh.model, mode).
_MODES = {
    "1d on 4 devices": (4, TensorConfig()),
    "2d on 4 devices": (4, TensorConfig(mode="2d")),
    "2.5d on 8 devices, depth 2": (8, TensorConfig(mode="2.5d", depth=2)),
    "3d on 8 devices": (8, TensorConfig(mode="3d")),
    "2d_stationary on 8 devices": (8, TensorConfig(mode="2d_stationary")),
}
#: Title -> (logical axes of the array, names of its dims).
_ARRAYS = {
    "activations between branches": (("act_rows", "act_embed"), ("tokens", "D")),
    "activations of a branch": (("batch", "act_mlp"), ("tokens", "F")),
    "kernel at rest": (("embed", "mlp"), ("D", "F")),
}
_SIZE = 16


def main() -> None:
    """Write the picture."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    plt.rcParams["svg.hashsalt"] = "taibai"
    plt.rcParams["svg.fonttype"] = "none"
    figure, rows = plt.subplots(len(_MODES), len(_ARRAYS), figsize=(9, 14.4))
    for title, axes_of_row in zip(_MODES, rows, strict=True):
        for name, axes in zip(_ARRAYS, axes_of_row, strict=True):
            _draw(axes, *_MODES[title], *_ARRAYS[name])
            axes.set_title(f"{title}\n{name}" if axes is axes_of_row[0] else f"\n{name}", size=10)
    figure.patch.set_facecolor("white")
    figure.tight_layout()
    figure.savefig(_FILE, metadata={"Date": None})


def _draw(axes, count: int, tensor: TensorConfig, logical, dims: tuple[str, str]) -> None:
    mesh = make_mesh(MeshConfig(model=count), jax.devices(), tensor)
    rules = dict(make_rules())
    rules["act_rows"] = (*rules["batch"], *rules["act_tokens"])
    rules["act_mlp"] = (*rules["mlp"], *rules["act_branch"])
    sharding = NamedSharding(mesh, to_spec(logical, rules))
    holders: dict[tuple[int, int, int, int], list[int]] = {}
    numbers = {device: i for i, device in enumerate(mesh.devices.flat)}
    for device, index in sharding.devices_indices_map((_SIZE, _SIZE)).items():
        row, column = (part.indices(_SIZE) for part in index)
        holders.setdefault((row[0], row[1], column[0], column[1]), []).append(numbers[device])
    colors = plt.get_cmap("Set3")
    for (top, bottom, left, right), devices in sorted(holders.items()):
        area = Rectangle((left, top), right - left, bottom - top, facecolor=colors(min(devices)))
        area.set_edgecolor("black")
        axes.add_patch(area)
        middle = ((left + right) / 2, (top + bottom) / 2)
        axes.text(*middle, ",".join(map(str, sorted(devices))), ha="center", va="center", size=9)
    axes.set_xlim(0, _SIZE)
    axes.set_ylim(_SIZE, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylabel(dims[0])
    axes.set_xlabel(dims[1])
    axes.set_aspect("equal")


if __name__ == "__main__":
    main()
