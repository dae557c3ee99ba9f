"""The workdir of a run: its lock, its files, and the position that the run resumes from."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
import numpy as np
from grain import DatasetIterator
from ml_collections import ConfigDict

from checkpoint.layout import steps_in
from checkpoint.manager import Checkpoints
from convert.from_hf import keep_hf_files
from convert.model_on_disk import LABELS_FILE
from convert.runs import CHECKPOINTS, CONFIG_FILE, HF_FILES
from convert.source import Source
from data.batches import train_batches
from data.examples import Corpus
from data.text.text_corpus import TextCorpus
from sharding.distributed.messages import Exchange
from sharding.memory import MemoryConfig
from train.config.config_files import differences, load, save_yaml
from train.config.schema import SECTIONS, resolve
from train.lifecycle.divergence import Diverged
from train.run.init_from import start_params
from train.run.run import Run
from train.state.train_state import MAY_LACK, TrainState

#: Exists while a run trains.
LOCK_FILE = "lock"
#: Sections and keys that a run must share with the checkpoints that it resumes from.
FIXED = (
    "init_from",
    "model",
    "data",
    "images",
    "train.seed",
    "train.init_labels",
    "train.ema_decay",
    "optimizer.name",
    "optimizer.frozen",
    "precision.params",
)
#: Keys below FIXED that may change: they only set how fast and from where data is read. The data
#: itself is compared by hash.
FREE = (
    "data.cache_dir",
    "data.mixture",
    "data.num_threads",
    "data.paths",
    "images.num_workers",
    "images.on_broken",
    "model.attention",
)

_log = logging.getLogger(__name__)


def check(workdir: Path, run: Run) -> None:
    """Check that `workdir` has no checkpoints of another run.

    Args:
        workdir: the run's directory.
        run: the run that wants to use it.

    Raises:
        ValueError: it has checkpoints of another model or other data; the message lists the keys
            that differ.
    """
    path = workdir / CONFIG_FILE
    if not path.exists() or not has_checkpoint(workdir):
        return
    saved = load(str(path))
    if "train" not in saved:
        raise ValueError(
            f"{workdir} is a converted model, not a run; start from it with "
            f"--config.init_from={workdir}, and choose another --workdir"
        )
    lines = differences(_completed(saved, run), resolved(run), FIXED)
    lines = [line for line in lines if line.partition(":")[0] not in FREE]
    if lines:
        raise ValueError(
            f"{workdir} has checkpoints of another run; these keys differ (saved -> now): "
            f"{'; '.join(lines)}. Change them back, or choose another --workdir"
        )


def check_processes_agree(run: Run, corpus: Corpus) -> None:
    """Check that all processes have the same config and the same data.

    Args:
        run: this process's run.
        corpus: this process's data.

    Raises:
        ValueError: on all processes, if one of them differs from the first.
    """
    exchange = Exchange()
    for what, value in (("config", repr(resolved(run).to_dict())), ("data", corpus.fingerprint)):
        own = hashlib.sha256(value.encode()).hexdigest()
        is_same = exchange.on_first(lambda own=own: own) == own
        problem = exchange.agree(None if is_same else f"its {what} differs from process 0")
        if problem is not None:
            raise ValueError(
                f"{problem}; start all processes with the same command, software and files"
            )


@contextlib.contextmanager
def lock(workdir: Path, *, timeout_s: float, is_shared: bool = True) -> Iterator[str]:
    """Lock `workdir` for the duration of the block, so that two runs do not overwrite each other.

    The first process of a run that was killed or requeued may live a little longer than the run, so
    this waits for it. If the holder of a lock is killed, the lock is released.

    Args:
        workdir: the run's directory; it is created if necessary.
        timeout_s: seconds to wait for another run to end.
        is_shared: False if each process has a workdir of its own.

    Yields:
        A string that identifies this start: the same on all processes, different at each start.

    Raises:
        ValueError: on all processes, if one of them does not see the first process's `workdir`.
        OSError: on all processes, if another run keeps the lock for longer, or the directory
            cannot be written.
    """
    exchange = Exchange()
    path = workdir / LOCK_FILE
    with contextlib.ExitStack() as stack:
        word = exchange.on_first(lambda: stack.enter_context(_locked(path, timeout_s)))
        if is_shared:
            blind = exchange.agree(None if _reads(path, word) else "it is not there")
            if blind is not None:
                raise ValueError(
                    f"--workdir={workdir} is not the same directory on all processes ({blind}); "
                    "choose a directory on a file system that all hosts share (in containers, one "
                    "that is mounted)"
                )
        yield word


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[str]:
    """Hold a lock file for the duration of the block; yield its content, which names the holder.

    The lock is `flock`'s, which the kernel releases when the process ends for any reason. The file
    is also deleted at the end, so a process that opened it earlier may lock a deleted file. It then
    tries again with the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    word = f"process {os.getpid()} on {socket.gethostname()} {secrets.token_hex(8)}"
    deadline_s = time.monotonic() + timeout_s
    waits = False
    while True:
        with open(path, "a+", encoding="utf-8") as file:
            holder = ""
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                holder = file.read().rpartition(" ")[0] or "another process"
            except OSError as error:
                _log.warning(
                    "%s cannot be locked (%s): do not start a second run there", path, error
                )
            # The previous holder may have deleted the file, and another process may have created a
            # new one in the meantime.
            if not holder and _is_same(file, path):
                file.truncate(0)
                file.write(word)
                file.flush()
                try:
                    yield word
                finally:
                    path.unlink(missing_ok=True)
                return
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"--workdir={path.parent} is in use by {holder or 'many'}, and still was after "
                f"{timeout_s:.0f} s; wait until that run ends, or choose another --workdir"
            )
        if holder and not waits:
            _log.warning("--workdir=%s is in use by %s: waiting", path.parent, holder)
            waits = True
        time.sleep(0.2)


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _reads(path: Path, word: str) -> bool:
    deadline_s = time.monotonic() + 10  # network file systems may show new files late
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, ValueError):
            if path.read_text(encoding="utf-8") == word:
                return True
        time.sleep(0.2)
    return False


def write_run_files(
    workdir: Path, run: Run, corpus: Corpus, source: Source | None = None, report: str = ""
) -> None:
    """Write `config.yaml`, `memory.txt`, and in `hf/` the input of `python -m convert.to_hf`.

    `hf/` contains the tokenizer, the labels of a classifier, and files of the Hugging Face model
    that the run starts from. Only the first process writes.

    Args:
        workdir: the run's directory.
        run: the run.
        corpus: its data.
        source: the checkpoint that it starts from, if there is one.
        report: the memory report.
    """
    if jax.process_index() > 0:
        return
    hf = workdir / HF_FILES
    hf.mkdir(parents=True, exist_ok=True)
    save_yaml(resolved(run), workdir / CONFIG_FILE)
    (workdir / "memory.txt").write_text(report + "\n")
    if source is not None:
        keep_hf_files(source, workdir)
    elif isinstance(corpus, TextCorpus) and Path(corpus.tokenizer.source).is_file():
        shutil.copyfile(corpus.tokenizer.source, hf / "tokenizer.json")
    if corpus.labels:
        (hf / LABELS_FILE).write_text(json.dumps(corpus.labels) + "\n")


def planned(workdir: Path) -> MemoryConfig:
    """Return the memory settings that a run with memory.placement=auto chose; else the default."""
    path = workdir / CONFIG_FILE
    return resolve(load(str(path))).memory if path.exists() else MemoryConfig()


def has_checkpoint(workdir: Path) -> bool:
    """Return whether a workdir has a checkpoint, intact or not."""
    return bool(steps_in(workdir / CHECKPOINTS))


def _completed(saved: ConfigDict, run: Run) -> ConfigDict:
    """Return a saved config with defaults for keys that were added to the code later."""
    completed = {"init_from": "", **saved.to_dict()}
    for name, section in {**SECTIONS, "model": type(run.model_config)}.items():
        fields = [f for f in dataclasses.fields(section) if f.default is not dataclasses.MISSING]
        completed[name] = {f.name: f.default for f in fields} | completed.get(name, {})
    completed["data"].pop("seed", None)
    return ConfigDict(completed)


def resolved(run: Run) -> ConfigDict:
    """Return the full config of a run, including the values that it took from the data."""
    config = run.config
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    del sections["data"]["seed"]  # it is train.seed
    own = dataclasses.asdict(run.model_config)
    model = {"name": config.model_name, "attention": config.attention, **own}
    return ConfigDict(
        {
            "init_from": config.init_from,
            "model": model,
            **sections,
            "rules": dict(config.rules),
        }
    )


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
    """Restore the newest checkpoint from before a row of bad steps.

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
        "continuing after step %d with the parameters of step %d; skipped are steps %d to %d, "
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
