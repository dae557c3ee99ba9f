"""Evaluates a model with the tasks of lm-eval, EleutherAI's harness.

    python -m generate.lm_eval --model=runs/gpt2_3d --tasks=my_task --include_path=tasks

lm-eval reads the tasks, asks for log-probabilities and continuations, and computes the metrics;
`TaskModel` answers it with our model. docs/generate.md explains the options.
"""

import argparse
import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.from_hf import load_model
from fields.paths import local_path
from generate.batches import check_batch_size
from generate.command import add_model_options, read_model, run, start_mesh
from generate.evaluation.following import add_follow, check_follow, follow
from generate.prompts import generation_config_of, stop_tokens_of, tokenizer_of
from sharding.mesh import use_mesh
from untrusted.commands import command_parser, refuse_missing_package, run_command
from untrusted.files import write_text
from untrusted.outputs import check_file

try:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from generate.evaluation.task_model import TaskModel
    from generate.evaluation.task_options import applied_settings
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    refuse_missing_package(error, "evaluations need: pip install 'lm-eval>=0.4.13,<0.5'")

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    return run(_evaluate, _parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate.lm_eval")
    add_model_options(parser, batch_size=8)
    parser.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks")
    parser.add_argument(
        "--include_path", type=local_path, metavar="DIR", help="directory with tasks of your own"
    )
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="examples before a question")
    parser.add_argument("--limit", type=int, metavar="N", help="only N questions of each task")
    parser.add_argument("--out", type=local_path, help="write the metrics here, as JSON")
    add_follow(parser)
    return parser


def _evaluate(args: argparse.Namespace) -> None:
    """Evaluate the model, and print the metrics as a table; or follow a run."""
    # lm-eval would fork processes for bootstraps, which jax's threads do not survive.
    os.environ["DISABLE_MULTIPROC"] = "1"
    check_file("--out", args.out)
    mesh = start_mesh(args)
    check_batch_size(mesh, args.batch_size)
    if args.follow:
        check_follow(args)
        _check_tasks(args)
        names = ("tasks", "num_fewshot", "limit", "dtype")
        settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        with use_mesh(mesh):
            follow(args.model, "lm_eval", settings, lambda step: _scores(_results(args, step)))
        return
    with use_mesh(mesh):
        results = _results(args, args.model)
    if args.out is not None:
        saved_results = {key: results[key] for key in ("results", "n-shot", "versions")}
        write_text(
            args.out, json.dumps({"model": str(args.model), **saved_results}, indent=1) + "\n"
        )
    print(make_table(results))


def _results(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return lm-eval's results for a model."""
    source = read_model(path, args)
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json; put it beside the model")
    generation = generation_config_of(source)
    for name, value in applied_settings(generation).items():
        _log.warning("%s=%r of generation_config.json applies to generated texts", name, value)
    _check_tasks(args)  # reads the names of all tasks, which takes longer than the other checks
    model = TaskModel(
        load_model(source, dtype=args.dtype),
        tokenizer,
        stop=stop_tokens_of(source, tokenizer),
        batch_size=args.batch_size,
        generation=generation,
    )
    results: Any = simple_evaluate(
        model=model,
        tasks=args.tasks.split(","),
        task_manager=_tasks_in(args.include_path),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        log_samples=False,
    )
    return results


def _check_tasks(args: argparse.Namespace) -> None:
    """Check that lm-eval knows the tasks."""
    known = _tasks_in(args.include_path).all_tasks
    unknown = [task for task in args.tasks.split(",") if task not in known]
    if unknown:
        raise ValueError(
            f"--tasks={args.tasks}: lm-eval has no task {unknown[0]!r}; pass --include_path with "
            "the directory of its YAML file"
        )


@functools.cache
def _tasks_in(directory: Path | None) -> TaskManager:
    """Return lm-eval's tasks, and those in a directory."""
    return TaskManager(include_path=None if directory is None else str(directory))


def _scores(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as numbers: `task/metric`, or `task/metric,filter`."""
    return {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and name != "sample_len"
    }


if __name__ == "__main__":
    run_command(main)
