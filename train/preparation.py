"""Prepares a run for its training loop, for the command and for Python alike.

built run ──lock──> compiled ──> restored or initialized ──> open logs ──> loop.train
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from distributed.messages import LONGEST_START_S, Exchange
from sharding.compiler_options import describe_options
from train import loop
from train.build import BuiltRun
from train.lifecycle.phases import Phases
from train.lifecycle.restore import RestoredRun, restore_or_initialize
from train.lifecycle.watchdog import Watchdog
from train.lifecycle.workdir import write_run_files
from train.lifecycle.workdir_lock import lock
from train.references import add_references
from train.run.run import Run
from train.run.run_facts import write_run_facts

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """The arguments of the training loop that a built run does not have.

    Attributes:
        start_id: identifies this start: the same on all processes.
    """

    restored: RestoredRun
    logs: loop.Logs
    start_id: str


@contextlib.contextmanager
def prepare(built: BuiltRun, phases: Phases) -> Iterator[PreparedRun]:
    """Compile the steps of a run, restore its state, and hold the lock of its workdir in the block.

    Raises:
        ValueError: the compiled steps do not fit into memory, no checkpoint is intact, or the
            workdir is not the same directory on all processes.
        OSError: a file cannot be read or written, or another run has the workdir.
    """
    run = built.run
    workdir = built.options.workdir
    with contextlib.ExitStack() as stack:
        start_id = stack.enter_context(_locked(built))
        with phases("compile"):
            run.compile()
            if built.options.is_verbose:
                _log.info("%s", describe_options(run.compiler_options()))
            built.planner.check_compiled(run)
        restored = restore(built, phases)
        stack.callback(restored.batches.close)
        memory = built.planner.facts(run)

        def write_files_and_open_logs() -> loop.Logs:
            write_run_files(workdir, run, built.corpus, built.source, built.planner.report)
            write_run_facts(workdir, run, memory)
            return loop.open_logs(run, restored.step, workdir, phases)

        with contextlib.ExitStack() as on_error:
            on_error.callback(restored.checkpoints.close)
            restored.checkpoints.tidy()
            # All processes are ready before the watchdog starts to limit the time of a step.
            logs = Exchange(LONGEST_START_S).on_all(write_files_and_open_logs)
            on_error.pop_all()
        yield PreparedRun(restored=restored, logs=logs, start_id=start_id)


def _locked(built: BuiltRun) -> contextlib.AbstractContextManager[str]:
    """Return the lock of a workdir; one in a store is locked already."""
    if built.options.store is not None:
        return contextlib.nullcontext(built.options.store.start_id)
    return lock(
        built.options.workdir,
        timeout_s=built.run.config.train.start_timeout_s,
        is_shared=not built.options.is_fast_dev_run,
    )


def restore(built: BuiltRun, phases: Phases) -> RestoredRun:
    """Return the state of a run, and add the reference's outputs to its examples if needed."""
    run = built.run
    workdir = built.options.workdir
    store = built.options.store
    publish = None if store is None else store.publish
    with phases("restore"):
        restored = restore_or_initialize(run, built.corpus, workdir, built.source, publish)
        add_references(run, built.corpus, restored.state.params, restored.step, workdir)
    return restored


def start_watchdog(run: Run, workdir: Path, start_id: str, phases: Phases) -> Watchdog:
    """Start the threads that end this process if it hangs."""
    config = run.config
    return Watchdog(
        workdir / "watchdog",
        phases,
        process=jax.process_index(),
        num_processes=jax.process_count(),
        run_id=start_id,
        timeout_s=config.train.failure_timeout_s,
        save_timeout_s=config.checkpoint.timeout_s,
    )
