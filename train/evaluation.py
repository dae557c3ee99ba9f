"""Evaluating on the validation split."""

import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from data.batches import validation_batches
from data.examples import Corpus
from sharding.batches import place_batch
from sharding.distributed.messages import Exchange
from train.lifecycle.phases import Phases
from train.reporting.metrics import METRICS_FILE, read_metrics
from train.run.build import Run
from train.state.train_state import TrainState


def evaluate(
    run: Run,
    corpus: Corpus,
    state: TrainState,
    phases: Phases,
    is_stopping: Callable[[], object] = lambda: False,
) -> dict[str, float] | None:
    """Returns `eval_loss` (nats) and the head's metrics, `eval_*`; for tokens `eval_perplexity`.

    They are those of the average of the parameters, where the run keeps one that is no teacher.

    Args:
        phases: enters "eval", at each batch anew.
        is_stopping: asked after each; if so, the evaluation is given up and None returned.
    """
    with phases("compile"):
        eval_step = run.eval_step
    sums: dict[str, np.ndarray] = {}
    config, params = run.config.data, run.evaluated(state)
    with phases("eval"):
        for batch in validation_batches(corpus, config, run.rows, run.config.eval.num_batches):
            with phases("eval"):  # from here on it may take train.failure_timeout_s again
                batch.pop("index")
                placed = place_batch(batch, run.rows, run.batch_sharding, config.global_batch_size)
                for name, value in jax.device_get(eval_step(*params, placed)).items():
                    sums[name] = sums.get(name, np.float64(0)) + value
            if is_stopping():
                return None
    weight = sums.pop("weight")
    scores = {f"eval_{name}": float(value / weight) for name, value in sums.items()}
    if config.has_perplexity:
        loss = scores.get("eval_mlm_loss", scores["eval_loss"])
        scores["eval_perplexity"] = math.exp(loss) if loss < 700 else math.inf
    return scores


def is_evaluated(run: Run, corpus: Corpus, step: int) -> bool:
    """Returns whether the config has this step evaluated."""
    is_due = is_due_at(step, run.config.eval.every_steps, run.config.train.num_steps)
    return is_due and len(corpus.validation) > 0


def lacks_evaluation(run: Run, corpus: Corpus, step: int, workdir: Path) -> bool:
    """Returns whether a step that was saved should have been evaluated and was not."""
    if step == 0 or not is_evaluated(run, corpus, step):
        return False
    path = workdir / METRICS_FILE

    def lacks() -> bool:
        logged = read_metrics(path) if path.exists() else []
        return not any(line["step"] == step and "eval_loss" in line for line in logged)

    return Exchange().on_first(lacks)


def is_due_at(step: int, every_steps: int, num_steps: int) -> bool:
    """Returns whether what is done every so many steps, and at the end, is done at `step`."""
    return step == num_steps or (every_steps > 0 and step % every_steps == 0)
