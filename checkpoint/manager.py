"""Checkpoints of a run: saved asynchronously, verified on load, restored onto any mesh.

`checkpoint.layout` says what lies where. A checkpoint has no trace of the mesh or of a sharding;
only the boundaries of the chunks on disk follow the shards that were written in parallel, and
reading ignores them. Nothing in it is ever unpickled.

All of it is written into a temporary directory, checksums last, and renamed: a checkpoint is
there whole or not at all, whenever the process is killed. Orbax writes and reads the arrays. When
to commit, what to keep and what to do about a failure is decided here, by the first process, and
told to the others: Orbax's own manager leaves them waiting for a process that cannot write.
"""

import asyncio
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from checkpoint.checksums import find_damage, write_checksums
from checkpoint.layout import (
    DATA_STATE,
    METRICS,
    STATE,
    TMP_SUFFIX,
    best_steps,
    read_data_state,
    read_metrics,
    steps_in,
)
from checkpoint.lazy import LazyArray, LazyHandler, save_args
from checkpoint.quiet import keep_quiet
from sharding.distributed.messages import TIMEOUT_S, Exchange

#: What writing fails with if a disk, and not a program, is at fault: TensorStore says ValueError.
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved and how many stay."""

    every_steps: int  # steps between two saves; 0 saves at the end only
    every_minutes: float | None = None  # also after so long, by the first process's clock
    max_to_keep: int  # the newest so many stay; with 1 there is nothing to fall back on
    keep_best: int = 0  # beside them, the so many best by best_metric stay
    best_metric: str = "eval_loss"  # a metric of the evaluation
    best_is_max: bool = False  # True: large values of best_metric are good
    timeout_s: float = TIMEOUT_S  # what takes longer to save hangs; seconds

    def __post_init__(self):
        if self.every_steps < 0:
            raise ValueError(
                f"checkpoint.every_steps={self.every_steps} must not be negative; "
                "choose a number of steps, or 0 to save at the end only"
            )
        if self.every_minutes is not None and not 0 < self.every_minutes < math.inf:
            raise ValueError(
                f"checkpoint.every_minutes={self.every_minutes} must be more than 0; "
                "choose a number of minutes, or None to count steps only"
            )
        if self.max_to_keep < 1:
            raise ValueError(
                f"checkpoint.max_to_keep={self.max_to_keep} must be at least 1; "
                "choose 2 or more to have one to fall back on"
            )
        if self.keep_best < 0:
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best} must not be negative; "
                "choose 0 to keep the newest only"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"checkpoint.timeout_s={self.timeout_s} must be more than 0; choose several times "
                "the seconds that a save takes"
            )


class SaveError(OSError):
    """A checkpoint could not be saved; the message names it, and the reason."""


class Checkpoints:
    """The checkpoints in one directory.

    With several processes every method is called by all of them, in the same order, and
    `directory` is on a file system that all of them see.

    A save that fails (a full disk, no permission, a device that is gone) is logged as one error,
    on every process, and what was half written is removed. Only `wait` raises it.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig):
        keep_quiet()
        self._directory = Path(directory).absolute()
        self._config = config
        self._exchange = Exchange(config.timeout_s)
        self._handler = _state_handler()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._being_saved: Future | None = None
        self._failure: SaveError | None = None
        self._num_tries, self._num_failed_saves = 0, 0
        self._passed_over: list[int] = []  # damaged checkpoints, deleted once another is there
        #: step -> value of best_metric or None, of each checkpoint that is there
        self._scores = dict(self._exchange.on_first(self._read_scores))

    def save(
        self,
        step: int,
        state: Any,
        data_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Starts to save and returns; True, or False if `step` is there or nothing can be written.

        The arrays may be donated as soon as this returns. An earlier save that is still being
        written is waited for. If it failed, or if this one cannot even start, that is logged and
        counted and not raised.

        Args:
            step: the number of steps that `state` has behind it.
            state: any pytree of jax.Arrays, each sharded as it may be, or of LazyArrays, which
                must stay readable until `wait` returns.
            data_state: what can be written as JSON: the position in the data. The first
                process's is written, so it must be the same on all of them.
            metrics: of an evaluation of this very state, or None if it was not evaluated. A
                checkpoint without is never among the best.

        Raises:
            ValueError: `metrics` has no `checkpoint.best_metric`, and `checkpoint.keep_best` is
                more than 0.
        """
        texts = {DATA_STATE: json.dumps(dict(data_state))}
        if metrics is not None:
            metrics = {name: float(value) for name, value in metrics.items()}
            texts[METRICS] = json.dumps(metrics)
        score = self._score(metrics)
        self._finish()
        if step in self.all_steps():
            return False
        self._num_tries += 1
        path = self._directory / f"{step}{TMP_SUFFIX}-{self._num_tries}"
        try:
            self._exchange.on_first(lambda: self._prepare(path))
        except OSError as error:
            self._fail(self._save_error(step, error))
            return False
        args = ocp.args.PyTreeSave(state, save_args=jax.tree.map(save_args, state))
        # Returns when the arrays are copied; Orbax writes them in threads of its own.
        written = _run(self._handler.async_save(epath.Path(path / STATE), args=args)) or []
        self._being_saved = self._writer.submit(self._write, step, path, written, texts, score)
        return True

    def restore(
        self,
        abstract_state: Any,
        *,
        may_lack: Collection[str] = (),
        before_step: int | None = None,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns the newest undamaged (step, state, data_state), or None if there are none.

        A damaged checkpoint is passed over with a warning that names it and the reason; it is
        deleted when the next `save` is complete.

        Args:
            abstract_state: the same pytree of jax.ShapeDtypeStruct, whose shardings are those
                wanted now. Each device reads its own shard.
            may_lack: fields, the first parts of names, that a checkpoint may lack, or have though
                `abstract_state` does not. One that it lacks is None in the state.
            before_step: passes over the checkpoints of this step and later ones.

        Raises:
            ValueError: if all checkpoints are damaged, or if the newest undamaged one has other
                names, shapes or dtypes than `abstract_state`.
            OSError: a process does not say what it found.
        """
        self._finish()
        for step in reversed(self.all_steps()):
            if before_step is not None and step >= before_step:
                continue
            path = self._directory / str(step)
            damage = self._find_damage(path)
            if damage is not None:
                logger.warning("Checkpoint %s is passed over: %s.", path, damage)
                self._passed_over.append(step)
                continue
            there = self._check_same_structure(path, abstract_state, may_lack)
            args = ocp.args.PyTreeRestore(
                there,
                restore_args=ocp.checkpoint_utils.construct_restore_args(there),
                partial_restore=True,  # what else is there was checked to be in may_lack
            )
            state = self._handler.restore(epath.Path(path / STATE), args=args)
            return step, state, read_data_state(path)
        if self._passed_over and not self.all_steps():
            steps = ", ".join(map(str, sorted(self._passed_over)))
            raise ValueError(
                f"all checkpoints in {self._directory} are damaged (steps {steps}; the log says "
                "how); restore a copy of one, or start in another workdir"
            )
        return None

    def all_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first, without those passed over.

        One that is being saved counts from the next `wait`, `save` or `restore` on, so that all
        processes have the same answer.
        """
        return sorted(self._scores.keys() - set(self._passed_over))

    def latest_step(self) -> int | None:
        """Returns the newest of `all_steps`, or None."""
        return max(self.all_steps(), default=None)

    @property
    def num_failed_saves(self) -> int:
        """How many saves failed, of those that were waited for."""
        return self._num_failed_saves

    @property
    def last_failure(self) -> SaveError | None:
        """What the newest save failed with, or None if it is on disk; ask after `close`."""
        return self._failure

    def tidy(self) -> None:
        """Removes what a process that was killed left half-written, or half-deleted.

        Only for who alone saves here: what another process is writing would go too.
        """
        self._exchange.on_first(self._remove_half_written)

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            SaveError: the newest save failed.
        """
        self._finish()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Waits, and frees the threads. Nothing can be saved or restored afterwards."""
        try:
            self._finish()
        finally:
            self._writer.shutdown()
            self._handler.close()
        if self._failure is not None and jax.process_index() == 0:
            self._remove_half_written()  # what was still being written as its save failed

    def _read_scores(self) -> list[tuple[int, float | None]]:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = self._config.best_metric
        steps = steps_in(self._directory)
        return [(step, read_metrics(self._directory / str(step)).get(name)) for step in steps]

    def _score(self, metrics: Mapping[str, float] | None) -> float | None:
        """Returns the value of best_metric, or None if there was no evaluation."""
        name = self._config.best_metric
        if metrics is not None and name not in metrics and self._config.keep_best:
            raise ValueError(
                f"checkpoint.best_metric={name!r} is no metric of the evaluation; choose one of "
                f"{', '.join(sorted(metrics))}, or set checkpoint.keep_best=0"
            )
        return None if metrics is None else metrics.get(name)

    def _prepare(self, path: Path) -> None:
        """Makes a directory to write in: on the first process."""
        self._remove_half_written()
        (path / STATE).mkdir(parents=True)

    def _write(
        self, step: int, path: Path, written: Sequence[Any], texts: dict[str, str], score: Any
    ) -> list[tuple[int, float | None]]:
        """Sees a save to its end, in a thread; returns the score of each step that stays."""
        error = _first_error(written)
        try:
            try:
                problem = self._exchange.gather(None if error is None else _reason(error))
            except TimeoutError as late:
                problem = str(late)
            return self._exchange.on_first(lambda: self._commit(step, path, texts, score, problem))
        except OSError as failed:
            if error is not None and not isinstance(error, _WRITE_ERRORS):
                raise error from None
            raise self._save_error(step, failed) from error

    def _commit(
        self, step: int, path: Path, texts: dict[str, str], score: Any, problem: str | None
    ) -> list[tuple[int, float | None]]:
        """Completes what all processes wrote, or removes it: on the first process."""
        try:
            if problem is not None:
                raise OSError(problem)
            self._handler.finalize(epath.Path(path / STATE))
            for name, text in texts.items():
                _write_file(path / name, text)
            write_checksums(path)
            for damaged in self._passed_over:
                self._delete(damaged)
            path.rename(self._directory / str(step))
        except _WRITE_ERRORS as error:
            shutil.rmtree(path, ignore_errors=True)
            raise OSError(_reason(error)) from error
        there = {number: self._scores[number] for number in self.all_steps()}
        return self._drop_old({**there, step: score})

    def _drop_old(self, scores: dict[int, float | None]) -> list[tuple[int, float | None]]:
        """Deletes what shall not stay, and returns what is there then: on the first process."""
        config = self._config
        best = best_steps(scores, num_best=config.keep_best, best_is_max=config.best_is_max)
        kept = {*sorted(scores)[-config.max_to_keep :], *best}
        for step in scores.keys() - kept:
            try:
                self._delete(step)
            except OSError as error:
                path = self._directory / str(step)
                logger.warning("Checkpoint %s cannot be deleted: %s.", path, _reason(error))
                kept |= {step} if path.exists() else set()
        return [(step, scores[step]) for step in sorted(kept)]

    def _delete(self, step: int) -> None:
        """Deletes a checkpoint: whenever the process is killed, it is there whole or not at all."""
        path = self._directory / str(step)
        doomed = path.with_name(f"{step}{TMP_SUFFIX}-deleted-{self._num_tries}")
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_half_written(self) -> None:
        for path in self._directory.glob(f"*{TMP_SUFFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _finish(self) -> None:
        """Waits for the save that is being written, if there is one, and takes note of its end."""
        if self._being_saved is None:
            return
        future, self._being_saved = self._being_saved, None
        try:
            self._scores = dict(future.result())
            self._passed_over, self._failure = [], None
        except SaveError as error:
            self._fail(error)

    def _fail(self, failure: SaveError) -> None:
        self._failure = failure
        self._num_failed_saves += 1

    def _save_error(self, step: int, error: OSError) -> SaveError:
        path, reason = self._directory / str(step), _reason(error)
        logger.error("Checkpoint %s could not be saved: %s.", path, reason)
        return SaveError(f"checkpoint {path} could not be saved: {reason}")

    def _find_damage(self, path: Path) -> str | None:
        """Returns what all processes, which share the reading, found: the same on all of them."""
        process, num_processes = jax.process_index(), jax.process_count()
        return self._exchange.agree(find_damage(path, part=process, num_parts=num_processes))

    def _check_same_structure(
        self, path: Path, abstract_state: Any, may_lack: Collection[str]
    ) -> Any:
        """Returns `abstract_state` with None for what the checkpoint lacks and may lack."""
        saved = _describe(self._handler.metadata(epath.Path(path / STATE)).tree)
        wanted = _describe(abstract_state)
        differences = [
            f"{name} is {saved.get(name, 'missing')} there and {wanted.get(name, 'missing')} here"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
            and not (name.partition(".")[0] in may_lack and not (name in saved and name in wanted))
        ]
        if differences:
            more = f" (and {len(differences) - 1} more differ)" if len(differences) > 1 else ""
            raise ValueError(
                f"checkpoint {path} is of another model: "
                f"{differences[0]}{more}; use the config it was saved with, or another workdir"
            )
        lacking = {name.partition(".")[0] for name in wanted.keys() - saved.keys()}

        def is_lacking(keys: Sequence[Any], _: Any = None) -> bool:
            return _name(keys) in lacking

        return jax.tree_util.tree_map_with_path(
            lambda keys, part: None if is_lacking(keys) else part,
            abstract_state,
            is_leaf=is_lacking,
            is_leaf_takes_path=True,
        )


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # No sharding file: it would name the mesh's axes and devices.
    arrays = ocp.type_handlers.ArrayHandler(
        enable_write_sharding_file=False,
        # Replicas share the writing of what is large. Cutting a part for each compiles a program
        # for each shape and device, for which the first save would otherwise wait for seconds.
        min_slice_bytes_for_replica_parallel=32 * 2**20,
    )
    return ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        # Trained weights shrink by under a tenth; the training loop needs the cores more.
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (LazyArray, LazyHandler())
        ),
    )


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    # Not asyncio.run: it looks through the tasks of all threads, which Orbax's change meanwhile.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _first_error(written: Sequence[Any]) -> Exception | None:
    """Returns what the first future failed with, or None, when nothing is being written."""
    errors = []
    for future in written:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    return errors[0] if errors else None


def _reason(error: BaseException) -> str:
    """Returns why writing failed, in a few words on one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # as TensorStore tells it
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _describe(tree: Any) -> dict[str, str]:
    """Returns {'params.layer.kernel': 'float32[4, 8]'} of a tree of things with shape and dtype."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        _name(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


def _name(path: Sequence[Any]) -> str:
    return ".".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
