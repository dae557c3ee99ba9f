"""Trains or evaluates a model: `python -m train.main --config=FILE [--workdir=DIR]`.

`train` builds a run, restores or initializes its state, and starts the training loop. `evaluate`
builds a run, restores it, and evaluates it once. `check` builds and compiles a run, and writes
nothing into its workdir. Every error before the first step is reported in one sentence, on all
processes.
"""

from train.lifecycle.stop_signals import SIGNALS, StopSignals
from untrusted.commands import command_parser, print_error, wants_traceback
from untrusted.streams import protect_output

if __name__ == "__main__":
    # First, because the imports below take seconds, in which a signal may arrive.
    protect_output()
    stop_signals = StopSignals()
    stop_signals.watch()

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn

import jax

from checkpoint.errors import ReadError
from checkpoint.run_copies import is_run_url
from convert.options import add_permissions, read_options
from data.examples import BrokenExample
from distributed.launchers import read_distributed_env
from distributed.messages import may_pass
from fields.paths import check_local
from fields.types import check_no_nul
from train import evaluation, loop
from train.build import BuiltRun, RunOptions, build_run
from train.config import config_files, reference
from train.config.overrides import Overrides
from train.lifecycle.divergence import Diverged
from train.lifecycle.exit_codes import (
    DIVERGED,
    FAILED,
    FINAL,
    FINISHED,
    REFUSED,
    STOPPED,
    UNSAVED,
)
from train.lifecycle.phases import Phases
from train.lifecycle.restore import initial_state, restore_to_evaluate
from train.lifecycle.store_workdir import StoreWorkdir
from train.preparation import prepare, restore, start_watchdog
from train.references import compute_references, set_references
from train.reporting.ending import describe_end
from train.reporting.trackers import has_hanging_trackers
from train.run.run import Run
from train.state.train_state import TrainState

_log = logging.getLogger("train.main")  # also when this file is the program

_LOGGED_FOLDERS = ("checkpoint", "data", "distributed", "models", "pipeline", "sharding", "train")


class Refused(Exception):
    """The run cannot start; its message was printed.

    Attributes:
        exit_code: see train/lifecycle/exit_codes.py.
    """

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


def main(argv: list[str] | None = None, signals: StopSignals | None = None) -> int:
    """Run the command.

    Args:
        argv: command-line arguments; by default `sys.argv[1:]`.
        signals: records stop signals. The caller restores the signal handlers; by default this
            function creates it and restores them.

    Returns:
        The exit code; see train/lifecycle/exit_codes.py.
    """
    try:
        options = parse_arguments(argv)
        logging.basicConfig(format="%(message)s", force=True)
        for folder in _LOGGED_FOLDERS:
            logging.getLogger(folder).setLevel(logging.INFO)
        with ExitStack() as stack:
            signals = signals or stack.enter_context(StopSignals())
            if options.is_check:
                return check(options)
            return evaluate(options) if options.is_evaluation else train(options, signals)
    except Refused as refused:
        return refused.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "train.main",
        epilog=reference.help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument("--workdir", help="directory for the run's files; default: runs/<config>")
    parser.add_argument(
        "--deepspeed", help="a DeepSpeed JSON; --config.* on the command line takes precedence"
    )
    parser.add_argument(
        "--mode",
        choices=("train", "eval"),
        default="train",
        help="train, or evaluate the newest checkpoint",
    )
    parser.add_argument(
        "--fast_dev_run", action="store_true", help="try 3 steps; does not use the workdir"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="end before the first step, with exit code 0 if the run can start; writes only caches",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also log the compiler's options, with reasons"
    )
    add_permissions(parser)
    return parser


def parse_arguments(argv: list[str] | None) -> RunOptions:
    """Return the options of a command line."""
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    if args.mode == "eval" and args.fast_dev_run:
        parser.error("--fast_dev_run is for training; use --config.eval.num_batches=N instead")
    if args.check and (args.mode == "eval" or args.fast_dev_run):
        parser.error("--check ends before the first step; leave --mode=eval and --fast_dev_run out")
    with refusing_bad_input():
        for name in ("config", "workdir", "deepspeed"):
            check_no_nul(f"--{name}", str(getattr(args, name)))
            if name != "workdir" or not is_run_url(str(args.workdir)):
                check_local(f"--{name}", getattr(args, name))
        workdir = str(args.workdir or config_files.default_workdir(args.config))
        if args.check and is_run_url(workdir):
            raise ValueError(
                f"--check: --workdir={workdir} is in an object store, which a check does not read; "
                "leave --workdir out, or name a local directory"
            )
        store = StoreWorkdir(workdir) if is_run_url(workdir) else None
        return RunOptions(
            config=args.config,
            overrides=Overrides.parse(others),
            workdir=Path(workdir) if store is None else store.directory,
            deepspeed=args.deepspeed,
            is_evaluation=args.mode == "eval",
            is_fast_dev_run=args.fast_dev_run,
            is_check=args.check,
            is_verbose=args.verbose,
            reading=read_options(args),
            store=store,
        )


def train(options: RunOptions, signals: StopSignals) -> int:
    """Train from the newest checkpoint of the workdir, or from the start; return the exit code."""
    phases = Phases()
    with ExitStack() as stack:
        if options.is_fast_dev_run:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            signals.remove_at_exit(Path(directory))
            options = dataclasses.replace(options, workdir=Path(directory), store=None)
        store = options.store
        if store is not None:
            stack.enter_context(closing(store))
        with refusing_bad_input():
            built = build_run(options)
            run = built.run
            prepared = stack.enter_context(prepare(built, phases))
        watchdog = start_watchdog(run, options.workdir, prepared.start_id, phases)
        stack.enter_context(closing(watchdog))
        problem: Exception | None = None
        try:
            code = loop.train(
                run,
                built.corpus,
                prepared.restored,
                options.workdir,
                prepared.logs,
                saves=not options.is_fast_dev_run,
                phases=phases,
                signals=signals,
            ).exit_code
            if store is not None and not store.finish():
                code = UNSAVED
        except (Diverged, BrokenExample, ReadError) as error:
            problem = error
            code = DIVERGED if isinstance(error, Diverged) else FAILED
        if jax.process_index() == 0 and not options.is_fast_dev_run:
            place = options.workdir if store is None else store.url
            _log.info("%s", _describe_end(run, place, prepared.logs))
        if problem is not None:
            print_error(problem)
        return code


def check(options: RunOptions) -> int:
    """Check everything that a run needs before it restores its state; return the exit code.

    Prints the lines that the run would begin with, among them the memory of the compiled steps.
    """
    with refusing_bad_input():
        built = build_run(options)
        built.run.compile()
        built.planner.check_compiled(built.run)
    if jax.process_index() == 0:
        print("config is valid")
    return FINISHED


def _describe_end(run: Run, workdir: Path | str, logs: loop.Logs) -> str:
    goodput = logs.goodput.summary()
    return describe_end(
        workdir,
        step=goodput.starts[-1].last_step,
        num_steps=run.config.train.num_steps,
        metrics=logs.metrics.latest,
        goodput=goodput.fraction,
    )


def evaluate(options: RunOptions) -> int:
    """Evaluate the newest checkpoint of the workdir and print its scores; return the exit code."""
    phases = Phases()
    with refusing_bad_input():
        built = build_run(options)
        step, state = _restore_to_evaluate(built, phases)
    try:
        scores = evaluation.evaluate(built.run, built.corpus, state, phases) or {}
    except BrokenExample as error:
        print_error(error)
        return FAILED
    if jax.process_index() == 0:
        for line in evaluation.describe_limits(built.run, built.corpus):
            _log.warning("%s", line)
        values = (f"{name} {value:.6g}" for name, value in scores.items())
        print(" ".join([f"step {step}", *values]))
    return FINISHED


def _restore_to_evaluate(built: BuiltRun, phases: Phases) -> tuple[int, TrainState]:
    """Return the newest step and its state, which may not have seen the data to evaluate on."""
    if len(built.corpus.train):
        restored = restore(built, phases)
        return restored.step, restored.state
    run = built.run
    with phases("restore"):
        if run.functions.reference is not None:
            initial = initial_state(run, built.corpus, built.source)
            set_references(built.corpus, compute_references(run, built.corpus, initial.params))
            jax.tree.map(lambda leaf: leaf.delete(), initial)  # there may be no room for two
        return restore_to_evaluate(run, built.corpus, built.options.workdir, built.source)


@contextlib.contextmanager
def refusing_bad_input() -> Iterator[None]:
    """Print a ValueError or OSError of the block as one error message, and raise Refused."""
    try:
        yield
    except (ValueError, OSError) as error:
        if wants_traceback():
            raise
        print_error(error, with_hint=True)
        raise Refused(FAILED if may_pass(error) else REFUSED) from error


def _end(code: int) -> NoReturn:
    """End the process.

    After a failure in a run with several processes it exits immediately: jax's own shutdown would
    wait for the other processes. It also does if a tracker's library would wait for a network.
    """
    for name in SIGNALS:  # another signal now would replace the exit code
        signal.signal(name, signal.SIG_IGN)
    has_failed = code not in (*FINAL, STOPPED)
    if has_hanging_trackers() or has_failed and read_distributed_env(os.environ) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        exit_code = main(signals=stop_signals)
    except Exception:
        traceback.print_exc()
        exit_code = FAILED
    _end(exit_code)
