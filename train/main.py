"""Trains or evaluates: `python -m train.main --config=FILE --workdir=DIR`."""

import argparse
import dataclasses
import logging
import os
import sys
from pathlib import Path

import jax

from data.text import load_corpus
from sharding import devices
from train import config as configs
from train import loop, workdir
from train.setup import describe, prepare

ROOMS = ("checkpoint", "convert", "data", "models", "sharding", "train")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after an error before step 0, said in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m train.main", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument("--workdir", required=True, type=Path, help="where the run's files go")
    parser.add_argument("--mode", choices=("train", "eval"), default="train")
    parser.add_argument("--fast_dev_run", action="store_true", help="3 steps, nothing is saved")
    args, others = parser.parse_known_args(argv)
    logging.basicConfig(format="%(message)s", force=True)
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.INFO)
    try:
        run, corpus = _set_up(args, configs.overrides(others))
        start = loop.find_position(run, corpus, args.workdir)
        if args.mode == "eval" and start.step == 0:
            raise ValueError(f"--mode=eval: {args.workdir} holds no checkpoint; train first")
    except (ValueError, OSError) as error:
        if os.environ.get("TAIBAI_TRACEBACK"):
            raise
        print(f"error: {error}\n(TAIBAI_TRACEBACK=1 shows where it was raised)", file=sys.stderr)
        return 2
    if args.mode == "eval":
        scores = loop.evaluate(run, corpus, start.state)
        print(" ".join([f"step {start.step}", *(f"{k} {v:.6g}" for k, v in scores.items())]))
    else:
        loop.train(run, corpus, start, args.workdir, saves=not args.fast_dev_run)
    return 0


def _set_up(args: argparse.Namespace, overrides: list[str]):
    source = configs.load(args.config, overrides)
    if args.fast_dev_run:
        configs.shorten(source)
    config = configs.resolve(source)
    jax.config.update("jax_enable_x64", config.precision.compute == "float64")
    mesh = devices.start(config.mesh)
    config = dataclasses.replace(config, mesh=config.mesh.resolve(mesh.size))
    if jax.process_index() > 0:
        logging.disable(logging.INFO)
    corpus = load_corpus(config.data)
    run = prepare(config, mesh, vocab_size=corpus.tokenizer.vocab_size)
    if args.mode == "train" and not args.fast_dev_run:
        workdir.claim(args.workdir, run)
    logging.getLogger("train").info("%s", describe(run, corpus))
    return run, corpus


if __name__ == "__main__":
    sys.exit(main())
