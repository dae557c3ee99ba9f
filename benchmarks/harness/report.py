"""Reports of benchmarks: machine, versions and work as plain numbers, and all figures as text.

Every benchmark stores these next to its times, so that a result can be understood and repeated.
"""

import dataclasses
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from predict.program.collective_table import SummaryRow, format_table
from train.run.run import Run

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_PEER_PACKAGES = ("torch", "transformers")


def versions(*more: str, with_torch: bool = False) -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed.

    Args:
        more: names of additional packages.
        with_torch: whether to add the packages of the PyTorch peer.

    Returns:
        Version by package name.
    """
    names = _PACKAGES + (_PEER_PACKAGES if with_torch else ()) + more
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}


def write_json(path: Path | None, figures: Any, indent: int = 2) -> None:
    """Write figures into a file, if there is one."""
    if path is not None:
        text = json.dumps(figures, indent=indent, allow_nan=False) + "\n"
        path.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the figures in a file from `write_json`."""
    return json.loads(path.read_text(encoding="utf-8"))


def hardware(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return a description of the devices and the machine."""
    device = mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": mesh.size,
        "num_processes": jax.process_count(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def num_cores() -> int:
    """Return the number of CPU cores that this process may use; XLA uses as many threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def work(run: Run) -> dict[str, Any]:
    """Return the sizes and settings that determine the cost of a step."""
    config = run.config
    return {
        "model": type(run.model).__name__,
        "model_config": dataclasses.asdict(run.model_config),
        "num_params": run.num_params,
        "unit": run.unit,
        f"flops_per_{run.unit}": run.flops_per_unit,
        f"{run.unit}s_per_step": run.units_per_step,
        **_sizes_of_a_row(run),
        "global_batch_size": config.data.global_batch_size,
        "num_microbatches": config.train.num_microbatches,
        "remat": config.train.remat,
        "precision": dataclasses.asdict(config.precision),
        "schedule": config.pipeline.schedule,
        "mesh": dict(run.mesh.shape),
        "batches": f"random {run.unit}s, held in memory",
    }


def _sizes_of_a_row(run: Run) -> dict[str, int]:
    data = run.config.data
    images = run.config.images
    if data.reads_images:
        return {"image_size": images.size, "num_channels": images.channels}
    return {"sequence_length": data.sequence_length}


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures of `benchmarks.step` as a readable text."""
    lines = [
        *_heading(figures),
        f"{'':14}  {'ms a step':>9}  {'quartiles':>15}  {_unit(figures) + 's/s':>9}"
        f"  {'GFLOP/s':>9}"
        f"  {'MFU':>6}  {'compile s':>9}",
    ]
    names = [name for name in ("ours", "torch_eager", "torch_compiled") if name in figures]
    lines += [_row(name, figures[name], _unit(figures)) for name in names]
    lines += [
        f"speed of ours ÷ {name}: {ratio['median']:.3f} "
        f"(rounds from {ratio['min']:.3f} to {ratio['max']:.3f})"
        for name, ratio in figures.get("speed_ratios", {}).items()
    ]
    for name, pair in figures.get("equality", {}).items():
        lines.append(f"{name}: {pair['ours']:,} ours, {pair['peer']:,} the peer's")
    if "ours" not in figures:
        return "\n".join(lines)
    lines += ["", "compiled step, one device:"]
    lines += [
        f"  {name.replace('_', ' ')}: {'unknown' if value is None else f'{value:,}'}"
        for name, value in figures["ours"]["memory"].items()
    ]
    rows = [SummaryRow(**row) for row in figures["ours"]["collectives"]]
    return "\n".join([*lines, format_table(rows)])


def pipelines_as_text(figures: dict[str, Any]) -> str:
    """Return the figures of `benchmarks.pipeline` as a readable text."""
    shared = figures["cores_are_shared"]
    lines = [
        *_heading(figures),
        f"{'':25}{'ms a step':>10}{'work-bound':>12}{'ratio':>8}{'synchronous':>13}"
        f"{'bubble':>8}{'measured':>10}{'lost':>7}{'in flight':>11}{'temp MiB':>10}"
        f"{'GFLOP':>8}{'compile s':>11}",
    ]
    lines += [_pipeline_row(run) for run in figures["runs"]]
    kind = "work-bound" if shared else "synchronous"
    lines += [
        "",
        f"work-bound, synchronous: predicted ms a step, without sends; ratio: measured ÷ {kind}",
        "bubble: predicted under the synchronous clock; measured: measured bubble; lost: share of",
        "the step in which no part of the table runs; in flight: most microbatches on a stage;",
        "temp MiB: of one device; GFLOP: matrix products of the busiest stage",
    ]
    if shared:
        machine = figures["hardware"]
        lines += [
            f"The {machine['num_devices']} devices share {machine['num_cores']} core(s). While one "
            "stage is idle, another uses its core, so no",
            "bubble can be measured. The best possible time here is the work-bound time. The "
            "synchronous time is",
            "for separate devices, each as fast as this machine while it runs a single stage.",
        ]
    lines += [
        "",
        f"{'ms a microbatch (update: a step)':34}{'alone':>9}{'together':>10}{'GFLOP':>8}",
    ]
    for part in figures["parts"]:
        layers = f", {part['layers']} layer(s)" if part["layers"] else ""
        lines.append(
            f"{part['part'].replace('_', ' ') + layers:34}{part['time_alone_s'] * 1e3:9.2f}"
            f"{part['time_together_s'] * 1e3:10.2f}{_giga(part['matmul_flops']):>8}"
        )
    return "\n".join(lines)


def _pipeline_row(run: dict[str, Any]) -> str:
    name = run["schedule"] + (f"×{run['chunks']}" if run["chunks"] > 1 else "")
    measured = run["bubble_measured"]
    temp = run["memory"]["temp_bytes"]
    return (
        f"{name + ' ' + run['remat']:25}{run['step_time_s']['median'] * 1e3:10.1f}"
        f"{run['work_bound_time_s'] * 1e3:12.1f}{run['measured_over_predicted']['median']:8.2f}"
        f"{run['synchronous_time_s'] * 1e3:13.1f}{run['bubble_predicted']:8.3f}"
        f"{'n/a' if measured is None else format(measured, '.3f'):>10}"
        f"{run['lost']:7.3f}{max(run['in_flight_per_stage']):11g}"
        f"{'-' if temp is None else format(temp / 2**20, '.1f'):>10}"
        f"{_giga(max(run['matmul_flops_per_stage'])):>8}{run['compile_time_s']:11.1f}"
    )


def _giga(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3f}"


def _unit(figures: dict[str, Any]) -> str:
    return figures["work"]["unit"]


def _heading(figures: dict[str, Any]) -> list[str]:
    """Return the first lines: the work, the machine, the versions, and the number of rounds."""
    sizes = figures["work"]
    machine = figures["hardware"]
    unit = _unit(figures)
    article = "an" if unit == "image" else "a"
    if unit == "image":
        side = sizes["image_size"]
        channels = sizes["num_channels"]
        rows = f"random images of {side} × {side} × {channels}"
    else:
        rows = f"sequences of {sizes['sequence_length']} random tokens"
    remat = f", remat {sizes['remat']}" if "remat" in sizes else ""
    mesh = " × ".join(f"{axis}={size}" for axis, size in sizes["mesh"].items() if size > 1)
    return [
        f"{sizes['model']}, {sizes['num_params']:,} parameters, "
        f"{sizes[f'flops_per_{unit}']:,} FLOPs {article} {unit}, {sizes['precision']['compute']}",
        f"{sizes['global_batch_size']} {rows} a step, "
        f"{sizes['num_microbatches']} microbatch(es){remat}",
        f"mesh {mesh or 'of one device'}, {machine['device_kind']} ({machine['cpu']}, "
        f"{machine['num_cores']} cores)",
        ", ".join(f"{name} {version}" for name, version in figures["versions"].items()),
        "",
        f"{figures['rounds']} rounds of {figures['steps_per_round']} timed steps, in turns",
    ]


def _row(name: str, figures: dict[str, Any], unit: str) -> str:
    if "skipped" in figures:
        return f"{name:14}  skipped: {figures['skipped']}"
    times_s = figures["step_time_s"]
    mfu = figures["mfu"]
    compile_s = figures["compile_time_s"]
    quartiles = f"{times_s['quartile_low'] * 1e3:.1f}–{times_s['quartile_high'] * 1e3:.1f}"
    return (
        f"{name:14}  {times_s['median'] * 1e3:9.1f}  {quartiles:>15}"
        f"  {figures[f'{unit}s_per_s']:9,.0f}  {figures['model_flops_per_s'] / 1e9:9.1f}"
        f"  {'-' if mfu is None else f'{mfu:.1%}':>6}"
        f"  {'-' if compile_s is None else f'{compile_s:.1f}':>9}"
    )


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture if the name is unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
