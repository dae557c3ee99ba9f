"""Log-probabilities of preferred and rejected answers, by the model that a run begins with.

They are computed once, before the first step, and are kept in a file of the run:

    pairs ──> forward passes of the initial parameters ──> WORKDIR/reference_log_probs.bin
                                                       ──> the batches of all steps
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.batches import validation_batches
from data.cache import read_array, write_array
from data.examples import Corpus, Examples, NoExamples
from data.shapes import example_shapes
from data.text.objectives.preference import PreferenceExamples
from distributed.messages import Exchange
from models.preference import REFERENCE_LOG_PROBS
from train.run.run import Run

_FILE = f"{REFERENCE_LOG_PROBS}.bin"
_log = logging.getLogger(__name__)


def add_references(run: Run, corpus: Corpus, params: Any, step: int, workdir: Path) -> None:
    """Give the examples of both splits their reference, if the objective needs one.

    Args:
        corpus: its data, which is changed.
        step: step that they are from; at step 0 they are the reference.
        workdir: directory of the run's files; the reference is not kept if there is none.

    Raises:
        ValueError: the run continues, and the file of its reference is missing or damaged.
        OSError: the file cannot be read or written.
    """
    if run.functions.reference is None:
        return
    if step == 0:
        reference = compute_references(run, corpus, params)
        if jax.process_index() == 0 and workdir.is_dir():
            write_array(workdir / _FILE, reference)
    else:
        reference = _read_kept(workdir)
    sizes = [len(split) for split in _splits(corpus)]
    if len(reference) != sum(sizes):
        raise ValueError(
            f"{workdir / _FILE} is for {len(reference)} rows, but the data has {sum(sizes)}; "
            "restore the file, or choose another --workdir"
        )
    set_references(corpus, reference)


def set_references(corpus: Corpus, reference: np.ndarray) -> None:
    """Give the examples of all splits their rows of the reference, in order."""
    splits = _splits(corpus)
    ends = np.cumsum([len(split) for split in splits])
    for split, part in zip(splits, np.split(reference, ends[:-1]), strict=True):
        assert isinstance(split, PreferenceExamples)
        split.reference_log_probs = part


def _splits(corpus: Corpus) -> list[Examples]:
    """Return the splits whose rows have a reference: the train split, then the others."""
    splits = [corpus.train, corpus.validation, *corpus.named_validation.values()]
    return [split for split in splits if not isinstance(split, NoExamples)]


def compute_references(run: Run, corpus: Corpus, params: Any) -> np.ndarray:
    """Return the log-probabilities of the answers in all rows.

    Args:
        params: parameters of the model that the run begins with.

    Returns:
        float32[number of rows, pairs in a row, 2].
    """
    compiled = run.compile_reference_step()
    config = run.config.data
    shape, dtype = example_shapes(config, run.config.images)[REFERENCE_LOG_PROBS]
    log_probs = [np.zeros((0, *shape), dtype)]
    for split in _splits(corpus):
        _log.info("computing the log-probabilities of the answers in %d rows", len(split))
        rows_left = len(split)
        in_order = dataclasses.replace(corpus, validation=split)
        for batch in validation_batches(in_order, config, run.rows):
            outputs = compiled(params, run.place_batch(batch))
            log_probs.append(np.asarray(outputs[REFERENCE_LOG_PROBS], dtype)[:rows_left])
            rows_left -= len(log_probs[-1])
    return np.concatenate(log_probs)


def _read_kept(workdir: Path) -> np.ndarray:
    """Read the reference of a run that continues."""
    reference = Exchange().on_all(lambda: read_array(workdir / _FILE))
    if reference is None or reference.ndim != 3 or reference.dtype != np.float32:
        raise ValueError(
            f"{workdir / _FILE} is missing or damaged: without the log-probabilities of the model "
            "that the run began with, it cannot continue; restore the file, or train again in "
            "another --workdir"
        )
    return reference
