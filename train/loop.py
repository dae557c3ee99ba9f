"""The training loop: get a batch, run a step, log, evaluate, save.

The loop owns all side effects; the steps are pure functions. At most steps the host runs ahead of
the devices: votes about stopping and the divergence check read results of the previous step. Only
logged steps wait for their own metrics.
"""

from pathlib import Path

import jax
import numpy as np

from data.examples import BrokenExample, Corpus
from sharding.batches import place_batch
from train.evaluation import evaluate, is_due_at, is_evaluated, lacks_evaluation
from train.goodput import GoodputRecord
from train.lifecycle.divergence import Diverged, NonfiniteMonitor
from train.lifecycle.exit_codes import FINISHED, STOPPED, UNSAVED
from train.lifecycle.phases import Phases
from train.lifecycle.position import Position, roll_back
from train.lifecycle.stop_signals import StopSignals, Timer, Votes, wait_for_all
from train.reporting.metrics import MetricsWriter
from train.reporting.progress import Progress
from train.reporting.throughput import ThroughputMeter, mfu, peak_flops_per_s
from train.run.run import Run


def train(
    run: Run,
    corpus: Corpus,
    start: Position,
    workdir: Path,
    *,
    saves: bool,
    phases: Phases,
    signals: StopSignals,
) -> int:
    """Train from `start` to the last step, or until a signal stops all processes.

    A step is evaluated before it is saved, so a run that is killed in between evaluates it again.
    An evaluation that a signal interrupted is done by the next start.

    Args:
        run: the run.
        corpus: its data.
        start: the position to start from.
        workdir: directory for metrics and the goodput record.
        saves: False disables checkpoints.
        phases: the phases of this process.
        signals: records signals that ask this process to stop.

    Returns:
        The process's exit code; see train/lifecycle/exit_codes.py.

    Raises:
        Diverged: too many steps in a row were not finite.
        BrokenExample: an example that was intact at the start cannot be read any more.
    """
    config = run.config
    num_steps = run.config.train.num_steps
    state = start.state
    train_step = run.compile_train_step()
    is_first = jax.process_index() == 0
    writer = MetricsWriter(workdir, resume_step=start.step, is_writer=is_first)
    record = GoodputRecord(
        workdir,
        phases,
        first_step=start.step,
        num_devices=run.mesh.size,
        num_processes=jax.process_count(),
        is_writer=is_first,
    )
    progress = Progress(num_steps, start_step=start.step, is_shown=is_first)
    meter = ThroughputMeter(run.units_per_step, run.unit)
    votes = Votes(run.mesh)
    timer = Timer(config.checkpoint.every_minutes)
    nonfinite_monitor = NonfiniteMonitor(config.train, workdir)
    step = last_save = start.step
    stops = is_time = False

    def vote() -> bool:
        """Return whether all processes should stop; record in `is_time` whether to save."""
        nonlocal is_time
        stop, save = votes.cast(signals.has_received, is_first and timer.is_due())
        is_time |= save > 0
        return stop > 0

    def score() -> dict[str, float] | None:
        """Evaluate and log; return None if a signal interrupted it."""
        with meter.paused():
            scores = evaluate(run, corpus, state, phases, vote)
        if scores is not None:
            writer.write(step, scores)
            progress.evaluation(step, scores)
        return scores

    def save(scores: dict[str, float] | None) -> None:
        with phases("save"), meter.paused():
            batches_state = start.batches.get_state()
            data_state = {"batches": batches_state, "corpus": corpus.fingerprint}
            start.checkpoints.save(step, run.state.to_portable(state), data_state, scores)

    signals.defer()
    try:
        if lacks_evaluation(run, corpus, step, workdir):
            stops = score() is None
        while step < num_steps and not stops:
            step += 1
            with phases("data", step), meter.waiting():
                rows = next(start.batches)
                batch = _place(rows, run)
            with phases("step"):
                state, metrics = train_step(state, batch)
                stops = vote()
                meter.step(metrics["loss"])
                if step % config.log.every_steps == 0 or step in (1, num_steps):
                    logged = _logged(metrics, meter, run)
                    writer.write(step, logged)
                    progress.update(step, logged)
                    record.write(step)
                bad_step = nonfinite_monitor.first_bad_step(step, rows, metrics)
            if bad_step is not None:
                with phases("restore"), meter.paused():
                    state = roll_back(run, start, state, first_bad_step=bad_step)
            scores = None
            if is_evaluated(run, corpus, step) and not stops:
                scores = score()
                stops = scores is None
            is_due = is_due_at(step, config.checkpoint.every_steps, num_steps)
            # Votes are answered one step later. An answer right after a save belongs to a vote
            # from before the save, so it is ignored.
            is_time = is_time and step > last_save + 1
            if saves and (is_due or is_time or stops):
                save(scores)
                timer.restart()
                last_save = step
                is_time = False
    except (Diverged, BrokenExample):
        record.write(step, "failed")
        raise
    finally:
        with phases("save"):
            start.checkpoints.close()
        progress.close()
        writer.close()
    with phases("save"):
        wait_for_all("saved")  # a launcher ends all processes when the first one exits
    is_unsaved = start.checkpoints.last_failure is not None
    record.write(step, "failed" if is_unsaved else "stopped" if stops else "finished")
    return UNSAVED if is_unsaved else STOPPED if stops else FINISHED


def _place(batch: dict[str, np.ndarray], run: Run) -> dict[str, jax.Array]:
    return place_batch(batch, run.rows, run.batch_sharding, run.config.data.global_batch_size)


def _logged(metrics: dict[str, jax.Array], meter: ThroughputMeter, run: Run) -> dict:
    values = {name: value.item() for name, value in jax.device_get(metrics).items()}
    logged = values | meter.lap()
    peak = peak_flops_per_s(run.hardware.device_kind, run.config.precision.compute)
    units_per_s = logged[f"{run.unit}s_per_s"]
    if peak and units_per_s and run.flops_per_unit:
        flops_per_s = run.flops_per_unit * units_per_s
        logged["mfu"] = mfu(flops_per_s, run.mesh.size, peak)
    return logged
