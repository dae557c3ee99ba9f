"""The progress display: a live bar on a terminal, aligned lines in a log file."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import rich.console
import rich.progress

_COLUMNS = (  # metric, how it is shown, width
    ("loss", "loss {:.4f}", 12),
    ("learning_rate", "lr {:.2e}", 11),
    ("grad_norm", "grad {:.3f}", 10),
    ("tokens_per_s", "{:,.0f} tok/s", 15),
    ("images_per_s", "{:,.0f} img/s", 15),
    ("mfu", "MFU {:.1%}", 10),
)


class Progress:
    """Shows where the run is, until `close`.

    On a terminal each logged step renews a bar; elsewhere (CI, SLURM) it prints a line.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        is_shown: bool = True,
        console: rich.console.Console | None = None,
    ):
        """Prepares the display.

        Args:
            num_steps: the step at which the run ends.
            start_step: the step it goes on from.
            is_shown: False shows nothing: on all processes but the first.
            console: where to; standard output by default.
        """
        self._num_steps = num_steps
        self._is_shown = is_shown
        # soft_wrap and no highlighting: in a log file a line stays one line, without colours.
        self._console = console or rich.console.Console(highlight=False, soft_wrap=True)
        self._bar: rich.progress.Progress | None = None
        if is_shown and self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.fields[text]}"),
                console=self._console,
                # What is shown changes at logged steps only: no thread need wake in between.
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=start_step, text="")
            self._bar.start()

    def close(self) -> None:
        """Ends the bar, if there is one; what it shows stays."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a logged step; metrics that are absent or None are left out."""
        eta = self._eta(step, metrics.get("step_time_s"))
        if self._bar is not None:
            text = "  ".join(part.strip() for part in [*_parts(metrics), eta] if part.strip())
            self._bar.update(self._task, completed=step, text=text, refresh=True)
        else:
            self._print_line(step, [*_parts(metrics), eta])

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints a line that stays, with every metric."""
        digits = {"eval_perplexity": 2}
        parts = [f"{name} {value:.{digits.get(name, 4)}f}" for name, value in metrics.items()]
        self._print_line(step, parts)

    def _print_line(self, step: int, parts: list[str]) -> None:
        if self._is_shown:
            counter = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
            self._console.print("  ".join([counter, *parts]).rstrip(), markup=False)

    def _eta(self, step: int, step_time_s: float | None) -> str:
        if step_time_s is None:
            return ""
        return f"ETA {timedelta(seconds=round(step_time_s * (self._num_steps - step)))}"


def _parts(metrics: Mapping[str, Any]) -> list[str]:
    """Returns the shown metrics, each padded to its column; absent columns are empty."""
    parts = []
    for name, form, width in _COLUMNS:
        value = metrics.get(name)
        if value is not None:
            parts.append(form.format(float(value)).ljust(width))
        elif name in metrics and name.endswith("_per_s"):
            parts.append(" " * width)  # absent on the first step only: keep the rest aligned
    return parts
