"""The training loop: get a batch, run a step, log, evaluate, save.

The loop owns all side effects; the steps are pure functions. In most steps the host runs ahead of
the devices, because the stop check and the divergence check use the previous step's results. Only
steps that are logged or saved wait for their own results.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoint.errors import ReadError
from data.examples import BrokenExample, Corpus
from predict.machines.datasheets import peak_flops_per_s
from train.config.config_files import as_yaml, flat_config
from train.evaluation import evaluate, is_due_at, is_evaluated, lacks_evaluation
from train.goodput import GoodputRecord
from train.lifecycle.agreement import DelayedAllReduce, Timer, wait_for_all
from train.lifecycle.decisions import Decisions
from train.lifecycle.divergence import Diverged, NonfiniteMonitor
from train.lifecycle.exit_codes import FINISHED, STOPPED, UNSAVED
from train.lifecycle.phases import Phases
from train.lifecycle.restore import RestoredRun, identity_of, roll_back
from train.lifecycle.stop_signals import StopSignals
from train.lifecycle.workdir import full_config
from train.reporting.metrics import MetricsWriter
from train.reporting.progress import Progress
from train.reporting.step_profile import StepProfile
from train.reporting.throughput import HostTimes, ThroughputMeter, mfu
from train.reporting.trackers import Trackers, find_trackers
from train.run.assemble import with_batch_size
from train.run.run import Run
from train.samples import Samples
from train.state.train_state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Logs:
    """The open files in the workdir to which the loop writes."""

    metrics: MetricsWriter
    goodput: GoodputRecord
    trackers: Trackers


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training loop ended.

    Attributes:
        exit_code: exit code of the process; see train/lifecycle/exit_codes.py.
        step: number of the last step.
        state: state after that step.
    """

    exit_code: int
    step: int
    state: TrainState


def open_logs(run: Run, first_step: int, workdir: Path, phases: Phases) -> Logs:
    """Open all files that the loop writes, so that unusable ones are found before it starts.

    Args:
        first_step: step that this start resumes from; 0 at the beginning.

    Raises:
        ValueError: there is something other than a regular file in the place of a file.
        OSError: a file or a directory cannot be created, read or written.
    """
    is_writer = jax.process_index() == 0
    goodput = GoodputRecord(
        workdir,
        phases,
        first_step=first_step,
        num_devices=run.mesh.size,
        num_processes=jax.process_count(),
        is_writer=is_writer,
    )
    metrics = MetricsWriter(workdir, resume_step=first_step, is_writer=is_writer)
    factories = find_trackers(run.config.log.trackers) if is_writer else {}
    trackers = Trackers(factories, workdir, flat_config(full_config(run)), first_step)
    return Logs(metrics=metrics, goodput=goodput, trackers=trackers)


def train(
    run: Run,
    corpus: Corpus,
    restored: RestoredRun,
    workdir: Path,
    logs: Logs,
    *,
    saves: bool,
    phases: Phases,
    signals: StopSignals | None = None,
) -> Outcome:
    """Train from the restored step to the last one, or until the run is stopped.

    A signal stops all processes, with the exit code STOPPED. Early stopping or a callback ends the
    run before its last step, with the exit code FINISHED.

    A step is evaluated before it is saved, so a run that is killed in between evaluates it again.
    If a signal interrupts an evaluation, the next start repeats it.

    Args:
        restored: its state after the steps that are done, its batches and its checkpoints.
        logs: files to which the loop writes; it closes them.
        saves: False disables checkpoints.
        signals: records stop signals; None: the process's signal handlers stay as they are.

    Raises:
        Diverged: too many steps in a row were not finite.
        BrokenExample: an example that was intact at the start can no longer be read.
        ReadError: a checkpoint cannot be read for a rollback.
    """
    loop = _TrainingLoop(run, corpus, restored, workdir, logs, phases, signals)
    if signals is not None:
        signals.defer()
    try:
        loop.resume_decisions()
        if lacks_evaluation(run, corpus, restored.step, workdir):
            loop.evaluate()
        while loop.step < run.config.train.num_steps and not loop.is_stopping:
            batch = loop.next_batch()
            bad_step = loop.run_step(batch)
            if bad_step is not None:
                loop.set_checkpoints_aside(bad_step)
                loop.roll_back(bad_step)
            scores = loop.evaluate_if_due()
            if saves:
                loop.save_if_due(scores)
    except (Diverged, BrokenExample, ReadError) as error:
        loop.end_records("failed")
        if isinstance(error, Diverged) and error.first_bad_step is not None and saves:
            loop.set_checkpoints_aside(error.first_bad_step)
        raise
    finally:
        loop.close()
    return Outcome(exit_code=loop.finish(), step=loop.step, state=loop.state)


class _TrainingLoop:
    """The state of a training loop; its methods are the parts of an iteration, in order."""

    def __init__(
        self,
        run: Run,
        corpus: Corpus,
        restored: RestoredRun,
        workdir: Path,
        logs: Logs,
        phases: Phases,
        signals: StopSignals | None,
    ):
        self._run = run
        self._corpus = corpus
        self._batches = restored.batches
        self._checkpoints = restored.checkpoints
        self._phases = phases
        self._signals = signals
        self._num_steps = run.config.train.num_steps
        self._state = restored.state
        self._step_run = run  # `run`, with the batch size of the newest step
        self._batch_sizes = run.config.data.batch_sizes
        self._compiled_step = run.compile_train_step()
        self._is_first_process = jax.process_index() == 0
        self._writer = logs.metrics
        self._trackers = logs.trackers
        self._record = logs.goodput
        self._progress = Progress(
            self._num_steps, start_step=restored.step, is_shown=self._is_first_process
        )
        self._meter = ThroughputMeter(run.units_per_step, run.unit)
        self._all_reduce = DelayedAllReduce(run.mesh)
        self._save_timer = Timer(run.config.checkpoint.every_minutes)
        self._nonfinite_monitor = NonfiniteMonitor(run.config.train, workdir)
        self._decisions = Decisions(run.config, workdir, self._write)
        self._samples = Samples(run, corpus, workdir, phases)
        self._host_times = HostTimes()
        self._profile = StepProfile(run.config.log.profile_steps, workdir, run.mesh)
        self._local_batch: dict[str, np.ndarray] = {}  # rows of this process, of the newest step
        self.step = restored.step  # number of the newest step that was started
        self.is_stopping = False  # whether all processes stop after this step
        self._is_signaled = False  # whether a signal stops them
        self._is_save_requested = False  # whether the first process's timer asks for a save
        self._is_save_due = False  # whether to save after the next step that is not skipped
        self._last_saved_step = restored.step

    @property
    def state(self) -> TrainState:
        """The state after the newest step."""
        return self._state

    def resume_decisions(self) -> None:
        """Find out whether an earlier start has ended the run early."""
        if self.step > 0:
            self._decisions.resume()
            self.is_stopping = self._decisions.is_ending

    def next_batch(self) -> dict[str, jax.Array]:
        """Begin the next step: read this process's rows of its batch, place them on the mesh."""
        self.step += 1
        self._follow_batch_size()
        if self._profile.begins_at(self.step):
            with self._meter.paused():
                self._profile.begin()
        self._host_times.begin_step()
        with self._phases("data", self.step), self._meter.waiting():
            self._local_batch = next(self._batches)
            return self._step_run.place_batch(self._local_batch)

    def _follow_batch_size(self) -> None:
        """Compile the step again if the batch size grows with this step."""
        size = self._batch_sizes.of_step(self.step - 1)
        if size == self._step_run.config.data.global_batch_size:
            return
        with self._phases("compile"), self._meter.paused():
            self._step_run = with_batch_size(self._run, size)
            self._compiled_step = self._step_run.compile_train_step()
        self._meter.units_per_step = self._step_run.units_per_step

    def run_step(self, batch: dict[str, jax.Array]) -> int | None:
        """Start the step on the devices, and log it if that is due.

        Returns:
            The first of too many nonfinite steps in a row, or None to continue.
        """
        with self._phases("step"), self._profile.annotate(self.step):
            self._state, metrics = self._compiled_step(self._state, batch)
            self._host_times.end_step()
            self._is_signaled = self._agree_to_stop()
            self.is_stopping = self._is_signaled or self._decisions.is_ending
            self._meter.step(metrics["loss"])
            every_steps = self._run.config.log.every_steps
            if self.step % every_steps == 0 or self.step in (1, self._num_steps):
                logged = _values_to_log(metrics, self._meter, self._run) | self._host_times.lap()
                if self._run.config.data.rampup_batch_size:
                    logged["global_batch_size"] = self._step_run.config.data.global_batch_size
                self._write(self.step, logged)
                self._progress.update(self.step, logged)
                self._record.write(self.step)
                self._decisions.after_step(self.step, logged)
            bad_step = self._nonfinite_monitor.first_bad_step(self.step, self._local_batch, metrics)
        if self._profile.ends_at(self.step):
            with self._meter.paused():
                self._profile.end()
        return bad_step

    def set_checkpoints_aside(self, bad_step: int) -> None:
        """Set aside checkpoints that may have led to `bad_step`, the first of several bad steps."""
        with self._phases("save"):
            # The step before it computed the parameters that failed.
            self._checkpoints.set_aside(bad_step - 1)
            self._last_saved_step = self._checkpoints.latest_step() or 0

    def roll_back(self, bad_step: int) -> None:
        """Restore the newest checkpoint from before `bad_step`."""
        with self._phases("restore"), self._meter.paused():
            self._state = roll_back(
                self._run, self._checkpoints, self._state, first_bad_step=bad_step
            )

    def evaluate_if_due(self) -> dict[str, float] | None:
        """Evaluate after this step if that is due; return the scores, or None without any."""
        if is_evaluated(self._run, self._corpus, self.step) and not self._is_signaled:
            return self.evaluate()
        return None

    def evaluate(self) -> dict[str, float] | None:
        """Evaluate and log; return None, and stop the loop, if a signal interrupted it.

        The loop also stops if early stopping or a callback ends the run.
        """
        with self._meter.paused():
            scores = evaluate(
                self._run, self._corpus, self._state, self._phases, self._agree_to_stop
            )
            if scores is None:
                self.is_stopping = self._is_signaled = True
                return None
            self._write(self.step, scores)
            self._progress.evaluation(self.step, scores)
            self._samples.write(self.step, self._state)
            with self._phases("eval"):
                is_save_due = self._decisions.after_evaluation(self.step, scores)
        self._is_save_due |= is_save_due and self.step > self._last_saved_step
        self.is_stopping |= self._decisions.is_ending
        return scores

    def save_if_due(self, scores: dict[str, float] | None) -> None:
        """Save if the step number or the timer requires it, or if the loop stops.

        The state after a skipped step is not saved: earlier steps may have damaged its parameters.
        The save waits for the next step that is not skipped.

        Raises:
            Diverged: the last step was skipped, so the run ends without a checkpoint of it.
        """
        every_steps = self._run.config.checkpoint.every_steps
        is_due = is_due_at(self.step, every_steps, self._num_steps)
        # The all-reduce answers one step late. An answer that arrives right after a save was
        # requested before it, so ignore it.
        is_after_save = self.step <= self._last_saved_step + 1
        self._is_save_requested = self._is_save_requested and not is_after_save
        self._is_save_due |= is_due or self._is_save_requested or self.is_stopping
        if not self._is_save_due:
            return
        num_skipped = self._num_skipped_in_a_row()
        if num_skipped:
            self._refuse_to_save(num_skipped)
            return
        self._save(scores)
        self._save_timer.restart()
        self._last_saved_step = self.step
        self._is_save_due = False
        self._is_save_requested = False

    def close(self) -> None:
        """Wait for the current save, and close all files."""
        with self._phases("save"):
            self._checkpoints.close()
        self._profile.end()
        self._progress.close()
        self._writer.close()

    def finish(self) -> int:
        """Record how the loop ended, wait for the other processes, and return the exit code."""
        if self._checkpoints.last_failure is not None:
            ended = "failed"
            exit_code = UNSAVED
        elif self.is_stopping and not self._decisions.is_ending:
            ended = "stopped"
            exit_code = STOPPED
        else:
            ended = "finished"
            exit_code = FINISHED
            self._say_why_it_ended()
        self.end_records(ended)
        with self._phases("save"):
            wait_for_all("saved")  # a launcher ends all processes when the first one exits
        return exit_code

    def end_records(self, ended: str) -> None:
        """Record how the loop ended: "finished", "stopped" or "failed"."""
        self._record.write(self.step, ended)
        self._trackers.finish(ended)

    def _say_why_it_ended(self) -> None:
        """Name the reason of an early end, and the best checkpoint of a run that keeps some."""
        config = self._run.config
        if self._decisions.is_ending:
            _log.info(
                "the run ended after step %d of train.num_steps=%d: %s",
                self.step,
                self._num_steps,
                self._decisions.reason or "a callback asked for it",
            )
        best = self._checkpoints.best() if config.checkpoint.keep_best else None
        if best is not None:
            path, score = best
            name = config.checkpoint.best_metric
            _log.info("the best checkpoint is %s, with %s %.6g", path, name, score)

    def _num_skipped_in_a_row(self) -> int:
        """Return how many steps in a row were skipped, up to this one; waits for this step."""
        state = self._state
        is_last = self.is_stopping or self.step == self._num_steps
        if is_last and state.loss_scale is not None:
            # In float16 a step is occasionally skipped because its loss scale was too large. After
            # the last step there is no later one that the save could wait for, so count only skips
            # at the smallest scale.
            count = int(state.loss_scale.num_stuck)
        else:
            count = int(state.num_nonfinite_in_a_row)
        return count if state.spikes is None else count + int(state.spikes.num_in_a_row)

    def _refuse_to_save(self, num_skipped: int) -> None:
        """Say that this step is not saved, or end the run if it is the last one."""
        what = f"step {self.step} is not saved, because the last {num_skipped} step(s) were skipped"
        if self.step == self._num_steps:
            raise Diverged(
                f"{what}; the next start resumes from step {self._last_saved_step}; lower "
                "optimizer.learning_rate, or look for bad examples"
            )
        _log.warning("%s", what)
        # An end that is not urgent waits for a state that can be saved.
        self.is_stopping &= self._is_signaled

    def _save(self, scores: dict[str, float] | None) -> None:
        with self._phases("save"), self._meter.paused():
            batches_state = self._batches.get_state()
            data_state = {"batches": batches_state, **identity_of(self._corpus)}
            portable = self._run.state_layout.to_portable(self._state)
            # Later steps have used the parameters of the last save, and this step was not skipped,
            # so that save is proven good.
            self._checkpoints.save(
                self.step,
                portable,
                data_state,
                scores,
                config=as_yaml(full_config(self._run)),
                proven=self._last_saved_step,
            )

    def _agree_to_stop(self) -> bool:
        """Return whether a signal stops all processes.

        Record whether they should save, and whether a step's callback ends the run.
        """
        decisions = self._decisions
        is_timer_due = self._is_first_process and self._save_timer.is_due()
        has_received = self._signals is not None and self._signals.has_received
        stop, save, end, _ = self._all_reduce.max(
            has_received,
            is_timer_due or decisions.is_save_requested,
            decisions.is_end_requested,
            self._host_times.microseconds,
        )
        self._host_times.add(self._all_reduce.answers[:, -1])
        decisions.is_save_requested = False
        decisions.is_ending |= end > 0
        self._is_save_requested |= save > 0
        return stop > 0

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        self._writer.write(step, values)
        self._trackers.log(step, values)


def _values_to_log(metrics: dict[str, jax.Array], meter: ThroughputMeter, run: Run) -> dict:
    values = {name: value.item() for name, value in jax.device_get(metrics).items()}
    logged = values | meter.lap()
    peak = peak_flops_per_s(run.hardware.device_kind, run.config.precision.compute_dtype)
    units_per_s = logged[f"{run.unit}s_per_s"]
    if peak and units_per_s:
        flops_per_s = run.flops_per_unit * units_per_s
        logged["mfu"] = mfu(flops_per_s, run.mesh.size, peak)
    return logged
