"""The lines that a run prints when it ends: how far it came, and the command that shows it."""

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe_end(
    workdir: Path | str, *, step: int, num_steps: int, metrics: Mapping[str, Any], goodput: float
) -> str:
    """Return two lines: the last losses and the goodput, and the command of the report.

    Args:
        workdir: directory or URL.
        step: last step that was done.
        num_steps: number of steps that the config asks for.
        metrics: last value of every metric that this start logged.
        goodput: productive fraction of the run's time, from 0 to 1.
    """
    losses = [
        f"{name} {value:.4f}"
        for name, value in metrics.items()
        if _is_loss(name) and isinstance(value, float) and math.isfinite(value)
    ]
    parts = [f"step {step:,} of {num_steps:,}", *losses, f"goodput {goodput:.1%}"]
    # The user started the run as `taibai train` or as `python -m train.main`.
    words = ["taibai", "report"] if _is_taibai() else ["python", "-m", "train.report"]
    command = shlex.join([*words, str(workdir), "--out=report.html"])
    return f"ended   {', '.join(parts)}\nreport  {command}"


def _is_loss(name: str) -> bool:
    """Return whether a metric is the loss, of training or of a validation set."""
    return name == "loss" or (name.startswith("eval_") and name.endswith("_loss"))


def _is_taibai() -> bool:
    return sys.argv[0].startswith("taibai ")
