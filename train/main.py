"""Entry point for training and evaluation: `python -m train.main --config=FILE [--workdir=DIR]`.

`main` sets up a run, finds its position (the beginning or a checkpoint), and starts the training
loop. Every error before the first step is reported in one sentence, on all processes.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import traceback
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax

from convert.source import Source, read_source
from data.corpus import load_corpus
from data.examples import BrokenExample, Corpus
from sharding.distributed import startup
from sharding.distributed.messages import Exchange, may_pass
from sharding.memory import AUTO
from train import loop
from train.config import config_files, deepspeed
from train.config.checkpoint_config import inherit_config
from train.config.schema import resolve
from train.evaluation import evaluate
from train.lifecycle import workdir
from train.lifecycle.divergence import Diverged
from train.lifecycle.exit_codes import DIVERGED, FAILED, FINAL, FINISHED, REFUSED, STOPPED
from train.lifecycle.phases import Phases
from train.lifecycle.stop_signals import SIGNALS, StopSignals
from train.lifecycle.watchdog import Watchdog
from train.planning.memory_budget import budget_of
from train.planning.memory_search import MemoryPlanner
from train.run.build import Run, prepare
from train.run.compatibility import check_tokenizer
from train.run.summary import describe

ROOMS = ("checkpoint", "data", "models", "sharding", "train")
#: Hosts may take very different times to tokenize, compile and read. jax detects a lost one.
_LONGEST_START_S = 24 * 3600.0

_log = logging.getLogger("train")  # not __name__, which is "__main__" on the command line


def main(argv: list[str] | None = None, signals: StopSignals | None = None) -> int:
    """Runs the command.

    Args:
        argv: command-line arguments; by default `sys.argv[1:]`.
        signals: records stop signals. The caller restores the signal handlers; by default this
            function creates it and restores them.

    Returns:
        The exit code; see train/lifecycle/exit_codes.py.
    """
    parser = argparse.ArgumentParser(prog="python -m train.main", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument(
        "--workdir", type=Path, help="directory for the run's files; default: runs/<config>"
    )
    parser.add_argument(
        "--deepspeed", help="a DeepSpeed JSON; --config.* on the command line takes precedence"
    )
    parser.add_argument("--mode", choices=("train", "eval"), default="train")
    parser.add_argument(
        "--fast_dev_run", action="store_true", help="try 3 steps; does not use the workdir"
    )
    args, others = parser.parse_known_args(argv)
    if args.workdir is None:
        args.workdir = config_files.default_workdir(args.config)
    if args.mode == "eval" and args.fast_dev_run:
        parser.error("--fast_dev_run is for training; use --config.eval.num_batches=N instead")
    logging.basicConfig(format="%(message)s", force=True)
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.INFO)
    phases = Phases()
    with ExitStack() as stack:
        signals = signals or stack.enter_context(StopSignals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        directory = Path(scratch) if args.fast_dev_run else args.workdir
        try:
            run, corpus, source, planner = _set_up(args, config_files.overrides(others))
            if args.mode == "train":
                timeout_s, is_shared = run.config.train.start_timeout_s, not args.fast_dev_run
                held = workdir.lock(directory, timeout_s=timeout_s, is_shared=is_shared)
                start_id = stack.enter_context(held)
                with phases("compile"):
                    run.compile()
                    planner.check(run)
            with phases("restore"):
                start = workdir.find_position(run, corpus, directory, source)
            if args.mode == "train":
                start.checkpoints.tidy()
                # All processes are ready before the watchdog starts to limit the time of a step.
                ready = Exchange(_LONGEST_START_S)
                ready.on_all(
                    lambda: workdir.write_run_files(directory, run, corpus, source, planner.report)
                )
        except (ValueError, OSError) as error:
            if os.environ.get("TAIBAI_TRACEBACK"):
                raise
            hint = "(TAIBAI_TRACEBACK=1 shows where this was raised)"
            print(f"error: {error}\n{hint}", file=sys.stderr)
            return FAILED if may_pass(error) else REFUSED
        try:
            if args.mode == "eval":
                scores = evaluate(run, corpus, start.state, phases) or {}
                if jax.process_index() == 0:
                    values = (f"{name} {value:.6g}" for name, value in scores.items())
                    print(" ".join([f"step {start.step}", *values]))
                return FINISHED
            saves = not args.fast_dev_run
            with closing(_watchdog(run, directory, start_id, phases)):
                return loop.train(
                    run, corpus, start, directory, saves=saves, phases=phases, signals=signals
                )
        except (Diverged, BrokenExample) as error:
            print(f"error: {error}", file=sys.stderr)
            return DIVERGED if isinstance(error, Diverged) else FAILED


def _watchdog(run: Run, directory: Path, start_id: str, phases: Phases) -> Watchdog:
    config = run.config
    return Watchdog(
        directory / "watchdog",
        phases,
        process=jax.process_index(),
        num_processes=jax.process_count(),
        run_id=start_id,
        timeout_s=config.train.failure_timeout_s,
        save_timeout_s=config.checkpoint.timeout_s,
    )


def _set_up(
    args: argparse.Namespace, overrides: list[str]
) -> tuple[Run, Corpus, Source | None, MemoryPlanner]:
    """Builds a run without computing anything on devices.

    Args:
        args: the parsed command line.
        overrides: `section.key=value` from the command line.

    Returns:
        The run, its corpus, the `init_from` checkpoint or None, and the memory planner.
    """
    evaluates = args.mode == "eval"
    given: Any = config_files.load(args.config, overrides)
    if args.deepspeed is not None:
        overrides = [*deepspeed.read(args.deepspeed, given), *overrides]
        given = config_files.load(args.config, overrides)
    if evaluates and not (given.get("init_from") or workdir.has_checkpoint(args.workdir)):
        raise ValueError(
            f"--mode=eval: --workdir={args.workdir} has no checkpoint; train first, or set "
            "--config.init_from"
        )
    if args.fast_dev_run:
        config_files.shorten(given)
    source = read_source(given.init_from) if given.get("init_from") else None
    if source is not None:
        inherit_config(given, source, overrides)
    config = resolve(given)
    start = startup.read_distributed_env(os.environ)
    if not args.fast_dev_run and (start is None or start.process_id == 0):
        _log.info("workdir %s", args.workdir)
    jax.config.update("jax_enable_x64", config.precision.compute == "float64")
    if config.train.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(config.data.cache_path / "xla"))
    mesh = startup.start(
        config.mesh,
        start_timeout_s=config.train.start_timeout_s,
        failure_timeout_s=config.train.failure_timeout_s,
    )
    config = dataclasses.replace(config, mesh=config.mesh.resolve(mesh.size))
    if evaluates and config.memory.placement == AUTO:
        config = dataclasses.replace(config, memory=workdir.planned(args.workdir))
    if jax.process_index() > 0:
        logging.disable(logging.INFO)
    corpus = Exchange(_LONGEST_START_S).on_all(lambda: load_corpus(config.data, config.images))
    num_labels = len(corpus.labels) or None
    make = partial(prepare, mesh=mesh, vocab_size=corpus.vocab_size, num_labels=num_labels)
    planner = MemoryPlanner(make, budget_of(config.memory, mesh))
    run = make(config) if evaluates else planner.plan(config)
    check_tokenizer(run.config, run.model_config, corpus)
    workdir.check_processes_agree(run, corpus)
    if evaluates and not len(corpus.validation):
        raise ValueError(f"--mode=eval: data.name={config.data.name!r} has no validation data")
    if not args.fast_dev_run:
        workdir.check(args.workdir, run)
    _log.info("%s", "\n".join([describe(run, corpus), planner.report]).strip())
    return run, corpus, source, planner


def _end(code: int) -> NoReturn:
    """Ends the process.

    After a failure in a run with several processes it exits immediately: jax's own shutdown would
    wait for the other processes.
    """
    for name in SIGNALS:  # another signal now would replace the exit code
        signal.signal(name, signal.SIG_IGN)
    if code not in (*FINAL, STOPPED) and startup.read_distributed_env(os.environ) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        exit_code = main(signals=StopSignals())
    except Exception:
        traceback.print_exc()
        exit_code = FAILED
    _end(exit_code)
