"""Records the software, machine, model and memory of a start in `WORKDIR/run.json`.

`config.yaml` has the settings of a run. This file has facts that only the running program knows,
such as its memory as compiled. `train.report` shows them.
"""

import importlib.metadata
import json
import math
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from train.run.run import Run
from untrusted.files import write_text

RUN_FILE = "run.json"
_PACKAGES = ("taibai", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory of a step in bytes."""

    planned_device: Mapping[str, int]  # on one device, by label, as estimated from shapes
    planned_host: Mapping[str, int]  # on one host, by label
    compiled_device: int | None  # on one device, as compiled; None: the compiler does not tell
    device_budget: float | None  # on one device; None: unknown


def write_run_facts(workdir: Path, run: Run, memory: MemoryFacts) -> None:
    """Write `run.json`, which replaces the file of an earlier start. Only the first process writes.

    Raises:
        OSError: the file cannot be written.
    """
    if jax.process_index() > 0:
        return
    facts = {
        "software": {"Python": platform.python_version(), **_versions()},
        "machine": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "devices": f"{run.mesh.size} × {run.hardware.device_kind}",
            "processes": jax.process_count(),
        },
        "model": {
            "class": type(run.model).__name__,
            "parameters": run.num_params,
            "frozen parameters": run.num_frozen,
            f"FLOPs per {run.unit}": run.flops_per_unit,
            "attention": ", ".join(map(str, run.attention_kernels)),
        },
        "unit": run.unit,
        "units_per_step": run.units_per_step,
        "memory": asdict(memory),
    }
    write_text(workdir / RUN_FILE, json.dumps(facts, indent=2) + "\n")


def _versions() -> dict[str, str]:
    """Return the versions of the packages that matter for a run, if they are installed."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def finite_or_none(value: float) -> float | None:
    """Return a number of bytes for JSON; None if it is infinite, which means unknown."""
    return value if math.isfinite(value) else None
