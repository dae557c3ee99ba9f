"""Recognize the checkpoint of another trainer by its files."""

from pathlib import Path

from convert.options import ReadOptions
from convert.trainers import megatron
from convert.trainers.weights import Weights


def read_checkpoint(path: Path, options: ReadOptions) -> Weights | None:
    """Read another trainer's checkpoint; None if there is none at this path.

    Args:
        path: directory of a run's checkpoints, or of one of them.

    Raises:
        ValueError: The checkpoint is damaged, or has a model that is not supported.
    """
    iteration = megatron.find_iteration(path)
    if iteration is not None:
        return megatron.read_ranks(iteration, options)
    return None
