"""Restores a run from its checkpoints, at the start and when it rolls back."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from grain import DatasetIterator

from checkpoint.errors import ReadError
from checkpoint.layout import CHECKPOINTS
from checkpoint.manager import Checkpoints
from convert.source import Source
from data.batches import train_batches
from data.examples import Corpus
from train.lifecycle.divergence import Diverged
from train.run.init_from import start_params
from train.run.run import Run
from train.state.train_state import MAY_LACK, TrainState
from untrusted.messages import sentence_of, shortened
from untrusted.schema import check_fields

#: The largest number of a batch in a checkpoint; larger ones could overflow.
MAX_POSITION = 2**48

_DATA_STATE_TYPES: dict[str, Any] = {
    "batches": dict[str, Any],
    "corpus": str,
    "contents": str | None,
}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredRun:
    """The state of a run, with its data and checkpoints open: ready for the next step."""

    step: int  # steps done; 0 if there was no checkpoint
    state: TrainState  # after that step
    batches: DatasetIterator  # continues with the next step's batch
    checkpoints: Checkpoints  # of the workdir; must be closed


def restore_or_initialize(
    run: Run,
    corpus: Corpus,
    workdir: Path,
    source: Source | None = None,
    publish: Callable[[], object] | None = None,
) -> RestoredRun:
    """Restore a run from the newest intact checkpoint of its workdir, or initialize its state.

    Args:
        source: checkpoint with the initial parameters; None: the model initializes them.
        publish: copies changes of the workdir to an object store; see `Checkpoints`.

    Raises:
        ValueError: there are checkpoints but none is intact, or they belong to another model or to
            other data, or somebody has changed them.
        OSError: a checkpoint cannot be read, though it may be intact.
    """
    with contextlib.ExitStack() as on_error:
        checkpoints = Checkpoints(workdir / CHECKPOINTS, run.config.checkpoint, publish)
        on_error.callback(checkpoints.close)
        batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
        restored = checkpoints.restore(run.state_layout.portable, may_lack=MAY_LACK)
        if restored is None:
            step = 0
            state = initial_state(run, corpus, source)
        else:
            step, portable, data_state = restored
            state = run.state_layout.from_portable(portable)
            where = f"the position in the data of step {step} in {workdir}"
            check_fields(data_state, _DATA_STATE_TYPES, where)
            if not _is_same_data(data_state, corpus):
                raise ValueError(
                    f"the data of data.name={run.config.data.name!r} has changed since step {step} "
                    f"in {workdir}; restore the original data, or choose another --workdir"
                )
            _set_position(batches, data_state["batches"], where)
            done = step >= run.config.train.num_steps
            _log.info(
                "step %d of train.num_steps=%d is saved; %s",
                step,
                run.config.train.num_steps,
                "nothing is left to train" if done else "resuming from there",
            )
        if not corpus.validation_sets:
            _log.warning("the validation split is empty: nothing will be evaluated")
        on_error.pop_all()
    return RestoredRun(step=step, state=state, batches=batches, checkpoints=checkpoints)


def restore_to_evaluate(
    run: Run, corpus: Corpus, workdir: Path, source: Source | None = None
) -> tuple[int, TrainState]:
    """Return the newest intact step of a workdir and its state, whatever data it has trained on.

    Without a checkpoint, this is step 0 with the initial state.

    Raises:
        ValueError: there are checkpoints but none is intact, or they belong to another model.
        OSError: a checkpoint cannot be read, though it may be intact.
    """
    with contextlib.closing(Checkpoints(workdir / CHECKPOINTS, run.config.checkpoint)) as saved:
        restored = saved.restore(run.state_layout.portable, may_lack=MAY_LACK)
    if restored is None:
        return 0, initial_state(run, corpus, source)
    step, portable, _ = restored
    return step, run.state_layout.from_portable(portable)


def initial_state(run: Run, corpus: Corpus, source: Source | None) -> TrainState:
    """Return the state before the first step.

    Args:
        source: checkpoint with the initial parameters; None: the model initializes them.
    """
    params = None if source is None else start_params(run, source, corpus.labels)
    return run.state_layout.initial(params)


def _set_position(batches: DatasetIterator, saved: dict[str, Any], where: str) -> None:
    """Continue with the batch that a checkpoint names."""
    current_state: Any = batches.get_state()
    check_fields(saved, {name: type(value) for name, value in current_state.items()}, where)
    for name, value in saved.items():
        if name not in current_state or isinstance(value, int) and not 0 <= value <= MAX_POSITION:
            raise ValueError(f"{where} is damaged: {name} must not be {shortened(value)}")
    batches.set_state(saved)


def identity_of(corpus: Corpus) -> dict[str, str]:
    """Return the part of a checkpoint's data state that says which data its run has read."""
    return {"corpus": corpus.fingerprint, "contents": corpus.contents}


def _is_same_data(data_state: Mapping[str, Any], corpus: Corpus) -> bool:
    """Return whether a checkpoint's run has read this corpus.

    Contents are compared only if `data.verify` was "full" in both runs.
    """
    saved_contents = data_state.get("contents", "")
    if corpus.contents and data_state["corpus"] == corpus.contents:
        return True  # an older version stored the contents in place of the fingerprint
    if corpus.contents and saved_contents and corpus.contents != saved_contents:
        return False
    return data_state["corpus"] == corpus.fingerprint


def roll_back(
    run: Run, checkpoints: Checkpoints, state: TrainState, *, first_bad_step: int
) -> TrainState:
    """Restore the newest checkpoint from before a streak of bad steps.

    The position in the data is not rolled back: all steps since that checkpoint count as skipped,
    and their examples are not used again in this epoch.

    Args:
        state: state after the newest step; it is deleted.
        first_bad_step: first bad step. The step before it produced the parameters that failed,
            so its checkpoint is not used either.

    Returns:
        The restored state, with the current step number.

    Raises:
        Diverged: there is no such checkpoint, or all of them are damaged.
        ReadError: a checkpoint cannot be read, though it may be intact.
    """
    step = int(state.step)
    sharding = state.step.sharding
    jax.tree.map(lambda leaf: leaf.delete(), state)  # there may be no room for two states
    try:
        restored = checkpoints.restore(
            run.state_layout.portable, may_lack=MAY_LACK, before_step=first_bad_step - 1
        )
    except ValueError as error:
        raise Diverged(f"cannot roll back: {sentence_of(error)}") from error
    except OSError as error:  # on some processes, it is the error of another one
        raise ReadError(f"cannot roll back: {sentence_of(error)}") from error
    if restored is None:
        raise Diverged(
            f"cannot roll back: no checkpoint is older than step {first_bad_step - 1}; lower "
            "optimizer.learning_rate, or keep older checkpoints (checkpoint.every_steps, "
            "checkpoint.max_to_keep)"
        )
    saved_step, portable, _ = restored
    state = run.state_layout.from_portable(portable)
    sizes = run.config.data.batch_sizes
    _log.warning(
        "continuing after step %d with the parameters of step %d; steps %d to %d are skipped, "
        "which are examples %d to %d of the run",
        step,
        saved_step,
        saved_step + 1,
        step,
        sizes.first_element(saved_step),
        sizes.first_element(step) - 1,
    )
    num_skipped = int(state.num_skipped) + step - saved_step
    return dataclasses.replace(
        state,
        step=jax.device_put(np.int32(step), sharding),
        num_skipped=jax.device_put(np.int32(num_skipped), sharding),
    )
