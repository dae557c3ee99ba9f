"""Checkpoints of a run: saved asynchronously, verified on load, restored onto any mesh.

`checkpoint.layout` describes the files of a checkpoint. They do not depend on the mesh or the
shardings. Only the chunk boundaries on disk follow the shards, which are written in parallel, and
reading ignores them. Nothing in a checkpoint is unpickled.

A checkpoint is complete or absent even if the process is killed, because directories are renamed
only when they are complete:

    300.orbax-checkpoint-tmp-1/            being written: arrays, JSON files, then checksums
        |  rename
        v
    300/                                   complete
        |  rename
        v
    300.orbax-checkpoint-tmp-deleted-4/    being deleted

Orbax writes and reads the arrays (checkpoint/state_files.py). This module decides when to commit a
checkpoint and how to handle a failure; checkpoint/directory.py changes the files. The first process
decides and broadcasts the result to the others.

Orbax's own CheckpointManager is not used. If one process cannot write, that process skips the
barrier at which the others wait until a timeout, and they never learn the reason. It also neither
verifies the contents of files with checksums nor falls back to an older checkpoint on damage.

A save takes these steps:

    main thread, all processes      `save`: copies the arrays and starts to write them
    Orbax's threads, all processes  write the shards of this process
    writer thread, all processes    `_write`: waits for the shards, reports errors to process 0
    writer thread, process 0        `commit`: writes JSON files and checksums, renames
                                    `drop_old`: deletes old checkpoints
                                    `publish`: copies the changes to an object store, if any
    main thread, all processes      `_finish`, in the next `save`, `restore` or `wait`: records
                                    the result
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from checkpoint.checksums import find_damage
from checkpoint.config import CheckpointConfig
from checkpoint.directory import CheckpointDirectory
from checkpoint.errors import WRITE_ERRORS, SaveError, first_error, reason_of
from checkpoint.layout import (
    CONFIG,
    DATA_STATE,
    DIVERGED_SUFFIX,
    METRICS,
    best_steps,
    read_data_state,
)
from checkpoint.state_files import StateFiles
from distributed.messages import LONGEST_START_S, Exchange
from untrusted.messages import sentence_of

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in one directory.

    With several processes, all of them must call the same methods in the same order, and
    `directory` must be on a file system that all of them share.

    A failed save (a full disk, a missing permission, an I/O error) is logged as one error on every
    process, and its partial files are removed. Only `wait` raises it.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        publish: Callable[[], object] | None = None,
    ):
        """Open a directory of checkpoints, and create it if it does not exist.

        Args:
            directory: directory, usually `WORKDIR/checkpoints`.
            publish: called on the first process after changes of the directory, to copy them to
                another place. A save whose copy fails with an OSError or ValueError has failed, but
                its checkpoint stays in the directory.

        Raises:
            ValueError: checkpoints cannot be stored there; see `checkpoint.paths.check_path`.
            OSError: the directory cannot be created or read.
        """
        self._config = config
        self._publish = publish
        self._exchange = Exchange(config.timeout_s)
        # The timeout is for saves. Reading may take much longer on one host, whose file system is
        # cold or busy.
        self._reading = Exchange(LONGEST_START_S)
        self._state_files = StateFiles()
        self._directory = CheckpointDirectory(Path(directory).absolute(), config, self._state_files)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._being_saved: Future | None = None
        self._failure: SaveError | None = None  # error of the newest save
        self._has_failed = False  # whether any save has failed
        self._skipped: list[int] = []  # damaged checkpoints, set aside by the next save
        #: Value of best_metric by step, for each existing checkpoint; None if it has none.
        self._scores = dict(self._exchange.on_first(self._directory.read_scores))

    def save(
        self,
        step: int,
        state: Any,
        data_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        config: str | None = None,
        proven: int | None = None,
    ) -> bool:
        """Copy the state and save it in the background.

        If a previous save is still being written, this waits for it first. If that save failed, or
        if this one cannot start, the failure is logged and counted, but not raised.

        Args:
            step: number of training steps that produced `state`.
            state: pytree of jax.Arrays with any shardings, or of LazyArrays. The arrays may be
                donated as soon as this returns; LazyArrays must stay readable until `wait`
                returns.
            data_state: position in the data, as JSON-serializable values. It must be the same
                on all processes; the first process writes it.
            metrics: metrics of an evaluation of `state`, or None if it was not evaluated. A
                checkpoint without metrics is never among the best.
            config: full config of the run as YAML, or None to store none.
            proven: step of the newest checkpoint whose parameters later steps have used without a
                problem. It is kept in case the parameters in this save turn out to be ruined.

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
        if config is not None:
            texts[CONFIG] = config
        score = self._score(metrics)
        self._finish()
        if step in self.all_steps():
            return False
        path = self._directory.new_temporary_path(step)
        try:
            self._exchange.on_first(lambda: self._directory.prepare(path))
        except OSError as error:
            self._failure = self._save_error(step, error)
            return False
        written = self._state_files.start_writing(path, state)
        self._being_saved = self._writer.submit(
            self._write, step, path, written, texts, score, proven
        )
        return True

    def restore(
        self,
        abstract_state: Any,
        *,
        may_lack: Collection[str] = (),
        before_step: int | None = None,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Restore the newest intact checkpoint.

        A damaged checkpoint is skipped with a warning that names it and the reason. It is renamed
        to `<step>.damaged` when the next `save` is complete. A checkpoint that cannot be read is
        not skipped, because it may be intact.

        Args:
            abstract_state: state as a pytree of jax.ShapeDtypeStruct, with the shardings of
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
            OSError: a process could not read its part, or does not report whether it is intact.
        """
        self._finish()
        for step in reversed(self.all_steps()):
            if before_step is not None and step >= before_step:
                continue
            path = self._directory.path / str(step)
            damage = self._find_damage(path)
            if damage is not None:
                logger.warning("Skipping checkpoint %s: %s.", path, damage)
                self._skipped.append(step)
                continue

            def read(path: Path = path) -> tuple[Any, dict[str, Any]]:
                state = self._state_files.read(path, abstract_state, may_lack)
                return state, read_data_state(path)

            return step, *self._reading.on_all(read)
        if self._skipped and not self.all_steps():
            steps = ", ".join(map(str, sorted(self._skipped)))
            raise ValueError(
                f"all checkpoints in {self._directory.path} are damaged (steps {steps}; the log "
                "names the files); copy an intact one there, or start in another workdir"
            )
        return None

    def all_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first.

        Damaged checkpoints that `restore` has skipped are left out. A checkpoint that is being
        saved is included after the next `wait`, `save` or `restore`, so that all processes get the
        same answer.
        """
        return sorted(self._scores.keys() - set(self._skipped))

    def latest_step(self) -> int | None:
        """Return the newest of `all_steps`, or None if there are none."""
        return max(self.all_steps(), default=None)

    def best(self) -> tuple[Path, float] | None:
        """Return the best checkpoint by `checkpoint.best_metric`, and its value of the metric.

        None if no checkpoint's state was evaluated. Damaged checkpoints are left out, as in
        `all_steps`.
        """
        scores = {step: self._scores[step] for step in self.all_steps()}
        is_max = self._config.best_is_max
        for step in best_steps(scores, num_best=1, best_is_max=is_max):
            score = scores[step]
            assert score is not None
            return self._directory.path / str(step), score
        return None

    @property
    def last_failure(self) -> SaveError | None:
        """The failure of the newest save, or None if it succeeded; valid after `close`."""
        return self._failure

    def set_aside(self, from_step: int) -> None:
        """Set checkpoints aside whose parameters led to nonfinite steps.

        They are renamed to `<step>.diverged`, so that neither a rollback nor the next start
        resumes from them.

        Raises:
            OSError: the directory cannot be written.
        """
        self._finish()
        ruined = [step for step in self.all_steps() if step >= from_step]

        def set_aside() -> None:
            self._directory.set_aside(ruined, DIVERGED_SUFFIX)
            if self._publish is not None and ruined:
                self._publish()

        self._exchange.on_first(set_aside)
        for step in ruined:
            logger.warning("Checkpoint %s led to nonfinite steps; it is set aside.", step)
            del self._scores[step]

    def tidy(self) -> None:
        """Remove directories that a killed process left half-written or half-deleted.

        Call this only from the directory's single writer: it also removes a checkpoint that another
        run is writing.
        """
        self._exchange.on_first(self._directory.remove_half_written)

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
            self._state_files.close()
        if self._has_failed and jax.process_index() == 0:
            # Threads may have written more files after `commit` removed a failed save.
            self._directory.remove_half_written()

    def _score(self, metrics: Mapping[str, float] | None) -> float | None:
        """Return the value of best_metric, or None if there was no evaluation."""
        name = self._config.best_metric
        if metrics is not None and name not in metrics and self._config.keep_best:
            raise ValueError(
                f"checkpoint.best_metric={name!r} is not a metric of the evaluation; choose one of "
                f"{', '.join(sorted(metrics))}, or set checkpoint.keep_best=0"
            )
        return None if metrics is None else metrics.get(name)

    def _write(
        self,
        step: int,
        path: Path,
        written: Sequence[Any],
        texts: dict[str, str],
        score: Any,
        proven: int | None,
    ) -> tuple[list[tuple[int, float | None]], str | None]:
        """Complete a save; runs in the writer thread of each process.

        Args:
            written: futures of Orbax's writes on this process.
            proven: step of a checkpoint to keep in any case, or None.

        Returns:
            The score of each checkpoint that is kept, as pairs `(step, score)`; and why they could
            not be published, or None.

        Raises:
            SaveError: a process could not write its part; it is raised on all processes.
        """
        error = first_error(written)
        try:
            try:
                problem = self._exchange.gather(None if error is None else reason_of(error))
            except TimeoutError as late:
                problem = str(late)

            def commit() -> tuple[list[tuple[int, float | None]], str | None]:
                self._directory.commit(step, path, texts, damaged=self._skipped, problem=problem)
                scores = {number: self._scores[number] for number in self.all_steps()}
                remaining = self._directory.drop_old({**scores, step: score}, proven)
                return remaining, self._publish_problem()

            return self._exchange.on_first(commit)
        except OSError as failed:
            # If a bug on this process made the save fail, raise the original exception.
            if error is not None and not isinstance(error, WRITE_ERRORS):
                raise error from None
            raise self._save_error(step, failed) from error

    def _publish_problem(self) -> str | None:
        """Publish, and return why it failed, or None."""
        try:
            if self._publish is not None:
                self._publish()
        except (OSError, ValueError) as error:
            return sentence_of(error)
        return None

    def _finish(self) -> None:
        """Wait for the current save, if there is one, and record its result."""
        if self._being_saved is None:
            return
        future = self._being_saved
        self._being_saved = None
        try:
            scores, problem = future.result()
            self._scores = dict(scores)
            self._skipped = []
            self._failure = None
            if problem is not None:
                newest = max(self._scores)
                logger.error("Checkpoint %d is only on this machine: %s.", newest, problem)
                self._failure = SaveError(f"checkpoint {newest} is only on this machine: {problem}")
        except SaveError as error:
            self._failure = error

    def _save_error(self, step: int, error: OSError) -> SaveError:
        self._has_failed = True
        path = self._directory.path / str(step)
        reason = reason_of(error)
        logger.error("Checkpoint %s could not be saved: %s.", path, reason)
        return SaveError(f"checkpoint {path} could not be saved: {reason}")

    def _find_damage(self, path: Path) -> str | None:
        """Verify a checkpoint; the processes share the reading and all return the same result."""
        process = jax.process_index()
        num_processes = jax.process_count()
        damage = self._reading.on_all(lambda: find_damage(path, process, num_processes))
        return self._reading.agree(damage)
