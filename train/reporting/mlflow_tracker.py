"""Records a run with MLflow (`log.trackers=mlflow`).

The library's environment variables apply: MLFLOW_TRACKING_URI is the server, or a database such as
`sqlite:////data/mlflow.db`, and MLFLOW_EXPERIMENT_NAME the experiment.
"""

import logging
import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from train.reporting.trackers import TrackedRun

#: Limits of MLflow: parameters in a request, and characters of a value.
_MOST_PARAMS = 100
_MOST_CHARACTERS = 5000

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_log = logging.getLogger(__name__)


def check_settings() -> None:
    """Nothing is needed: without MLFLOW_TRACKING_URI, MLflow has a default."""


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self, run: TrackedRun):
        """Create the record, or continue it."""
        self._client = MlflowClient()
        if run.record_id is None:
            created = self._client.create_run(
                self._experiment_id(), run_name=run.workdir.resolve().name
            )
            self.record_id = created.info.run_id
        else:
            self.record_id = run.record_id
            self._client.update_run(self.record_id, status="RUNNING")
        _log.info("MLflow records the run as %s at %s", self.record_id, self._client.tracking_uri)
        self._log_parameters(run)
        # Metric -> last recorded step of earlier starts, for the metrics that have been logged now.
        self._recorded_steps: dict[str, int] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values, unless an earlier start has recorded this step."""
        now_ms = int(1000 * time.time())
        new = [
            Metric(name, float(value), now_ms, step)
            for name, value in metrics.items()
            if step > self._last_recorded_step(name)
        ]
        self._client.log_batch(self.record_id, metrics=new)

    def finish(self, ended: str) -> None:
        """Mark the record as ended."""
        self._client.set_terminated(self.record_id, _STATUS[ended])

    def _experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "taibai")
        experiment = self._client.get_experiment_by_name(name)
        return (
            self._client.create_experiment(name)
            if experiment is None
            else (experiment.experiment_id)
        )

    def _log_parameters(self, run: TrackedRun) -> None:
        """Record the config. MLflow keeps the first value; a later one becomes a tag."""
        recorded = self._client.get_run(self.record_id).data.params
        params = []
        tags = []
        for name, value in run.parameters.items():
            text = str(value)[:_MOST_CHARACTERS]
            if name not in recorded:
                params.append(Param(name, text))
            elif recorded[name] != text:
                tags.append(RunTag(f"{name} after step {run.first_step}", text))
        for start in range(0, len(params), _MOST_PARAMS):
            batch = params[start : start + _MOST_PARAMS]
            self._client.log_batch(self.record_id, params=batch)
        self._client.log_batch(self.record_id, tags=tags)

    def _last_recorded_step(self, name: str) -> int:
        """Return the last step of a metric that an earlier start has recorded; -1 without any."""
        if name not in self._recorded_steps:
            history = self._client.get_metric_history(self.record_id, name)
            self._recorded_steps[name] = max((each.step for each in history), default=-1)
        return self._recorded_steps[name]


start = MlflowTracker
