"""The story of a run: next batch, step, log, evaluate, save."""

import math
from pathlib import Path

import jax
import numpy as np

from data.text import TextCorpus, validation_batches
from sharding.batches import place_batch
from train.metrics import MetricsWriter
from train.progress import Progress
from train.setup import Run
from train.state import TrainState
from train.throughput import ThroughputMeter, mfu, peak_flops_per_s
from train.workdir import Position


def train(run: Run, corpus: TextCorpus, start: Position, workdir: Path, *, saves: bool) -> None:
    """Trains from `start` to the last step.

    A step is evaluated before it is saved: a run that is killed in between logs both again.

    Args:
        workdir: where metrics go.
        saves: False leaves no checkpoint behind.
    """
    config, num_steps, state = run.config, run.config.train.num_steps, start.state
    is_first = jax.process_index() == 0
    writer = MetricsWriter(workdir, resume_step=start.step, is_writer=is_first)
    progress = Progress(num_steps, start_step=start.step, is_shown=is_first)
    meter = ThroughputMeter(run.tokens_per_step)
    with progress:
        for step in range(start.step + 1, num_steps + 1):
            state, metrics = run.train_step(state, _place(next(start.batches), run))
            meter.step(metrics["loss"])
            if step % config.log.every_steps == 0 or step in (1, num_steps):
                logged = _logged(metrics, meter, run)
                writer.write(step, logged)
                progress.update(step, logged)
            if len(corpus.validation) and _is_due(step, config.eval.every_steps, num_steps):
                with meter.paused():
                    scores = evaluate(run, corpus, state)
                writer.write(step, scores)
                progress.evaluation(step, scores)
            if saves and _is_due(step, config.checkpoint.every_steps, num_steps):
                with meter.paused():
                    batches_state = start.batches.get_state()
                    data_state = {"batches": batches_state, "corpus": corpus.fingerprint}
                    start.checkpoints.save(step, run.state.to_portable(state), data_state)
    start.checkpoints.close()
    writer.close()


def evaluate(run: Run, corpus: TextCorpus, state: TrainState) -> dict[str, float]:
    """Returns `eval_loss` (nats) and the head's metrics, `eval_*`; for tokens `eval_perplexity`."""
    sums: dict[str, np.ndarray] = {}
    for batch in validation_batches(corpus, run.config.data, run.rows, run.config.eval.num_batches):
        batch.pop("index")
        for name, value in jax.device_get(run.eval_step(state.params, _place(batch, run))).items():
            sums[name] = sums.get(name, np.float64(0)) + value
    weight = sums.pop("weight")
    scores = {f"eval_{name}": float(value / weight) for name, value in sums.items()}
    if not corpus.labels:
        loss = scores.get("eval_mlm_loss", scores["eval_loss"])
        scores["eval_perplexity"] = math.exp(loss) if loss < 700 else math.inf
    return scores


def _place(batch: dict[str, np.ndarray], run: Run) -> dict[str, jax.Array]:
    return place_batch(batch, run.rows, run.batch_sharding, run.config.data.global_batch_size)


def _is_due(step: int, every_steps: int, num_steps: int) -> bool:
    return step == num_steps or (every_steps > 0 and step % every_steps == 0)


def _logged(metrics: dict[str, jax.Array], meter: ThroughputMeter, run: Run) -> dict:
    values = {name: value.item() for name, value in jax.device_get(metrics).items()}
    logged = values | meter.lap()
    peak = peak_flops_per_s(run.mesh.devices.flat[0], run.config.precision.compute)
    if peak and logged["tokens_per_s"]:
        flops_per_s = run.flops_per_token * logged["tokens_per_s"]
        logged["mfu"] = mfu(flops_per_s, run.mesh.size, peak)
    return logged
