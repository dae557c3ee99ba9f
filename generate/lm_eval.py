"""Evaluates a model with the tasks of lm-eval, EleutherAI's harness.

    python -m generate.lm_eval --model=runs/gpt2_3d --tasks=my_task --include_path=tasks

lm-eval reads the tasks, asks for log-probabilities and continuations, and computes the metrics;
`TaskModel` answers it with our model. docs/generate.md explains the options.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.from_hf import load_model
from convert.source import read_source
from data.text.tokenization.file_tokenizer import FileTokenizer
from fields.paths import local_path
from generate.batches import check_batch_size
from generate.beam_search import Beams
from generate.command import add_model_options, mesh_of, run
from generate.evaluation.following import add_follow, check_follow, follow
from generate.evaluation.scoring import Scorer
from generate.generator import Generator
from generate.prompts import TextCodec, stop_tokens_of, tokenizer_of
from generate.sampling import Sampling
from sharding.distributed.startup import start
from sharding.mesh import use_mesh
from untrusted.files import write_text
from untrusted.messages import shortened
from untrusted.outputs import check_file
from untrusted.streams import run_command

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; evaluations need: pip install 'lm-eval>=0.4.13,<0.5'")

#: A context, a continuation, and the texts that they come from.
_Request = tuple[Any, list[int], list[int]]
#: Keys of a task's `generation_kwargs` -> fields of `Sampling`.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
#: The same for a beam search -> fields of `Beams`.
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
_MAX_NEW_TOKENS = 256


class TaskModel(TemplateLM):
    """A model as lm-eval asks it. Texts have the same tokens as in its Hugging Face backend.

    Args:
        model: a causal language model, as from `convert.from_hf.load`.
        tokenizer: its tokenizer.
        first_token: id of the token that an empty context consists of.
        stop: ids of tokens that end a continuation.
        batch_size: most texts at a time; a multiple of the number of replicas of the mesh.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: FileTokenizer,
        *,
        first_token: int,
        end_token: int,
        stop: Sequence[int],
        batch_size: int,
    ):
        super().__init__()
        self._codec = TextCodec(tokenizer)
        self._end_token = end_token
        self._first_token = first_token
        self._first_text = self._codec.decode([first_token], has_special_tokens=True)
        self._scorer = Scorer(model, batch_size=batch_size)
        self._most = model.config.max_positions
        self._generator = Generator(model, stop=[*stop, end_token], batch_size=batch_size)

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-text token."""
        return self._end_token

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that an empty context consists of."""
        return self._first_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text.

        By default, they include the special ones that the tokenizer adds, unless the text begins
        with the first token already.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._first_text)
        return self._codec.encode(string, has_special_tokens=add_special_tokens)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text; long texts are divided into windows."""
        windows: list[_Request] = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._most,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += log_prob
        return totals

    def _loglikelihood_tokens(
        self, requests: list[_Request], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the likeliest.

        A context that is too long loses its first tokens.
        """
        texts = [[*context, *continuation] for _, context, continuation in requests]
        scores = self._scorer.score([text[-(self._most + 1) :] for text in texts])
        found = []
        for (_, _, continuation), score in zip(requests, scores, strict=True):
            log_probs = score.log_probs[-len(continuation) :]
            is_likeliest = score.is_likeliest[-len(continuation) :]
            found.append((float(log_probs.sum()), bool(is_likeliest.all())))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of the task's stop texts."""
        asked: list[Any] = [request.args for request in requests]  # (context, generation_kwargs)
        groups: dict[str, list[int]] = {}
        for number, (_, options) in enumerate(asked):
            groups.setdefault(json.dumps(options, sort_keys=True), []).append(number)
        found = [""] * len(requests)
        for numbers in groups.values():
            options: dict[str, Any] = {
                **normalize_gen_kwargs(asked[numbers[0]][1], _MAX_NEW_TOKENS)
            }
            until = options.pop("until")
            most = options.pop("max_gen_toks")
            room = self._most - most
            if room < 1:
                raise ValueError(
                    f"the task asks for {most} new tokens, but the model has {self._most} positions"
                )
            texts = (asked[number][0] for number in numbers)
            prompts = [self.tok_encode(text)[-room:] or [self._first_token] for text in texts]
            search = _search_of(options)
            if isinstance(search, Beams):
                continuations = self._generator.beam_search(
                    prompts, max_new_tokens=most, beams=search
                )
            else:
                continuations = self._generator.generate(
                    prompts, max_new_tokens=most, sampling=search
                )
            for number, tokens in zip(numbers, continuations, strict=True):
                text = self._codec.decode(tokens)
                found[number] = postprocess_generated_text(text, until, None)
        return found


def _search_of(options: dict[str, Any]) -> Sampling | Beams:
    """Return how tokens are chosen, from a task's `generation_kwargs`.

    Raises:
        ValueError: a key is not known, or a beam search is to sample.
    """
    values = {key: options.pop(key) for key in _SAMPLING if key in options}
    of_beams = {key: options.pop(key) for key in _BEAMS if key in options}
    samples = options.pop("do_sample", False)
    has_beams = of_beams.get("num_beams", 1) > 1
    if has_beams and (samples or values.get("repetition_penalty", 1.0) != 1.0):
        raise ValueError(
            f"the task's generation_kwargs have num_beams={of_beams['num_beams']} with do_sample "
            "or repetition_penalty, which is not supported; leave out one of them"
        )
    if not samples:
        values["temperature"] = 0.0
        values = {
            key: values[key] for key in ("temperature", "repetition_penalty") if key in values
        }
    if options:
        raise ValueError(
            f"the task's generation_kwargs have {shortened([*options])}, which is not supported; "
            f"known are until, max_gen_toks, do_sample, {', '.join((*_SAMPLING, *_BEAMS))}"
        )
    return Beams(**of_beams) if has_beams else Sampling(**values)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    return run(_evaluate, _parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m generate.lm_eval", allow_abbrev=False)
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
    mesh = start(mesh_of(args.mesh))
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
        found = _results(args, args.model)
    if args.out is not None:
        kept = {key: found[key] for key in ("results", "n-shot", "versions")}
        write_text(args.out, json.dumps({"model": str(args.model), **kept}, indent=1) + "\n")
    print(make_table(found))


def _results(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return what lm-eval says about a model.

    Args:
        args: the arguments of the command.
        path: the model.

    Raises:
        ValueError: the model has no tokenizer, or is not a language model; or a task is unknown.
    """
    source = read_source(path, allow_import=args.allow_import)
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json; put it beside the model")
    _check_tasks(args)  # reads the names of all tasks, which takes longer than the other checks
    model = TaskModel(
        load_model(source, dtype=args.dtype),
        tokenizer,
        first_token=tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id,
        end_token=tokenizer.eos_id,
        stop=stop_tokens_of(source, tokenizer),
        batch_size=args.batch_size,
    )
    found: Any = simple_evaluate(
        model=model,
        tasks=args.tasks.split(","),
        task_manager=_tasks_in(args.include_path),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        log_samples=False,
    )
    return found


def _check_tasks(args: argparse.Namespace) -> None:
    """Check that lm-eval knows the tasks.

    Raises:
        ValueError: a task is unknown.
    """
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


def _scores(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as numbers: `task/metric`, or `task/metric,filter`."""
    return {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and name != "sample_len"
    }


if __name__ == "__main__":
    run_command(main)
