"""Measures the memory of conversions: `python -m benchmarks.convert DIRECTORY [--json]`.

The benchmark writes a LLaMA with two billion random weights to DIRECTORY, in bfloat16 and in
several files. It imports the model and exports it again, each in a separate process, and compares
every bit. Peak memory must stay below the largest tensor + 1 GiB for models of any size.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from benchmarks.harness import report
from convert.keys import read
from convert.model_on_disk import shapes_of
from convert.registry import architectures
from convert.tensor_files import ShardWriter, open_tensors, same_values
from fields.paths import local_path
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

#: Config of the model, which has about 2 billion weights.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GIB = 2**30
_SHARD_BYTES = GIB


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 1 if peak memory exceeds the bound or a bit differs."""
    parser = command_parser("benchmarks.convert")
    parser.add_argument(
        "directory",
        type=local_path,
        help="directory to write to; needs three times the size of the model",
    )
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    source, ours, back = (args.directory / name for name in ("theirs", "ours", "back"))
    tensors = make(source, {**CONFIG, "num_hidden_layers": args.layers})
    largest = max(num_bytes for _, num_bytes in tensors)
    runs = {
        "from_hf": measure("convert.from_hf", source, ours),
        "to_hf": measure("convert.to_hf", ours, back),
    }
    bound = largest + GIB
    figures = {
        "command": command_line("benchmarks.convert", argv),
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
        "versions": report.versions("orbax-checkpoint", "tensorstore"),
        "config": CONFIG | {"num_hidden_layers": args.layers},
        "num_parameters": sum(num_bytes for _, num_bytes in tensors) // 2,
        "model_bytes": sum(num_bytes for _, num_bytes in tensors),
        "largest_tensor_bytes": largest,
        "bound_bytes": bound,
        "conversions": runs,
        "same_bits": same(source, back),
    }
    print(json.dumps(figures, indent=1) if args.json else as_text(figures))
    is_bounded = all(run["peak_rss_bytes"] <= bound for run in runs.values())
    return 0 if is_bounded and figures["same_bits"] else 1


def make(directory: Path, config: dict[str, Any]) -> list[tuple[str, int]]:
    """Write a Hugging Face model with random weights.

    Args:
        directory: new directory for the model.
        config: contents of its config.json.

    Returns:
        (name, bytes) of every tensor.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    architecture = architectures()[config["architectures"][0]]
    fields = read(config, architecture.keys, harmless=architecture.harmless)
    cls = architecture.model_class
    model = nnx.eval_shape(
        lambda: cls(cls.Config(**fields, **architecture.fields), rngs=nnx.Rngs(0))
    )
    shapes = shapes_of(nnx.to_pure_dict(nnx.split(model)[1]))
    places = architecture.tensor_mappings(shapes, vocab_size=config["vocab_size"])
    dtype = np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    tensors = {place.theirs: place.their_shape for place in places}

    def values(name: str) -> np.ndarray:
        return rng.standard_normal(tensors[name], np.float32).astype(dtype)

    listed = [(name, dtype, shape) for name, shape in tensors.items()]
    ShardWriter(directory, listed, max_shard_bytes=_SHARD_BYTES).write(values)
    return [(name, int(np.prod(shape)) * dtype.itemsize) for name, shape in tensors.items()]


def measure(module: str, source: Path, target: Path) -> dict[str, Any]:
    """Run a conversion in a separate process and measure it.

    Args:
        module: module of the conversion, such as "convert.to_hf".
        source: directory of the model to convert.
        target: directory for the result.

    Returns:
        Time in seconds and peak memory in bytes.

    Raises:
        RuntimeError: the conversion failed.
    """
    command = [sys.executable, "-m", module, str(source), str(target)]
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{shlex.join(command)} failed")
    kilobytes = usage.ru_maxrss if platform.system() != "Darwin" else usage.ru_maxrss / 1024
    return {"time_s": time.perf_counter() - start, "peak_rss_bytes": int(kilobytes * 1024)}


def same(first: Path, second: Path) -> bool:
    """Return whether two models have bitwise identical tensors."""
    a = open_tensors(first)
    b = open_tensors(second)
    return a.keys() == b.keys() and all(same_values(a[name], b[name]) for name in a)


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as a readable text."""
    bound = figures["bound_bytes"]
    lines = [
        f"{figures['num_parameters']:,} parameters, {figures['model_bytes'] / GIB:.2f} GiB; "
        f"largest tensor {figures['largest_tensor_bytes'] / GIB:.2f} GiB; "
        f"bound {bound / GIB:.2f} GiB"
    ]
    for name, run in figures["conversions"].items():
        peak = run["peak_rss_bytes"]
        lines.append(
            f"{name:8} peak {peak / GIB:.2f} GiB ({peak / bound:.0%} of the bound), "
            f"{run['time_s']:.0f} s"
        )
    return "\n".join([*lines, f"same bits: {figures['same_bits']}"])


if __name__ == "__main__":
    run_command(main)
