"""Compares the communication of the modes of tensor parallelism with the formulas of their papers.

    python -m benchmarks.tensor_modes --docs    # writes the table in both tensor_parallelism.md

The forward pass of a block of GPT-2 is compiled for H100s, and the elements that a device receives
in each layer are read from the program. A block has four products, of activations [M, N] with a
kernel [N, K]:

    product    N      K
    qkv        D      3D
    out        D      D
    up         D      4D
    down       4D     D

Per product, the papers count, for q × q devices and for p × p × p:

    2d    (M·N + N·K) · (q - 1) / q²         activations over columns, kernels over rows
    3d    (M·N + M·K + N·K) · (p - 1) / p³   inputs, outputs and kernels, one axis each

Instead of its input, our second product of a branch communicates its output over `model` in 2d,
which is 4 times smaller for `down`, as Megatron does in 1d. In 3d, the figures are the paper's.
"""

from pathlib import Path

import jax

from benchmarks.harness import docs_page
from predict.machines.targets import parse_target
from predict.program.communication import Collective, collectives
from train.compile import run_for
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.run import Run
from untrusted.commands import command_parser, refuses_bad_input, run_command

#: Mode -> overrides of the config.
MODES = {
    "1d": ("mesh.model=4",),
    "2d": ("mesh.model=4", "tensor.mode=2d"),
    "2.5d": ("mesh.model=8", "tensor.mode=2.5d", "tensor.depth=2"),
    "3d": ("mesh.model=8", "tensor.mode=3d"),
}
_ROOT = Path(__file__).parents[1]
_PAGES = tuple(_ROOT / folder / "tensor_parallelism.md" for folder in ("docs", "docs/zh"))
_TABLE = "python -m benchmarks.tensor_modes --docs"
_LENGTH = 1024
_BATCH = 8
_WIDTH = 512
_JOB = (
    "data.tokenizer=bytes",
    "precision.compute=bfloat16",
    f"data.sequence_length={_LENGTH}",
    f"data.global_batch_size={_BATCH}",
    "model.num_layers=4",
    "model.num_heads=8",
    f"model.embed_dim={_WIDTH}",
    "model.dropout=0.0",
    "train.num_microbatches=1",
    "train.remat=none",
)
_BYTES = 2  # of an element in bfloat16
#: (N, K) of the first and of the second product of each branch, as multiples of D.
_BRANCHES = (((1, 3), (1, 1)), ((1, 4), (4, 1)))
_PRODUCTS = tuple(product for branch in _BRANCHES for product in branch)


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Print the table, or write it into the docs; return the exit code."""
    parser = command_parser("benchmarks.tensor_modes")
    parser.add_argument(
        "--docs", action="store_true", help="write the table in the pages tensor_parallelism.md"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    if args.docs:
        tables = {_TABLE: table()}
        for page in _PAGES:
            docs_page.write_tables(page, tables)
    else:
        print(table())
    return 0


def run_of(mode: str) -> Run:
    """Return the run of a mode, for as many H100s as it needs."""
    config = validate_config(load(str(_ROOT / "configs" / "gpt2.py"), (*_JOB, *MODES[mode])))
    return run_for(config, parse_target(f"h100:1x{config.mesh.model}"))


def received(run: Run) -> dict[str, float]:
    """Return the elements that a device receives in the forward pass of a layer, by mesh axis.

    Args:
        run: run of this job. Its evaluation is read, which is only a forward pass.
    """
    elements: dict[str, float] = {}
    for each in collectives(run.compile_eval_step(), run.mesh):
        if each.loop == "layers":
            (axis,) = each.axes
            size = run.mesh.shape[axis]
            elements[axis] = elements.get(axis, 0.0) + _received(each, size) / _BYTES
    return elements


def _received(collective: Collective, size: int) -> float:
    """Return the bytes that a device receives from `size` - 1 others."""
    if collective.kind == "all-gather":
        return collective.bytes * (size - 1) / size
    if collective.kind == "reduce-scatter":
        return collective.bytes * (size - 1)
    return 2 * collective.bytes * (size - 1) / size


def expected(mode: str) -> dict[str, float]:
    """Return what `received` should be, by mesh axis, without the statistics of norms."""
    width = _WIDTH
    tokens = _BATCH * _LENGTH
    shape = _mesh_shape(mode)
    edge = shape["model"]
    tokens //= shape["depth"] * shape["row"]
    kernels = sum(n * k for n, k in _PRODUCTS) * width**2
    if mode == "1d":
        return {"model": 4 * tokens * width * (edge - 1) / edge}
    if mode != "3d":
        rows = kernels / edge * (edge - 1) / edge
        return {"model": 4 * tokens * width * (edge - 1) / edge, "row": rows}
    part = (edge - 1) / edge**2 * tokens * width
    # What a branch reads and adds has width D, and what is between its products has another one.
    ends = sum(first[0] + second[1] for first, second in _BRANCHES)
    inner = sum(first[1] + second[0] for first, second in _BRANCHES)
    return {
        "model": ends * part,
        "hidden": inner * part,
        "row": kernels * (edge - 1) / edge**3,
    }


def paper(mode: str) -> float | None:
    """Return the elements that a device receives by the formulas of the papers."""
    width = _WIDTH
    shape = _mesh_shape(mode)
    edge = shape["model"]
    tokens = _BATCH * _LENGTH // shape["depth"]
    if mode == "1d":
        return None
    if mode == "3d":
        elements = sum(tokens * (n + k) * width + n * k * width**2 for n, k in _PRODUCTS)
        return elements * (edge - 1) / edge**3
    elements = sum(tokens * n * width + n * k * width**2 for n, k in _PRODUCTS)
    return elements * (edge - 1) / edge**2


def _mesh_shape(mode: str) -> dict[str, int]:
    config = validate_config(load(str(_ROOT / "configs" / "gpt2.py"), (*_JOB, *MODES[mode])))
    return config.mesh.axis_sizes(config.tensor)


def table() -> str:
    """Return the table of docs/tensor_parallelism.md."""
    rows = [
        ["mode", "devices", "by the papers", "in the program", "of which, by axis", "GPU memory"]
    ]
    for mode in MODES:
        run = run_of(mode)
        elements = {axis: n for axis, n in received(run).items() if n > 1e4}
        published = paper(mode)
        parts = ", ".join(f"`{axis}` {n / 1e6:.2f}" for axis, n in sorted(elements.items()))
        rows.append(
            [
                f"`{mode}`",
                str(run.mesh.size),
                "–" if published is None else f"{published / 1e6:.2f}",
                f"{sum(elements.values()) / 1e6:.2f}",
                parts,
                f"{run.estimate_memory().device_bytes / 2**20:,.0f} MiB",
            ]
        )
    return docs_page.markdown(rows)


if __name__ == "__main__":
    run_command(main)
