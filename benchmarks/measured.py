"""Compares steps measured on a real GPU with their predictions, and with PyTorch's steps.

On the GPU, measure a step and profile its kernels, and measure the peer in a process of its own:

    XLA_FLAGS=--xla_gpu_collect_cost_model_stats=true python -m benchmarks.step --config=FILE \
        --profile=DIR --json > DIR/step.json
    python -m benchmarks.step --config=FILE --only=torch_compiled --json > DIR/peer.json

The flag makes XLA write its own estimates into the program, as it does for described GPUs. Then, on
any machine, add the step to the stored results, and write the table of docs/before_you_rent.md:

    python -m benchmarks.measured --name="GPT-2 XL" --add=DIR
    python -m benchmarks.measured --docs
"""

import gzip
from pathlib import Path
from typing import Any

from benchmarks.harness import docs_page, report
from fields.paths import local_path
from predict.machines.datasheets import machine_of
from predict.machines.machine import Machine
from predict.machines.targets import target_of
from predict.program.memory import Memory
from predict.time.prediction import predict
from untrusted.commands import command_parser, refuses_bad_input, run_command

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "gpu_steps.json"
_DOCS = _ROOT / "docs" / "before_you_rent.md"
_PEER = "torch_compiled"
#: Parts of a step -> parts of the names of their kernels; all others are "other".
_KERNELS = {
    "attention": ("cudnn",),
    "matmul": ("nvjet", "gemm", "gemv", "cutlass", "splitK"),
}
#: How many of the longest kernels are stored.
_NUM_KERNELS = 30


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Add a step to the results, or write the table of the docs; return the exit code."""
    parser = command_parser("benchmarks.measured")
    parser.add_argument("--add", type=local_path, help="directory of a measured step")
    parser.add_argument("--name", help="name of that step, for the table")
    parser.add_argument("--docs", action="store_true", help="write the table of the docs")
    args = parser.parse_args(argv)
    if args.add is not None:
        if not args.name:
            parser.error("--add needs --name, the name of the step in the table")
        results = report.read_json(_RESULTS) if _RESULTS.exists() else {}
        report.write_json(_RESULTS, results | {args.name: measured(args.add)})
    if args.docs:
        docs_page.write_tables(_DOCS, tables(report.read_json(_RESULTS)))
    return 0


def measured(directory: Path) -> dict[str, Any]:
    """Return the figures of a measured step: its own, the peer's, its kernels and its prediction.

    Args:
        directory: output directory of the commands above.
    """
    figures = report.read_json(directory / "step.json")
    peer = directory / "peer.json"
    if peer.exists():
        peer_figures = report.read_json(peer)
        if peer_figures["hardware"]["device_kind"] != figures["hardware"]["device_kind"]:
            raise ValueError(f"{peer} was measured on {peer_figures['hardware']['device_kind']}")
        figures[_PEER] = peer_figures[_PEER] | {
            "versions": peer_figures["versions"],
            "command": peer_figures["command"],
        }
    kernels = report.read_json(directory / "kernels.json")
    text = gzip.decompress((directory / "step.hlo.txt.gz").read_bytes()).decode()
    machine = _machine(figures["hardware"]["device_kind"])
    prediction = predict(text, figures["work"]["mesh"], machine)
    return figures | {
        "predicted": prediction.to_json(),
        "kernel_seconds": by_category(kernels),
        "kernels": kernels[:_NUM_KERNELS],
    }


def by_category(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all kernels by category, as in a prediction."""
    seconds = {"matmul_s": 0.0, "attention_s": 0.0, "other_s": 0.0}
    for kernel in kernels:
        names = (
            name for name, parts in _KERNELS.items() if any(p in kernel["kernel"] for p in parts)
        )
        seconds[f"{next(names, 'other')}_s"] += kernel["seconds"]
    return seconds


def _machine(device_kind: str) -> Machine:
    """Return the datasheet rates of a GPU that gpu_targets/ describes."""
    target = target_of(device_kind, 1, 1)
    if target is None:
        raise ValueError(f"{device_kind!r} has no description in predict/machines/gpu_targets/")
    return machine_of(target)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of the docs: measured, predicted and the peer's figures."""
    heads = ["step", "measured, ms", "predicted, ms", "predicted ÷ measured", "MFU"]
    heads += ["compiled, GiB", "used, GiB", "torch.compile, ms", "ratio", "GiB"]
    rows = [heads]
    for name, step in results.items():
        ours = step["ours"]
        planned = Memory(**ours["memory"]).in_all or 0
        seconds = ours["step_time_s"]["median"]
        predicted = step["predicted"]["step_s"]
        row = [name, f"{1e3 * seconds:.0f}", f"{1e3 * predicted:.0f}", f"{predicted / seconds:.2f}"]
        row += [f"{ours['mfu']:.1%}", f"{planned / 2**30:.1f}"]
        row.append(f"{ours['peak_memory_bytes'] / 2**30:.1f}")
        peer = step.get(_PEER)
        if peer is None:
            row += ["–"] * 3
        else:
            theirs = peer["step_time_s"]["median"]
            row += [f"{1e3 * theirs:.0f}", f"{theirs / seconds:.2f}"]
            row.append(f"{peer['peak_memory_bytes'] / 2**30:.1f}")
        rows.append(row)
    return {"measured": docs_page.markdown(rows)}


if __name__ == "__main__":
    run_command(main)
