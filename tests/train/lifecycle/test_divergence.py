"""Nonfinite steps: they are skipped and counted; too many of them end a run or roll it back."""

import dataclasses
import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoint.config import CheckpointConfig
from checkpoint.errors import ReadError
from checkpoint.manager import Checkpoints
from data.batches import train_batches
from tests.runs import CONFIG, TINY, digest, make_run, placed_batch
from train import loop
from train.config.train_config import TrainConfig
from train.goodput import summarize
from train.lifecycle import divergence
from train.lifecycle.divergence import MAX_ROLLBACKS, Diverged, NonfiniteMonitor
from train.lifecycle.exit_codes import DIVERGED, FINISHED
from train.lifecycle.phases import Phases
from train.lifecycle.restore import restore_or_initialize
from train.lifecycle.stop_signals import StopSignals
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(3, among="thorough")]

CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
#: With a constant rate, runs of any length share their step.
CONSTANT = "optimizer.schedule=constant"


ROWS = {"tokens": np.arange(6).reshape(2, 3), "weights": np.full((2, 3), np.nan, np.float32)}


NAN = {"weights": np.full((16, 16), np.nan, np.float32)}


def config(**changes) -> TrainConfig:
    return TrainConfig(num_steps=9, num_microbatches=1, seed=0, remat="none", **changes)


def ask(nonfinite_monitor: NonfiniteMonitor, *counts: int) -> list[int | None]:
    """Return the monitor's answers at steps 1, 2, ..., for these counts of bad steps in a row."""
    metrics = ({"num_nonfinite_in_a_row": jnp.int32(count)} for count in counts)
    return [nonfinite_monitor.first_bad_step(1 + i, ROWS, each) for i, each in enumerate(metrics)]


# The config.


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"max_nonfinite_steps": -1},
            r"train\.max_nonfinite_steps=-1 must be at least 0; .* 0 for no",
        ),
        ({"on_nonfinite": "go"}, r"train\.on_nonfinite='go' is unknown; choose stop or rollback"),
        (
            {"skip_spikes": 1.0},
            r"train\.skip_spikes=1\.0 must be more than 1, or None; .* example 5, or",
        ),
        ({"skip_spikes": math.nan}, r"train\.skip_spikes=nan must be finite"),
        ({"skip_spikes": math.inf}, r"train\.skip_spikes=inf must be finite"),
    ],
)
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


# The compiled step.


@pytest.mark.thorough
def test_consecutive_bad_steps_are_counted_across_a_resume_until_a_good_one(
    corpus_overrides, tmp_path
):
    run, corpus = make_run((*TINY, *corpus_overrides))
    good = placed_batch(run, corpus)
    bad = placed_batch(run, corpus, **NAN)
    state = run.state_layout.initial()
    counts = []
    for step, batch in enumerate((bad, good, bad, bad, bad, good), 1):
        state, metrics = run.compile_train_step()(state, batch)
        counts.append((int(metrics["num_nonfinite_in_a_row"]), int(metrics["num_skipped"])))
        if step == 4:
            checkpoints = Checkpoints(tmp_path, CheckpointConfig(every_steps=1, max_to_keep=1))
            checkpoints.save(step, run.state_layout.to_portable(state), {})
            restored = checkpoints.restore(run.state_layout.portable)
            checkpoints.close()
            assert restored is not None
            state = run.state_layout.from_portable(restored[1])
    assert counts == [(1, 1), (0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]


# The limit of consecutive nonfinite steps.


def test_monitor_raises_one_step_after_too_many_in_a_row(tmp_path):
    assert (
        ask(NonfiniteMonitor(config(max_nonfinite_steps=3), tmp_path), 1, 2, 0, 1, 2, 3)
        == [None] * 6
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Diverged) as error:
        ask(NonfiniteMonitor(config(max_nonfinite_steps=3), tmp_path), 0, 1, 2, 3, 4)
    path = tmp_path / "nonfinite_step_4.npz"
    assert str(error.value) == (
        "the loss or the gradients of 3 steps in a row, up to step 4, were not finite "
        f"(its batch is in {path}); look for bad examples in that batch, lower "
        "optimizer.learning_rate, or set a wider precision.compute; the next start resumes "
        "from the last checkpoint before step 1"
    )
    with np.load(path, allow_pickle=False) as saved:
        assert sorted(saved) == sorted(ROWS)
        for name, rows in ROWS.items():
            np.testing.assert_array_equal(saved[name], rows, strict=True)


def test_monitor_saves_the_rows_of_the_bad_step_not_the_newest(tmp_path):
    nonfinite_monitor = NonfiniteMonitor(config(max_nonfinite_steps=1), tmp_path)
    bad, good = ({"num_nonfinite_in_a_row": jnp.int32(count)} for count in (1, 0))
    nonfinite_monitor.first_bad_step(7, {"tokens": np.array([7])}, bad)
    with pytest.raises(Diverged, match="up to step 7"):
        nonfinite_monitor.first_bad_step(8, {"tokens": np.array([8])}, good)
    assert np.load(tmp_path / "nonfinite_step_7.npz")["tokens"] == [7]


def test_monitor_without_a_limit_never_raises(tmp_path):
    counts = range(1, 100)
    assert set(ask(NonfiniteMonitor(config(max_nonfinite_steps=0), tmp_path), *counts)) == {None}


def test_skipped_spike_between_bad_steps_continues_the_row(tmp_path):
    nonfinite_monitor = NonfiniteMonitor(
        config(max_nonfinite_steps=3, on_nonfinite="rollback"), tmp_path
    )
    # Steps 2, 3, 5 and 6 are nonfinite; step 4 is finite, but a spike. So the row starts at step 2,
    # and a checkpoint of step 4 is not good enough.
    assert ask(nonfinite_monitor, 0, 1, 2, 2, 3, 4)[-1] == 2


def test_monitor_restarts_counting_after_a_rollback_and_limits_rollbacks(tmp_path, caplog):
    nonfinite_monitor = NonfiniteMonitor(
        config(max_nonfinite_steps=2, on_nonfinite="rollback"), tmp_path
    )
    with caplog.at_level(logging.WARNING):
        for number in range(1, MAX_ROLLBACKS + 1):
            # Step 4 was started before the limit was reached. It is not checked.
            assert ask(nonfinite_monitor, 0, 1, 2, 3, 1) == [None, None, None, 2, None]
            assert f"rollback {number} of {MAX_ROLLBACKS}" in caplog.messages[-1]
            nonfinite_monitor.first_bad_step(6, ROWS, {"num_nonfinite_in_a_row": jnp.int32(0)})
    with pytest.raises(Diverged, match=rf"\) after {MAX_ROLLBACKS} rollbacks; look"):
        ask(nonfinite_monitor, 1, 2, 3)


def test_error_is_reported_even_if_the_rows_cannot_be_saved(tmp_path):
    nonfinite_monitor = NonfiniteMonitor(config(max_nonfinite_steps=1), tmp_path / "gone")
    with pytest.raises(Diverged, match=r"were not finite \(its batch could not be saved: .*gone"):
        ask(nonfinite_monitor, 1, 2)


def test_each_process_saves_its_own_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(divergence, "wait_for_all", lambda what: None)
    with pytest.raises(Diverged, match=r"nonfinite_step_1_process_1\.npz\)"):
        ask(NonfiniteMonitor(config(max_nonfinite_steps=1), tmp_path), 1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["nonfinite_step_1_process_1.npz"]


# The run.


class Poisoned:
    """Batches of which some arrays are replaced at some steps."""

    def __init__(self, batches, bad_steps, replaced):
        self._batches = batches
        self._bad_steps = bad_steps
        self._replaced = replaced

    def __next__(self):
        batch = next(self._batches)
        is_bad = 1 + batch["index"][0] // 16 in self._bad_steps
        return batch | self._replaced if is_bad else batch

    def get_state(self):
        return self._batches.get_state()


def train(workdir: Path, overrides, bad_steps, replaced=NAN, *, restore=None) -> int:
    run, corpus = make_run(overrides)
    start = restore_or_initialize(run, corpus, workdir)
    start = dataclasses.replace(start, batches=Poisoned(start.batches, bad_steps, replaced))
    if restore is not None:  # called for rollbacks
        start.checkpoints.restore = restore
    phases = Phases()
    signals = StopSignals()
    logs = loop.open_logs(run, start.step, workdir, phases)
    outcome = loop.train(
        run, corpus, start, workdir, logs, saves=True, phases=phases, signals=signals
    )
    return outcome.exit_code


def logged(workdir: Path, name: str) -> dict[int, float]:
    return {m["step"]: m[name] for m in read_metrics(workdir / "metrics.jsonl") if name in m}


@pytest.mark.thorough
def test_too_many_bad_steps_in_a_row_stop_the_run_and_save_the_batch(corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides, "train.max_nonfinite_steps=4")
    bad_steps = {1, 2, 3, 5, 6, 7, 8, 9}
    assert train(tmp_path, (*overrides, "train.num_steps=4"), bad_steps) == FINISHED
    assert logged(tmp_path, "num_nonfinite_in_a_row") == dict(enumerate((1, 2, 3, 0), 1))
    with pytest.raises(Diverged, match="of 4 steps in a row, up to step 8, were not"):
        train(tmp_path, overrides, bad_steps)
    with np.load(tmp_path / "nonfinite_step_8.npz", allow_pickle=False) as saved:
        assert saved["index"].tolist() == list(range(7 * 16, 8 * 16))
        assert np.isnan(saved["weights"]).all() and saved["tokens"].shape == (16, 16)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "num_steps, bad_steps, rollbacks",
    [(16, {7, 8}, [(4, 9)]), (16, {7, 8, 13, 14}, [(4, 9), (10, 15)])],
    ids=["once", "twice"],
)
def test_rollback_continues_after_the_bad_batches_with_earlier_parameters(
    num_steps, bad_steps, rollbacks, corpus_overrides, tmp_path, caplog
):
    overrides = (*TINY, *corpus_overrides, "checkpoint.every_steps=2")
    overrides = (*overrides, f"train.num_steps={num_steps}")
    changes = ("train.max_nonfinite_steps=2", "train.on_nonfinite=rollback")
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, (*overrides, *changes), bad_steps) == FINISHED
    # Step 6 produced the parameters that failed at step 7. This is detected after step 9 started.
    assert [text for text in caplog.messages if text.startswith("continuing")] == [
        f"continuing after step {last} with the parameters of step {first}; steps {first + 1} to "
        f"{last} are skipped, which are examples {16 * first} to {16 * last - 1} of the run"
        for first, last in rollbacks
    ]
    run, corpus = make_run(overrides)
    state = run.state_layout.initial()
    expected = {}
    batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
    for step in range(1, num_steps + 1):
        batch = run.place_batch(next(batches))
        if not any(first < step <= last for first, last in rollbacks):
            state, metrics = run.compile_train_step()(state, batch)
            expected[step] = [float(metrics[name]) for name in ("loss", "learning_rate")]
    for i, name in enumerate(("loss", "learning_rate")):
        of_run = logged(tmp_path, name)
        assert {step: of_run[step] for step in expected} == {s: v[i] for s, v in expected.items()}
    assert logged(tmp_path, "num_skipped")[num_steps] == 5 * len(rollbacks)
    restored = restore_or_initialize(*make_run(overrides), tmp_path)
    assert (restored.step, int(restored.state.step)) == (num_steps, num_steps)
    assert digest(restored.state.params) == digest(state.params)


def names(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("max_to_keep", [1, 3])
def test_ruined_parameters_are_set_aside_and_displace_no_good_ones(
    max_to_keep, corpus_overrides, tmp_path, caplog
):
    changes = ("checkpoint.every_steps=3", f"checkpoint.max_to_keep={max_to_keep}", CONSTANT)
    overrides = (*TINY, *corpus_overrides, *changes, "train.max_nonfinite_steps=8")
    # As if step 6, whose own loss and gradients are finite, had ruined the parameters.
    with pytest.raises(Diverged, match="resumes from the last checkpoint before step 6"):
        train(tmp_path, (*overrides, "train.num_steps=40"), set(range(7, 41)))
    assert names(tmp_path) == ["3", "6.diverged"]
    assert "step 9 is not saved, because the last 3 step(s) were skipped" in caplog.text
    assert restore_or_initialize(*make_run(overrides), tmp_path).step == 3


@pytest.mark.thorough
def test_save_follows_after_the_next_good_step(corpus_overrides, tmp_path):
    changes = ("checkpoint.every_steps=3", "train.num_steps=8", CONSTANT)
    overrides = (*TINY, *corpus_overrides, *changes)
    assert train(tmp_path, overrides, {3, 4, 6}) == FINISHED
    assert names(tmp_path) == ["5", "7", "8"]


@pytest.mark.thorough
def test_run_does_not_end_with_a_skipped_step(corpus_overrides, tmp_path):
    changes = ("checkpoint.every_steps=3", "train.num_steps=8", CONSTANT)
    overrides = (*TINY, *corpus_overrides, *changes)
    with pytest.raises(Diverged, match="step 8 is not saved, .* resumes from step 6; lower"):
        train(tmp_path, overrides, {7, 8})
    assert names(tmp_path) == ["3", "6"]


@pytest.mark.thorough
def test_rollback_at_the_last_step_saves_the_restored_state_in_float16(corpus_overrides, tmp_path):
    """The rollback restores the state, which then counts no skipped steps."""
    changes = ("train.max_nonfinite_steps=2", "train.on_nonfinite=rollback")
    float16 = ("precision.compute=float16", "precision.loss_scale_window=0")
    overrides = (*TINY, *corpus_overrides, *changes, *float16, "checkpoint.every_steps=2")
    assert train(tmp_path, (*overrides, "train.num_steps=8"), {6, 7, 8}) == FINISHED
    assert names(tmp_path)[-1] == "8"


def test_rollback_without_an_older_checkpoint_raises_an_error(corpus_overrides, tmp_path):
    changes = ("train.max_nonfinite_steps=2", "train.on_nonfinite=rollback", CONSTANT)
    with pytest.raises(
        Diverged, match="cannot roll back: no checkpoint is older than step 2; lower"
    ):
        train(tmp_path, (*TINY, *corpus_overrides, *changes, "checkpoint.every_steps=2"), {3, 4})


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "error, expected", [(OSError("process 1: x"), ReadError), (ValueError("all x"), Diverged)]
)
def test_rollback_names_the_error_of_reading(corpus_overrides, tmp_path, error, expected):
    """A plain OSError is the error of another process; it must end this one in the same way."""

    def fail(*_, **__):
        raise error

    changes = ("train.max_nonfinite_steps=2", "train.on_nonfinite=rollback", CONSTANT)
    overrides = (*TINY, *corpus_overrides, *changes, "checkpoint.every_steps=2")
    with pytest.raises(expected, match=f"cannot roll back: {error}"):
        train(tmp_path, overrides, {6, 7}, restore=fail)
    assert [start.ended for start in summarize(tmp_path).starts] == ["failed"]


@pytest.mark.thorough
def test_diverged_run_exits_with_its_own_code_and_one_sentence(corpus_overrides, tmp_path, capsys):
    changes = ("optimizer.learning_rate=1e30", "train.max_nonfinite_steps=2")
    flags = [f"--config.{each}" for each in (*TINY, *corpus_overrides, *changes)]
    assert main([f"--config={CONFIG}", f"--workdir={tmp_path}", *flags]) == DIVERGED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the loss or the gradients of 2 steps in a row")
    assert len(list(tmp_path.glob("nonfinite_step_*.npz"))) == 1
    assert [start.ended for start in summarize(tmp_path).starts] == ["failed"]


@pytest.mark.thorough(but=["older-off"])
@pytest.mark.parametrize("now", [(), ("train.skip_spikes=3",)], ids=["off", "on"])
@pytest.mark.parametrize("before", ["older", "off", "on"])
def test_checkpoint_resumes_with_any_set_of_counters(before, now, corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides)
    run, corpus = make_run((*overrides, "train.skip_spikes=2") if before == "on" else overrides)
    state = run.state_layout.to_portable(run.state_layout.initial())
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if before == "older":
        del fields["num_nonfinite_in_a_row"], fields["spikes"]
    checkpoints = Checkpoints(tmp_path / "checkpoints", run.config.checkpoint)
    batches = train_batches(
        corpus, run.config.data, run.rows, seed=run.config.train.seed
    ).get_state()
    checkpoints.save(7, fields, {"batches": batches, "corpus": corpus.fingerprint})
    checkpoints.close()
    now_run, _ = make_run((*overrides, *now))
    restored = restore_or_initialize(now_run, corpus, tmp_path)
    assert restored.step == 7 and digest(restored.state) == digest(now_run.state_layout.initial())
