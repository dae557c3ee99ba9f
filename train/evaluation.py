"""Evaluation on the validation split, and when it is due."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.batches import validation_batches
from data.examples import Corpus
from distributed.messages import Exchange
from train.lifecycle.phases import Phases
from train.reporting.metrics import METRICS_FILE, read_metrics
from train.run.run import Run, metric_prefix
from train.state.train_state import TrainState
from train.step.means import means_of


def evaluate(
    run: Run,
    corpus: Corpus,
    state: TrainState,
    phases: Phases,
    is_stopping: Callable[[], object] = lambda: False,
) -> dict[str, float] | None:
    """Evaluate the averaged parameters if the run keeps an average, else the parameters.

    A model that learns from its average (MoCo) is evaluated with its own parameters.

    Args:
        phases: enters the phase "eval", again for every batch.
        is_stopping: called after every batch; if it returns True, the evaluation is abandoned.

    Returns:
        `eval_loss` (nats), the head's metrics as `eval_*`, and for tokens `eval_perplexity`, or
        `eval_NAME_loss` and so on for a validation set with a name; None if the evaluation was
        abandoned. Each is a sum over the whole set, divided by the sum of its own weights; NaN
        without weights.
    """
    with phases("compile"):
        run.compile_eval_step()
    scores = {}
    for name in corpus.validation_sets:
        sums = _sums_of(name, run, corpus, state, phases, is_stopping)
        if sums is None:
            return None
        prefix = metric_prefix(name)
        scores |= {f"{prefix}{key}": value for key, value in _scores_of(sums, run).items()}
    return scores


def _sums_of(
    name: str,
    run: Run,
    corpus: Corpus,
    state: TrainState,
    phases: Phases,
    is_stopping: Callable[[], object],
) -> Any:
    """Return the sums of the head over a validation set; None if it was abandoned."""
    eval_step = run.compile_eval_step()
    params = run.params_to_evaluate(state)
    num_batches = run.config.eval.num_batches
    sums: Any = None
    with phases("eval"):
        batches = validation_batches(corpus, run.config.data, run.rows, num_batches, name=name)
        for batch in batches:
            with phases("eval"):  # restarts the watchdog's timeout, train.failure_timeout_s
                placed = run.place_batch(batch)
                batch_sums = jax.device_get(eval_step(*params, placed))
                batch_sums = jax.tree.map(np.float64, batch_sums)
                sums = batch_sums if sums is None else jax.tree.map(np.add, sums, batch_sums)
            if is_stopping():
                return None
    return sums


def _scores_of(sums: Any, run: Run) -> dict[str, float]:
    """Return the means of a validation set, and for tokens the perplexity."""
    means = means_of(sums, lambda value, weight: value / weight if weight else math.nan)
    scores = {name: float(value) for name, value in means.items()}
    if run.config.data.has_perplexity:
        of_tokens = [name for name in ("mlm_loss", "lm_loss") if name in scores]
        loss = scores[of_tokens[0] if of_tokens else "loss"]
        scores["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    return scores


def describe_limits(run: Run, corpus: Corpus) -> list[str]:
    """Return a line for each validation set of which `eval.num_batches` leaves batches out."""
    limit = run.config.eval.num_batches
    if limit is None:
        return []
    lines = []
    for name, examples in corpus.validation_sets.items():
        num_batches = -(-len(examples) // run.config.data.global_batch_size)
        if limit < num_batches:
            of_set = f"validation set {name!r}" if name else "validation split"
            lines.append(
                f"eval.num_batches={limit}: evaluated {limit:,} of {num_batches:,} batches of the "
                f"{of_set}; --config.eval.num_batches=None evaluates all"
            )
    return lines


def is_evaluated(run: Run, corpus: Corpus, step: int) -> bool:
    """Return whether the run evaluates after this step."""
    is_due = is_due_at(step, run.config.eval.every_steps, run.config.train.num_steps)
    return is_due and bool(corpus.validation_sets)


def lacks_evaluation(run: Run, corpus: Corpus, step: int, workdir: Path) -> bool:
    """Return whether a saved step was due for evaluation, but has none in the metrics file."""
    if step == 0 or not is_evaluated(run, corpus, step):
        return False
    path = workdir / METRICS_FILE

    def lacks() -> bool:
        logged = read_metrics(path) if path.exists() else []
        name = f"{metric_prefix(next(iter(corpus.validation_sets)))}loss"
        return not any(line["step"] == step and name in line for line in logged)

    return Exchange().on_first(lacks)


def is_due_at(step: int, every_steps: int, num_steps: int) -> bool:
    """Return whether something that is due every `every_steps`, and at the end, is due now.

    Args:
        every_steps: period; 0: only at the end.
    """
    return step == num_steps or (every_steps > 0 and step % every_steps == 0)
