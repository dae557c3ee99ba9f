"""Predicts the published jobs with three constants, which are fitted to jobs without layer splits.

A compiled step is reduced to its parts. A constant multiplies the time of one part, since LiBai's
kernels are not ours and its GPUs are not named:

    step = matmul × products + other × other kernels + links
           + network × network + bubble in proportion to the kernels

The fit reads only the jobs on one GPU and those that are data-parallel alone, so the jobs with
tensor or pipeline parallelism test the prediction.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.harness import ranks
from benchmarks.published.libai_rows import Row, jobs_of
from predict.time.prediction import Prediction
from predict.time.transfer import crosses_hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """Parts of a predicted step in seconds, before constants are applied; their sum is the step.

    Attributes:
        matmul_s: matrix products.
        other_s: all other kernels.
        links_s: exposed communication within hosts.
        network_s: exposed communication across hosts.
        bubble_s: waiting for other pipeline stages.
    """

    matmul_s: float
    other_s: float
    links_s: float
    network_s: float
    bubble_s: float

    @classmethod
    def of_prediction(
        cls, prediction: Prediction, mesh_shape: Mapping[str, int], gpus_per_host: int
    ) -> "StepParts":
        """Return the parts of a predicted step.

        Args:
            prediction: step. It must not copy to or from the host.
            mesh_shape: sizes of the mesh axes, in mesh order.
            gpus_per_host: number of GPUs per host.
        """
        network_s = sum(
            each.exposed_s
            for each in prediction.collectives
            if crosses_hosts(mesh_shape, each.axes, gpus_per_host)
        )
        return cls(
            matmul_s=prediction.matmul_s,
            other_s=prediction.other_s + prediction.attention_s,
            links_s=prediction.exposed_communication_s - network_s,
            network_s=network_s,
            bubble_s=prediction.bubble_s,
        )

    @property
    def kernels_s(self) -> float:
        """Time of all kernels."""
        return self.matmul_s + self.other_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Factors on predicted times: LiBai's time is this multiple of ours.

    Attributes:
        matmul: factor on matrix products.
        other: factor on all other kernels.
        network: factor on exposed communication across hosts.
    """

    matmul: float
    other: float
    network: float

    def step_s(self, parts: StepParts) -> float:
        """Return the predicted time of a step in seconds."""
        kernels_s = self.matmul * parts.matmul_s + self.other * parts.other_s
        bubble_s = parts.bubble_s * kernels_s / parts.kernels_s
        return kernels_s + bubble_s + parts.links_s + self.network * parts.network_s

    def samples_per_s(self, row: Row, parts: StepParts) -> float:
        """Return the predicted sequences per second of a job, on all GPUs together."""
        return row.global_batch_size / self.step_s(parts)


#: The prediction as it is, without a fit.
UNFITTED = Constants(matmul=1.0, other=1.0, network=1.0)


def fit(rows: Sequence[Row], parts: Mapping[tuple[str, str], StepParts]) -> Constants:
    """Fit the constants to LiBai's speeds, by least squares of log(predicted ÷ published).

    Args:
        rows: all rows. Only those with `is_fitted` are read, each job once.
        parts: `Row.key` -> parts of the compiled step.
    """
    jobs = [row for row in jobs_of(rows) if row.is_fitted]

    def errors(logs: np.ndarray) -> np.ndarray:
        constants = _from_logs(logs)
        speeds = [constants.samples_per_s(row, parts[row.key]) for row in jobs]
        return np.log(speeds) - np.log([row.libai_samples_per_s for row in jobs])

    return _from_logs(least_squares(errors, np.zeros(3)).x)


def _from_logs(logs: np.ndarray) -> Constants:
    matmul, other, network = np.exp(logs).tolist()
    return Constants(matmul=matmul, other=other, network=network)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest of the published jobs of one model on one number of GPUs.

    Attributes:
        model: key of `libai_rows.MODELS`.
        num_layers: Transformer layers.
        num_gpus: number of GPUs.
        num_jobs: number of jobs to choose from.
        chosen: name of the job that is predicted to be the fastest.
        best: name of the job that LiBai ran fastest.
        regret: share of the best published speed that the choice loses.
    """

    model: str
    num_layers: int
    num_gpus: int
    num_jobs: int
    chosen: str
    best: str
    regret: float


def choices(rows: Sequence[Row], speeds: Mapping[tuple[str, str], float]) -> list[Choice]:
    """Choose the fastest job of every model and number of GPUs that has several meshes.

    Args:
        rows: all rows.
        speeds: `Row.key` -> predicted sequences per second.
    """
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in jobs_of(rows):
        groups.setdefault((row.model, row.num_layers, row.num_gpus), []).append(row)
    mesh_choices = []
    for (model, num_layers, num_gpus), jobs in sorted(groups.items()):
        if len({(row.data, row.tensor, row.pipeline) for row in jobs}) > 1:
            measured = [row.libai_samples_per_s for row in jobs]
            predicted = [speeds[row.key] for row in jobs]
            choice = Choice(
                model=model,
                num_layers=num_layers,
                num_gpus=num_gpus,
                num_jobs=len(jobs),
                chosen=jobs[predicted.index(max(predicted))].name,
                best=jobs[measured.index(max(measured))].name,
                regret=ranks.regret(predicted, measured),
            )
            mesh_choices.append(choice)
    return mesh_choices
