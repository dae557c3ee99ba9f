"""How well predicted speeds rank jobs: Kendall's τ, and the regret of the job predicted fastest."""

import math
from collections.abc import Sequence
from typing import Any

from scipy.stats import kendalltau


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's τ-b of two rankings of the same jobs.

    τ is the share of pairs that both rank alike, minus the share that they rank differently: 1 for
    the same order, -1 for the opposite order. A pair that is tied in one ranking counts as neither.

    Args:
        first: speed per job.
        second: another speed per job.

    Raises:
        ValueError: the lengths differ, or a ranking has no two jobs with different speeds.

    Source: Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945).
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} speeds; each job needs both")
    result: Any = kendalltau(first, second)
    if math.isnan(result.statistic):
        raise ValueError(f"{len(first)} jobs have no order; at least two speeds must differ")
    return float(result.statistic)


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the share of the best measured speed that choosing by prediction loses.

    Args:
        predicted: predicted speed per job.
        measured: measured speed per job.

    Returns:
        0 if the job predicted fastest is also the fastest one; less than 1.

    Raises:
        ValueError: the lengths differ, or there are no jobs.
    """
    if not predicted or len(predicted) != len(measured):
        raise ValueError(
            f"{len(predicted)} predicted and {len(measured)} measured speeds; each job needs both"
        )
    chosen = max(range(len(predicted)), key=predicted.__getitem__)
    return 1 - measured[chosen] / max(measured)
