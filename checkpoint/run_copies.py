"""Copies of runs that are in object stores: `s3://bucket/run` and `gs://bucket/run`.

Orbax 0.12 cannot write to `s3://`, and no store can rename a checkpoint when it is complete. So a
run works on a copy of its workdir on this machine, in the cache, and uploads the files from there:

    training    WORKDIR in the cache  ── files, then checksums.sha256 ──>  s3://bucket/run
    reading     WORKDIR in the cache  <── files, then checksums.sha256 ──  s3://bucket/run

A checkpoint in a store is complete exactly if it has `checksums.sha256`, which is uploaded last and
deleted first. One without it, which a killed process leaves, is never downloaded, and the next
start of the run deletes it.
"""

import argparse
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from checkpoint.checksums import CHECKSUMS_FILE
from checkpoint.layout import CHECKPOINTS, TMP_SUFFIX, steps_in
from fields.paths import cache_path, local_path
from untrusted.files import remove, try_lock
from untrusted.local_copies import LocalCopy
from untrusted.messages import sentence_of
from untrusted.stores import RemoteFile, Store

#: Files of a workdir that are about the processes of this machine.
LOCK_FILE = "lock"
_ONLY_HERE = (LOCK_FILE, "watchdog")

_RUN = re.compile(r"(?:s3|gs)://[^/]+/[^*?\[]+")
_CHECKPOINT_URL = re.compile(rf"(.+)/{CHECKPOINTS}(?:/(\d+))?")
_STEP = re.compile(rf"{CHECKPOINTS}/(\d+)/.+")


def is_run_url(text: str) -> bool:
    """Return whether a text is the URL of a folder of a store that may contain a run."""
    return _RUN.fullmatch(text) is not None


def copy_of_run(url: str) -> LocalCopy:
    """Return the copy of a run; nothing is transferred.

    Raises:
        ValueError: The package for the store is missing.
    """
    return LocalCopy(Store(url), _copies(), marker_of=_marker_of)


def is_copy(path: Path) -> bool:
    """Return whether a path is that of a copy, which does not follow its store."""
    return path.is_relative_to(_copies())


def _copies() -> Path:
    return cache_path() / "stores"


def local_run(url: str, steps: Callable[[list[int]], Collection[int]] | None = None) -> Path:
    """Download a run, or one of its checkpoints, and return the path of the copy.

    Args:
        url: URL of the run or of a checkpoint.
        steps: chooses the checkpoints to download from those that are complete, oldest first; None:
            the newest, or the one of the URL.

    Raises:
        ValueError: The store has no such run, or refuses access.
        ConnectionError: The store cannot be reached.
    """
    match = _CHECKPOINT_URL.fullmatch(url.rstrip("/"))
    copy = copy_of_run(match[1] if match else url)
    if match is None or match[2] is None:
        download_run(copy, steps or (lambda complete: complete[-1:]))
        return copy.directory
    download_run(copy, lambda complete: [int(match[2])])
    return copy.directory / CHECKPOINTS / match[2]


def run_path(text: str, *, steps: Callable[[list[int]], Collection[int]] | None = None) -> Path:
    """Return the path of a run that a command reads; the `type` of an argparse argument.

    A run in a store is downloaded; see `local_run`.

    Raises:
        argparse.ArgumentTypeError: It is another URL, or the run cannot be downloaded.
    """
    if not is_run_url(text):
        return local_path(text)
    try:
        return local_run(text, steps)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(sentence_of(error)) from error


#: Returns a path as `run_path`; of a run in a store, all checkpoints are downloaded.
whole_run_path = functools.partial(run_path, steps=lambda complete: complete)
#: Returns a path as `run_path`; of a run in a store, no checkpoint is downloaded.
records_path = functools.partial(run_path, steps=lambda complete: ())


def download_run(copy: LocalCopy, steps: Callable[[list[int]], Collection[int]]) -> None:
    """Bring a copy to the state of the store, unless a run on this machine is writing the copy.

    Args:
        steps: chooses the checkpoints to download from those that are complete, oldest first.

    Raises:
        ValueError: The store has no such run or checkpoint; or see `Store`.
        ConnectionError: The store cannot be reached.
    """
    with copy.locked():
        if not _is_in_use(copy.directory):
            copy.pull_chosen(functools.partial(_choose, copy.store.url, steps))


def _choose(
    url: str, steps: Callable[[list[int]], Collection[int]], files: Mapping[str, RemoteFile]
) -> tuple[Mapping[str, RemoteFile], Callable[[str], bool]]:
    """Return the arguments of `LocalCopy.pull`; the run may delete an old checkpoint meanwhile."""
    complete = _complete_steps(files)
    chosen = {*steps(complete)}
    if not files:
        raise ValueError(f"{url} has no files; correct the URL of the run")
    if not chosen <= {*complete}:
        raise ValueError(
            f"{url} has no complete checkpoint of step {min(chosen)}, but of "
            f"{', '.join(map(str, complete)) or 'none'}; choose one of these"
        )
    # A checkpoint that is being uploaded is not there yet.
    there = {name: file for name, file in files.items() if _step_of(name) in (None, *complete)}
    return there, functools.partial(_is_shared, steps=chosen)


def open_run_copy(copy: LocalCopy) -> None:
    """Bring the copy of a run that is going to train to the state of the store.

    The caller holds the lock of the run. Checkpoints that could not be uploaded are kept if nobody
    else has continued the run.

    Raises:
        ValueError: See `Store`.
        ConnectionError: The store cannot be reached.
    """
    with copy.locked():
        files = copy.store.list()
        complete = _complete_steps(files)
        for name in files:
            if _step_of(name) not in (None, *complete):
                copy.store.delete(name)
        known = {_step_of(name) for name in copy.known()}
        if not known.issuperset(complete):
            for step in {*steps_in(copy.directory / CHECKPOINTS)} - {*complete}:
                remove(copy.directory / CHECKPOINTS / str(step))
        there = {name: file for name, file in files.items() if _step_of(name) in (None, *complete)}
        copy.pull(there, lambda name: _is_shared(name, complete))


def upload_records(copy: LocalCopy) -> None:
    """Upload the files outside `checkpoints/` that have changed.

    Raises:
        ValueError: See `Store`.
        ConnectionError: The store cannot be reached.
    """
    names = (name for name in _names(copy.directory) if not _is_of_checkpoints(name))
    copy.push(names, lambda name: not _is_of_checkpoints(name))


def upload_checkpoints(copy: LocalCopy) -> None:
    """Upload the complete checkpoints that the store lacks, then delete those that are not here.

    Raises:
        ValueError: See `Store`.
        ConnectionError: The store cannot be reached.
    """
    complete = [
        step
        for step in steps_in(copy.directory / CHECKPOINTS)
        if (copy.directory / _marker(step)).exists()
    ]
    names = filter(_is_of_checkpoints, _names(copy.directory))
    copy.push((n for n in names if _step_of(n) in (None, *complete)), _is_of_checkpoints)


def _names(directory: Path) -> Iterable[str]:
    """Yield the names of the files of a workdir that its store has, too."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if _is_shared(name) and path.is_file() and not path.is_symlink():
            yield name


def _is_shared(name: str, steps: Collection[int] | None = None) -> bool:
    """Return whether a file is both in the store and in a copy.

    Args:
        steps: steps of the checkpoints that the copy has; None: all. With steps, checkpoints that
            were set aside are only in the store.
    """
    first = name.partition("/")[0]
    is_temporary = TMP_SUFFIX in name or name.rpartition("/")[2].startswith(".")
    if first in _ONLY_HERE or is_temporary:
        return False
    return steps is None or not _is_of_checkpoints(name) or _step_of(name) in steps


def _is_of_checkpoints(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/")


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _marker(step: int) -> str:
    return f"{CHECKPOINTS}/{step}/{CHECKSUMS_FILE}"


def _marker_of(name: str) -> str | None:
    step = _step_of(name)
    return None if step is None else _marker(step)


def _complete_steps(names: Collection[str]) -> list[int]:
    steps = {_step_of(name) for name in names} - {None}
    return sorted(step for step in steps if step is not None and _marker(step) in names)


def _is_in_use(directory: Path) -> bool:
    """Return whether a run on this machine holds the lock of a workdir."""
    file = directory / LOCK_FILE
    try:
        with open(file, "rb") as stream:
            return not try_lock(stream, file)
    except FileNotFoundError:
        return False
