"""Progress display: a live bar on a terminal, aligned lines in a log file."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import rich.console
import rich.progress

_COLUMNS = (  # metric, format, width in characters
    ("loss", "loss {:.4f}", 12),
    ("learning_rate", "lr {:.2e}", 11),
    ("grad_norm", "grad {:.3f}", 10),
    ("tokens_per_s", "{:,.0f} tok/s", 15),
    ("images_per_s", "{:,.0f} img/s", 15),
    ("mfu", "MFU {:.1%}", 10),
)


class Progress:
    """Shows the progress of a run, until `close`.

    On a terminal every logged step updates a bar. Elsewhere (CI, SLURM) it prints a line.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        is_shown: bool = True,
        console: rich.console.Console | None = None,
    ):
        """Prepare the display.

        Args:
            start_step: step that the run resumes from.
            is_shown: False on all processes except the first; they show nothing.
            console: output; standard output by default.
        """
        self._num_steps = num_steps
        self._is_shown = is_shown
        # soft_wrap and no highlighting keep lines in log files unbroken and without colours. A
        # notebook says that it is a terminal, but shows each state of the bar as a new output.
        is_notebook = rich.get_console().is_jupyter
        self._console = console or rich.console.Console(
            highlight=False,
            soft_wrap=True,
            force_jupyter=False,
            force_terminal=False if is_notebook else None,
        )
        self._bar: rich.progress.Progress | None = None
        if is_shown and self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.fields[text]}"),
                console=self._console,
                # The bar changes at logged steps only, so it needs no refresh thread.
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=start_step, text="")
            self._bar.start()

    def close(self) -> None:
        """Stop the bar, if there is one; it stays visible."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a logged step; metrics that are missing or None are omitted."""
        eta = ""
        step_time_s = metrics.get("step_time_s")
        if step_time_s is not None:
            eta = f"ETA {timedelta(seconds=round(step_time_s * (self._num_steps - step)))}"
        if self._bar is not None:
            text = "  ".join(part.strip() for part in [*_parts(metrics), eta] if part.strip())
            self._bar.update(self._task, completed=step, text=text, refresh=True)
        else:
            self._print_line(step, [*_parts(metrics), eta])

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print all metrics of an evaluation on a line of its own."""
        parts = [
            f"{name} {value:.{2 if name.endswith('_perplexity') else 4}f}"
            for name, value in metrics.items()
        ]
        self._print_line(step, parts)

    def _print_line(self, step: int, parts: list[str]) -> None:
        if self._is_shown:
            counter = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
            self._console.print("  ".join([counter, *parts]).rstrip(), markup=False)


def _parts(metrics: Mapping[str, Any]) -> list[str]:
    """Return the formatted metrics, padded to their columns; missing ones are empty."""
    parts = []
    for name, form, width in _COLUMNS:
        value = metrics.get(name)
        if value is not None:
            parts.append(form.format(value).ljust(width))
        elif name in metrics and name.endswith("_per_s"):
            parts.append(" " * width)  # None at the first step only: keep the columns aligned
    return parts
