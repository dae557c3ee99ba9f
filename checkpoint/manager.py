"""Checkpoints of a run: saved asynchronously, verified on load, restored onto any mesh.

`checkpoint.layout` describes the files of a checkpoint. They do not depend on the mesh or the
shardings. Only the chunk boundaries on disk follow the shards, which are written in parallel, and
reading ignores them. Nothing in a checkpoint is unpickled.

A checkpoint is complete or absent, whenever the process is killed, because directories are renamed
only when they are complete:

    300.orbax-checkpoint-tmp-1/            being written: arrays, JSON files, then checksums
        |  rename
        v
    300/                                   complete
        |  rename
        v
    300.orbax-checkpoint-tmp-deleted-4/    being deleted

Orbax writes and reads the arrays. This module decides when to commit a checkpoint, which ones to
keep and how to handle a failure. The first process decides and broadcasts the result to the others.
Orbax's own manager is not used: if one process cannot write, it leaves the others waiting.

A save takes these steps:

    main thread, all processes      `save`: copies the arrays and starts to write them
    Orbax's threads, all processes  write the shards of this process
    writer thread, all processes    `_write`: waits for the shards, reports errors to process 0
    writer thread, process 0        `_commit`: writes JSON files and checksums, renames
                                    `_drop_old`: deletes old checkpoints
    main thread, all processes      `_finish`, in the next `save`, `restore` or `wait`: records
                                    the result
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
from fields.field import field
from fields.section import Section
from sharding.distributed.messages import TIMEOUT_S, Exchange

#: Errors that mean that the file system failed. TensorStore reports such failures as ValueError.
#: Other exceptions are bugs and are raised.
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, section="checkpoint"):
    """When checkpoints are saved, and how many are kept.

    See docs/checkpoints.md.
    """

    every_steps: int = field(
        50,
        "Steps between checkpoints; 0: save only after the last step.",
        ge=0,
        remedy="choose a number of steps, or 0 to save at the end only",
        required=True,
    )
    every_minutes: float | None = field(
        None,
        "Also save after this many minutes, by the first process's clock. None: never; only steps "
        "count.",
        gt=0,
        lt=math.inf,
        remedy="choose a number of minutes, or None to count steps only",
    )
    max_to_keep: int = field(
        3,
        "How many of the newest checkpoints to keep. With 1, there is no older one if it is "
        "damaged.",
        ge=1,
        remedy="choose 2 or more to have another one if the newest is damaged",
        required=True,
    )
    keep_best: int = field(
        0,
        "How many of the best checkpoints to keep in addition, by `best_metric`.",
        ge=0,
        remedy="choose 0 to keep only the newest",
    )
    best_metric: str = field(
        "eval_loss",
        "Metric of the evaluation that ranks checkpoints: `eval_loss` or another `eval_...`.",
    )
    best_is_max: bool = field(False, "True: larger values of `best_metric` are better.")
    timeout_s: float = field(
        TIMEOUT_S,
        "Seconds after which a save counts as hung and fails.",
        gt=0,
        lt=math.inf,
        remedy="choose several times the duration of a save in seconds",
    )


class SaveError(OSError):
    """A checkpoint could not be saved; the message names the checkpoint and the reason."""


class Checkpoints:
    """The checkpoints in one directory.

    With several processes, all of them must call the same methods in the same order, and
    `directory` must be on a file system that all of them share.

    A failed save (a full disk, a missing permission, an I/O error) is logged as one error on every
    process, and its partial files are removed. Only `wait` raises it.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig):
        """Open a directory of checkpoints, and create it if it does not exist.

        Args:
            directory: the directory, usually `WORKDIR/checkpoints`.
            config: when to save and how many checkpoints to keep.
        """
        keep_quiet()
        self._directory = Path(directory).absolute()
        self._config = config
        self._exchange = Exchange(config.timeout_s)
        self._handler = _state_handler()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._being_saved: Future | None = None
        self._failure: SaveError | None = None
        self._num_tries = 0
        self._num_failed_saves = 0
        self._passed_over: list[int] = []  # damaged checkpoints, deleted by the next complete save
        #: Value of best_metric by step, for each existing checkpoint; None if it has none.
        self._scores = dict(self._exchange.on_first(self._read_scores))

    def save(
        self,
        step: int,
        state: Any,
        data_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Copy the state and save it in the background.

        If a previous save is still being written, this waits for it first. If that save failed, or
        if this one cannot start, the failure is logged and counted, but not raised.

        Args:
            step: the number of training steps that produced `state`.
            state: a pytree of jax.Arrays with any shardings, or of LazyArrays. The arrays may be
                donated as soon as this returns; LazyArrays must stay readable until `wait`
                returns.
            data_state: the position in the data, as JSON-serializable values. It must be the same
                on all processes; the first process writes it.
            metrics: metrics of an evaluation of `state`, or None if it was not evaluated. A
                checkpoint without metrics is never among the best.

        Returns:
            Whether the save was started: False if `step` already has a checkpoint or the
            directory cannot be written.

        Raises:
            ValueError: `metrics` does not contain `checkpoint.best_metric`, and
                `checkpoint.keep_best` is more than 0.
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
        # Returns as soon as the arrays are copied. Orbax writes them in its own threads.
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
        """Restore the newest intact checkpoint.

        A damaged checkpoint is skipped with a warning that names it and the reason. It is deleted
        when the next `save` is complete.

        Args:
            abstract_state: the state as a pytree of jax.ShapeDtypeStruct, with the shardings of
                the current mesh. Each device reads its own shard.
            may_lack: top-level fields of the state (the first parts of the arrays' names) that
                either the checkpoint or `abstract_state` may lack. A field that the checkpoint
                lacks is None in the returned state; one that `abstract_state` lacks is ignored.
            before_step: ignore checkpoints of this step and later ones.

        Returns:
            `(step, state, data_state)`, or None if there are no checkpoints.

        Raises:
            ValueError: all checkpoints are damaged, or the newest intact one has other names,
                shapes or dtypes than `abstract_state`.
            OSError: a process does not report whether its part of the files is intact.
        """
        self._finish()
        for step in reversed(self.all_steps()):
            if before_step is not None and step >= before_step:
                continue
            path = self._directory / str(step)
            damage = self._find_damage(path)
            if damage is not None:
                logger.warning("Skipping checkpoint %s: %s.", path, damage)
                self._passed_over.append(step)
                continue
            there = self._check_same_structure(path, abstract_state, may_lack)
            args = ocp.args.PyTreeRestore(
                there,
                restore_args=ocp.checkpoint_utils.construct_restore_args(there),
                # The checkpoint may have more fields; the check above requires them in may_lack.
                partial_restore=True,
            )
            state = self._handler.restore(epath.Path(path / STATE), args=args)
            return step, state, read_data_state(path)
        if self._passed_over and not self.all_steps():
            steps = ", ".join(map(str, sorted(self._passed_over)))
            raise ValueError(
                f"all checkpoints in {self._directory} are damaged (steps {steps}; the log names "
                "the files); copy an intact one there, or start in another workdir"
            )
        return None

    def all_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first.

        Damaged checkpoints that `restore` has skipped are left out. A checkpoint that is being
        saved is included after the next `wait`, `save` or `restore`, so that all processes get the
        same answer.
        """
        return sorted(self._scores.keys() - set(self._passed_over))

    def latest_step(self) -> int | None:
        """Return the newest of `all_steps`, or None if there are none."""
        return max(self.all_steps(), default=None)

    @property
    def num_failed_saves(self) -> int:
        """The number of failed saves, of those that have been waited for."""
        return self._num_failed_saves

    @property
    def last_failure(self) -> SaveError | None:
        """The failure of the newest save, or None if it succeeded; valid after `close`."""
        return self._failure

    def tidy(self) -> None:
        """Remove directories that a killed process left half-written or half-deleted.

        Call this only from the directory's single writer: it also removes a checkpoint that another
        run is writing.
        """
        self._exchange.on_first(self._remove_half_written)

    def wait(self) -> None:
        """Wait until the current save is complete.

        Raises:
            SaveError: the newest save failed.
        """
        self._finish()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for the current save and free the threads; ends the use of this object."""
        try:
            self._finish()
        finally:
            self._writer.shutdown()
            self._handler.close()
        if self._failure is not None and jax.process_index() == 0:
            # Threads may have written more files after `_commit` removed the failed save.
            self._remove_half_written()

    def _read_scores(self) -> list[tuple[int, float | None]]:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = self._config.best_metric
        steps = steps_in(self._directory)
        return [(step, read_metrics(self._directory / str(step)).get(name)) for step in steps]

    def _score(self, metrics: Mapping[str, float] | None) -> float | None:
        """Return the value of best_metric, or None if there was no evaluation."""
        name = self._config.best_metric
        if metrics is not None and name not in metrics and self._config.keep_best:
            raise ValueError(
                f"checkpoint.best_metric={name!r} is not a metric of the evaluation; choose one of "
                f"{', '.join(sorted(metrics))}, or set checkpoint.keep_best=0"
            )
        return None if metrics is None else metrics.get(name)

    def _prepare(self, path: Path) -> None:
        """Create the temporary directory of a save; runs on the first process."""
        self._remove_half_written()
        (path / STATE).mkdir(parents=True)

    def _write(
        self, step: int, path: Path, written: Sequence[Any], texts: dict[str, str], score: Any
    ) -> list[tuple[int, float | None]]:
        """Complete a save; runs in the writer thread of each process.

        Args:
            step: the step of the checkpoint.
            path: its temporary directory.
            written: futures of Orbax's writes on this process.
            texts: contents of the JSON files by name.
            score: value of best_metric, or None.

        Returns:
            The score of each checkpoint that is kept, as pairs `(step, score)`.

        Raises:
            SaveError: a process could not write its part; it is raised on all processes.
        """
        error = _first_error(written)
        try:
            try:
                problem = self._exchange.gather(None if error is None else _reason(error))
            except TimeoutError as late:
                problem = str(late)
            return self._exchange.on_first(lambda: self._commit(step, path, texts, score, problem))
        except OSError as failed:
            # If a bug on this process made the save fail, raise the original exception.
            if error is not None and not isinstance(error, _WRITE_ERRORS):
                raise error from None
            raise self._save_error(step, failed) from error

    def _commit(
        self, step: int, path: Path, texts: dict[str, str], score: Any, problem: str | None
    ) -> list[tuple[int, float | None]]:
        """Commit a checkpoint, or remove it if a process failed; runs on the first process.

        Args:
            step: the step of the checkpoint.
            path: its temporary directory.
            texts: contents of the JSON files by name.
            score: value of best_metric, or None.
            problem: the processes' errors, or None if all of them wrote their part.

        Returns:
            The score of each checkpoint that is kept, as pairs `(step, score)`.
        """
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
        """Delete checkpoints that need not be kept; runs on the first process.

        Args:
            scores: value of best_metric or None, by step.

        Returns:
            The scores of the remaining checkpoints, as pairs `(step, score)`.
        """
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
        """Delete a checkpoint; it is renamed first, so that it is never visible half-deleted."""
        path = self._directory / str(step)
        doomed = path.with_name(f"{step}{TMP_SUFFIX}-deleted-{self._num_tries}")
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_half_written(self) -> None:
        for path in self._directory.glob(f"*{TMP_SUFFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _finish(self) -> None:
        """Wait for the current save, if there is one, and record its result."""
        if self._being_saved is None:
            return
        future = self._being_saved
        self._being_saved = None
        try:
            self._scores = dict(future.result())
            self._passed_over = []
            self._failure = None
        except SaveError as error:
            self._fail(error)

    def _fail(self, failure: SaveError) -> None:
        self._failure = failure
        self._num_failed_saves += 1

    def _save_error(self, step: int, error: OSError) -> SaveError:
        path = self._directory / str(step)
        reason = _reason(error)
        logger.error("Checkpoint %s could not be saved: %s.", path, reason)
        return SaveError(f"checkpoint {path} could not be saved: {reason}")

    def _find_damage(self, path: Path) -> str | None:
        """Verify a checkpoint; the processes share the reading and all return the same result."""
        process = jax.process_index()
        num_processes = jax.process_count()
        return self._exchange.agree(find_damage(path, part=process, num_parts=num_processes))

    def _check_same_structure(
        self, path: Path, abstract_state: Any, may_lack: Collection[str]
    ) -> Any:
        """Check that a checkpoint matches a state.

        Args:
            path: the checkpoint.
            abstract_state: the state, as in `restore`.
            may_lack: fields that either of them may lack, as in `restore`.

        Returns:
            `abstract_state`, with None in place of each field that the checkpoint does not have.

        Raises:
            ValueError: other names, shapes or dtypes differ.
        """
        saved = _describe(self._handler.metadata(epath.Path(path / STATE)).tree)
        wanted = _describe(abstract_state)
        differences = [
            f"{name} is {saved.get(name, 'missing')} in the checkpoint and "
            f"{wanted.get(name, 'missing')} in this run"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
            and not (name.partition(".")[0] in may_lack and not (name in saved and name in wanted))
        ]
        if differences:
            more = f" (and {len(differences) - 1} more differ)" if len(differences) > 1 else ""
            raise ValueError(
                f"checkpoint {path} does not match the model: "
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
    # No sharding file, because it would record the mesh's axes and devices.
    arrays = ocp.type_handlers.ArrayHandler(
        enable_write_sharding_file=False,
        # Replicas share the writing of arrays of at least this size. Slicing an array for its
        # replicas compiles a program for each shape and device. For small arrays, these
        # compilations would delay the first save by seconds.
        min_slice_bytes_for_replica_parallel=32 * 2**20,
    )
    return ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        # Compression shrinks trained weights by less than 10 %, and takes CPU time from training.
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (LazyArray, LazyHandler())
        ),
    )


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    # asyncio.run would iterate over the tasks of all threads while Orbax's threads change them.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _first_error(written: Sequence[Any]) -> Exception | None:
    """Wait for all futures, and return the first exception, or None if all succeeded."""
    errors = []
    for future in written:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    return errors[0] if errors else None


def _reason(error: BaseException) -> str:
    """Return the reason for a failed write, in a few words on one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # in TensorStore's messages
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
    """Return dtypes and shapes by name, as in `{'params.layer.kernel': 'float32[4, 8]'}`.

    Args:
        tree: a pytree whose leaves have a shape and a dtype; other leaves are ignored.
    """
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
