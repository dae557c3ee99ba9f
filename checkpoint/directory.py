"""The files of a directory of checkpoints: commits, retention, deletion.

Only the first process changes files. A directory is renamed only when it is complete, so a
checkpoint is complete or absent even if the process is killed; see checkpoint/manager.py.
"""

import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from checkpoint.checksums import write_checksums
from checkpoint.config import CheckpointConfig
from checkpoint.errors import WRITE_ERRORS, reason_of
from checkpoint.layout import (
    DAMAGED_SUFFIX,
    DIVERGED_SUFFIX,
    STATE,
    TMP_SUFFIX,
    best_steps,
    read_metrics,
    steps_in,
)
from checkpoint.paths import check_path
from checkpoint.state_files import StateFiles
from untrusted.files import write_text

logger = logging.getLogger(__name__)


class CheckpointDirectory:
    """A directory of checkpoints. Only the first process may change it."""

    def __init__(self, path: Path, config: CheckpointConfig, state_files: StateFiles):
        """Describe a directory; nothing is read or created."""
        self.path = path
        self._config = config
        self._state_files = state_files
        self._num_saves = 0

    def new_temporary_path(self, step: int) -> Path:
        """Return the temporary directory of a new save; all processes call it once per save."""
        self._num_saves += 1
        return self.path / f"{step}{TMP_SUFFIX}-{self._num_saves}"

    def read_scores(self) -> list[tuple[int, float | None]]:
        """Create the directory if it does not exist, and read the scores of its checkpoints.

        Returns:
            The value of best_metric of each checkpoint, or None, as pairs `(step, score)`.

        Raises:
            ValueError: checkpoints cannot be stored there; see `check_path`.
            OSError: the directory cannot be created or read.
        """
        check_path(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        name = self._config.best_metric
        steps = steps_in(self.path)
        return [(step, read_metrics(self.path / str(step)).get(name)) for step in steps]

    def prepare(self, temporary: Path) -> None:
        """Create the temporary directory of a save."""
        self.remove_half_written()
        (temporary / STATE).mkdir(parents=True)

    def commit(
        self,
        step: int,
        temporary: Path,
        texts: Mapping[str, str],
        *,
        damaged: Collection[int],
        problem: str | None,
    ) -> None:
        """Commit a checkpoint, or remove it if a process failed.

        Args:
            texts: contents of the text files by name.
            damaged: steps of damaged checkpoints, which are set aside before the rename. They are
                not deleted, because a file that was missing or altered may have been so only on
                one host or for a moment.
            problem: processes' errors, or None if all of them wrote their part.

        Raises:
            OSError: a process failed, or the checkpoint could not be completed.
        """
        try:
            if problem is not None:
                raise OSError(problem)
            self._state_files.finalize(temporary)
            for name, text in texts.items():
                _write_file(temporary / name, text)
            write_checksums(temporary)
            self.set_aside(damaged, DAMAGED_SUFFIX)
            temporary.rename(self.path / str(step))
        except WRITE_ERRORS as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(reason_of(error)) from error

    def drop_old(
        self, scores: Mapping[int, float | None], proven: int | None
    ) -> list[tuple[int, float | None]]:
        """Delete checkpoints that need not be kept.

        Args:
            scores: value of best_metric or None, by step.
            proven: step of a checkpoint that is kept in any case, or None.

        Returns:
            The scores of the remaining checkpoints, as pairs `(step, score)`.
        """
        config = self._config
        best = best_steps(scores, num_best=config.keep_best, best_is_max=config.best_is_max)
        kept_steps = {*sorted(scores)[-config.max_to_keep :], *best, *([proven] if proven else [])}
        kept_steps &= scores.keys()
        for step in scores.keys() - kept_steps:
            try:
                self._delete(step)
            except OSError as error:
                path = self.path / str(step)
                logger.warning("Checkpoint %s cannot be deleted: %s.", path, reason_of(error))
                kept_steps |= {step} if path.exists() else set()
        return [(step, scores[step]) for step in sorted(kept_steps)]

    def set_aside(self, steps: Collection[int], suffix: str) -> None:
        """Rename checkpoints, so that no start resumes from them.

        Args:
            steps: their steps; those that no longer exist are ignored.
            suffix: DIVERGED_SUFFIX or DAMAGED_SUFFIX.
        """
        for step in steps:
            path = self.path / str(step)
            if path.exists():
                aside = path.with_name(f"{step}{suffix}")
                if suffix == DIVERGED_SUFFIX:
                    shutil.rmtree(aside, ignore_errors=True)  # left by an earlier attempt
                number = 1
                while aside.exists():  # the earlier one may have been intact
                    number += 1
                    aside = path.with_name(f"{step}{suffix}-{number}")
                path.rename(aside)

    def remove_half_written(self) -> None:
        """Remove directories that are half-written or half-deleted."""
        for path in self.path.glob(f"*{TMP_SUFFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _delete(self, step: int) -> None:
        """Delete a checkpoint; it is renamed first, so that it is never visible half-deleted."""
        path = self.path / str(step)
        renamed = path.with_name(f"{step}{TMP_SUFFIX}-deleted-{self._num_saves}")
        if path.exists():
            path.rename(renamed)
            shutil.rmtree(renamed)


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, text, reaches_disk=True)
