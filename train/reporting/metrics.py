"""Writes the metrics of a run to metrics.jsonl and to TensorBoard files.

Each line of `metrics.jsonl` is a JSON object. A logged step has `step, loss, learning_rate` (unless
an optimizer of your own hides it), `grad_norm, step_time_s, data_wait_s, tokens_per_s` (for images
`images_per_s`) and more; an evaluation has `step, eval_loss`, and for text `eval_perplexity`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from untrusted.appender import JsonLines, line_of
from untrusted.documents import each_json_line, number_from_json
from untrusted.files import write_text
from untrusted.tensorboard_file import TensorBoardFile

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"


class MetricsWriter:
    """Writes every logged step exactly once, even if the run is killed and resumed several times.

    When `write` returns, the operating system has the line, so killing the process loses nothing.
    While the disk is full, lines are kept in memory, and one warning is logged.

    Attributes:
        latest: last value of every metric that was written; empty on processes that write nothing.
    """

    def __init__(self, workdir: str | Path, *, resume_step: int, is_writer: bool = True):
        """Open the files, and remove lines that a killed run logged after `resume_step`.

        Args:
            workdir: run's directory; it is created if necessary.
            resume_step: step that the run resumes from; 0 at the beginning.
            is_writer: False on all processes except the first; they write nothing.
        """
        self.latest: dict[str, Any] = {}
        self._lines = self._points = None
        if not is_writer:
            return
        path = Path(workdir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_lines_after(path, resume_step)
        self._lines = JsonLines(path, is_patient=True)
        try:
            directory = Path(workdir) / TENSORBOARD_DIRECTORY
            self._points = TensorBoardFile(directory, resume_step=resume_step, is_patient=True)
        except BaseException:
            self.close()
            raise

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line, and one TensorBoard point per number.

        Args:
            metrics: name -> Python number or None.
        """
        if self._lines is None or self._points is None:
            return
        self.latest |= metrics
        self._lines.append({"step": int(step), **metrics})
        self._points.append(int(step), metrics)

    def close(self) -> None:
        """Close the files."""
        for file in (self._lines, self._points):
            if file is not None:
                file.close()
        self._lines = self._points = None


def read_metrics(
    path: str | Path, on_damaged: Callable[[int], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Read a metrics.jsonl.

    Args:
        on_damaged: called with the number of each line, from 1 on, that is not a JSON object with a
            step, such as one torn by a crash. These are left out.

    Returns:
        One dict per line, with NaN and infinities as floats.
    """
    entries = []
    for line, entry in each_json_line(Path(path)):
        if entry is None or type(entry.get("step")) is not int:
            on_damaged(line)
        else:
            entries.append({name: number_from_json(value) for name, value in entry.items()})
    return entries


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    text = "".join(line_of(entry) for entry in read_metrics(path) if entry["step"] <= step)
    write_text(path, text, reaches_disk=True)  # atomically, so that a kill here loses nothing
