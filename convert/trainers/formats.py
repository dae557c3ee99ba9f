"""Recognize the checkpoint of another trainer by its files."""

from pathlib import Path

from convert.options import ReadOptions
from convert.trainers import libai, maxtext, megatron, megatron_dist
from convert.trainers.weights import Weights, keep_latest
from untrusted.files import check_tree


def read_checkpoint(path: Path, options: ReadOptions) -> Weights | None:
    """Read another trainer's checkpoint; None if there is none at this path.

    Args:
        path: directory of a run's checkpoints, or of one of them.

    Raises:
        ValueError: The checkpoint is damaged, has links that lead out of it or a model that is not
            supported, or is a pickle, which the options do not allow.
    """
    weights = _read(path, options)
    if weights is None:
        return None
    return Weights(config=weights.config, tensors=keep_latest(weights.tensors))


def _read(path: Path, options: ReadOptions) -> Weights | None:
    iteration = megatron.find_iteration(path)
    if iteration is not None:
        check_tree(iteration, iteration)
        _check_pickles(iteration, options)
        if (iteration / megatron.METADATA).is_file():
            return megatron_dist.read_parts(iteration)
        return megatron.read_ranks(iteration)
    step = libai.find_checkpoint(path)
    if step is not None:
        check_tree(step, step)
        if libai.has_pickle(step):
            _check_pickles(step, options)
        return libai.read_folders(step)
    items = maxtext.find_items(path)
    if items is not None:
        return maxtext.read_items(path, items)
    return None


def _check_pickles(path: Path, options: ReadOptions) -> None:
    if not options.allow_pickle_weights:
        raise ValueError(
            f"{path} has pickles, which can run code when they are opened; if you trust it, add "
            "--allow_pickle_weights, with which only weights and plain data are read from them"
        )
