"""Examples of a callback and a tracker.

A config selects them by import path:

--config.train.evaluation_callbacks=docs.examples.watch:stop_when_good
--config.log.trackers=docs.examples.watch:CsvTracker
"""

from collections.abc import Mapping

from train.lifecycle.callbacks import Event
from train.reporting.trackers import TrackedRun


def stop_when_good(event: Event) -> None:
    """Log the loss in bits, and end the run when it is low."""
    bits = event.metrics["eval_loss"] / 0.6931
    event.log("bits", bits)
    if bits < 3:
        event.stop(f"{bits:.3f} bits are enough")


class CsvTracker:
    """Writes `WORKDIR/values.csv`, and continues the file when a run resumes."""

    def __init__(self, run: TrackedRun):
        self._file = open(run.workdir / "values.csv", "a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line per value."""
        for name, value in metrics.items():
            self._file.write(f"{step},{name},{value}\n")

    def finish(self, ended: str) -> None:
        """Close the file; `ended` is "finished", "stopped" or "failed"."""
        self._file.close()
