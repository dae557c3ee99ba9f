"""Trains or evaluates: `python -m train.main --config=FILE --workdir=DIR`."""

import argparse
import dataclasses
import logging
import os
import sys
import tempfile
from pathlib import Path

import jax

from convert.source import Source, read_source
from data.text import TextCorpus, load_corpus
from sharding import devices
from train import config_files, loop, workdir
from train.config import resolve
from train.init_from import take_over
from train.setup import Run, check_tokenizer, describe, prepare

ROOMS = ("checkpoint", "data", "models", "sharding", "train")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after an error before step 0, said in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m train.main", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument("--workdir", required=True, type=Path, help="where the run's files go")
    parser.add_argument("--mode", choices=("train", "eval"), default="train")
    parser.add_argument("--fast_dev_run", action="store_true", help="3 steps; workdir is not used")
    args, others = parser.parse_known_args(argv)
    if args.mode == "eval" and args.fast_dev_run:
        parser.error("--fast_dev_run tries training; --mode=eval takes --config.eval.num_batches=N")
    logging.basicConfig(format="%(message)s", force=True)
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) if args.fast_dev_run else args.workdir
        try:
            run, corpus, source = _set_up(args, config_files.overrides(others))
            if args.mode == "train":
                run.compile()
            start = workdir.find_position(run, corpus, directory, source)
            if args.mode == "train":
                workdir.claim(directory, run, corpus, source)
        except (ValueError, OSError) as error:
            if os.environ.get("TAIBAI_TRACEBACK"):
                raise
            hint = "(TAIBAI_TRACEBACK=1 shows where this was raised)"
            print(f"error: {error}\n{hint}", file=sys.stderr)
            return 2
        if args.mode == "eval":
            scores = loop.evaluate(run, corpus, start.state)
            if jax.process_index() == 0:
                values = (f"{name} {value:.6g}" for name, value in scores.items())
                print(" ".join([f"step {start.step}", *values]))
        else:
            loop.train(run, corpus, start, directory, saves=not args.fast_dev_run)
    return 0


def _set_up(
    args: argparse.Namespace, overrides: list[str]
) -> tuple[Run, TextCorpus, Source | None]:
    """Returns the run, its corpus and what it starts from, after checks that compute nothing."""
    evaluates = args.mode == "eval"
    given = config_files.load(args.config, overrides)
    if evaluates and not (given.get("init_from") or workdir.has_checkpoint(args.workdir)):
        raise ValueError(
            f"--mode=eval: --workdir={args.workdir} holds no checkpoint; train first, or set "
            "--config.init_from"
        )
    if args.fast_dev_run:
        config_files.shorten(given)
    source = read_source(given.init_from) if given.get("init_from") else None
    if source is not None:
        take_over(given, source, overrides)
    config = resolve(given)
    jax.config.update("jax_enable_x64", config.precision.compute == "float64")
    mesh = devices.start(config.mesh)
    config = dataclasses.replace(config, mesh=config.mesh.resolve(mesh.size))
    if jax.process_index() > 0:
        logging.disable(logging.INFO)
    corpus = load_corpus(config.data)
    num_labels = len(corpus.labels) or None
    vocab_size = corpus.tokenizer.vocab_size
    run = prepare(config, mesh, vocab_size=vocab_size, num_labels=num_labels)
    check_tokenizer(run, corpus.tokenizer)
    workdir.check_processes_agree(run, corpus)
    if evaluates and not len(corpus.validation):
        raise ValueError(f"--mode=eval: data.name={config.data.name!r} has no validation text")
    if not args.fast_dev_run:
        workdir.check(args.workdir, run)
    logging.getLogger("train").info("%s", describe(run, corpus))
    return run, corpus, source


if __name__ == "__main__":
    sys.exit(main())
