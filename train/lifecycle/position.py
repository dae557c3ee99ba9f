"""The position of a run: where it starts or resumes, and where it rolls back to."""

import dataclasses
import logging
from pathlib import Path

import jax
import numpy as np
from grain import DatasetIterator

from checkpoint.manager import Checkpoints
from convert.runs import CHECKPOINTS
from convert.source import Source
from data.batches import train_batches
from data.examples import Corpus
from train.lifecycle.divergence import Diverged
from train.run.init_from import start_params
from train.run.run import Run
from train.state.train_state import MAY_LACK, TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run: its beginning, or the newest checkpoint of its workdir."""

    step: int  # steps done
    state: TrainState  # after that step
    batches: DatasetIterator  # continues with the next step's batch
    checkpoints: Checkpoints


def find_position(
    run: Run, corpus: Corpus, workdir: Path, source: Source | None = None
) -> Position:
    """Return the position of the newest intact checkpoint, or the initial one without any.

    Args:
        run: the run.
        corpus: its data.
        workdir: its directory.
        source: checkpoint with the initial parameters; None: the model initializes them.

    Raises:
        ValueError: there are checkpoints but none is intact, or they belong to another model or to
            other data.
    """
    checkpoints = Checkpoints(workdir / CHECKPOINTS, run.config.checkpoint)
    batches = train_batches(corpus, run.config.data, run.rows)
    restored = checkpoints.restore(run.state.portable, may_lack=MAY_LACK)
    if restored is None:
        params = None if source is None else start_params(run, source, corpus.labels)
        step = 0
        state = run.state.initial(params)
    else:
        step, portable, data_state = restored
        state = run.state.from_portable(portable)
        if data_state["corpus"] != corpus.fingerprint:
            raise ValueError(
                f"the data of data.name={run.config.data.name!r} has changed since step {step} in "
                f"{workdir}; restore the original data, or choose another --workdir"
            )
        batches.set_state(data_state["batches"])
        done = step >= run.config.train.num_steps
        _log.info(
            "step %d of train.num_steps=%d is saved; %s",
            step,
            run.config.train.num_steps,
            "nothing is left to train" if done else "resuming from there",
        )
    if not len(corpus.validation):
        _log.warning("the validation split is empty: nothing will be evaluated")
    return Position(step=step, state=state, batches=batches, checkpoints=checkpoints)


def roll_back(run: Run, start: Position, state: TrainState, *, first_bad_step: int) -> TrainState:
    """Restore the newest checkpoint from before several bad steps in a row.

    The position in the data is not rolled back: all steps since that checkpoint count as skipped,
    and their examples are not used again in this epoch.

    Args:
        run: the run.
        start: where the run started; its checkpoints are used.
        state: the state after the newest step; it is deleted.
        first_bad_step: the first bad step. The step before it produced the parameters that failed,
            so its checkpoint is not used either.

    Returns:
        The restored state, with the current step number.

    Raises:
        Diverged: there is no such checkpoint.
    """
    step = int(state.step)
    sharding = state.step.sharding
    jax.tree.map(lambda leaf: leaf.delete(), state)  # there may be no room for two states
    restored = start.checkpoints.restore(
        run.state.portable, may_lack=MAY_LACK, before_step=first_bad_step - 1
    )
    if restored is None:
        raise Diverged(
            f"cannot roll back: no checkpoint is older than step {first_bad_step - 1}; lower "
            "optimizer.learning_rate, or keep older checkpoints (checkpoint.every_steps, "
            "checkpoint.max_to_keep)"
        )
    saved_step, portable, _ = restored
    state = run.state.from_portable(portable)
    size = run.config.data.global_batch_size
    _log.warning(
        "continuing after step %d with the parameters of step %d; steps %d to %d are skipped, "
        "which are examples %d to %d of the run",
        step,
        saved_step,
        saved_step + 1,
        step,
        saved_step * size,
        step * size - 1,
    )
    num_skipped = int(state.num_skipped) + step - saved_step
    return dataclasses.replace(
        state,
        step=jax.device_put(np.int32(step), sharding),
        num_skipped=jax.device_put(np.int32(num_skipped), sharding),
    )
