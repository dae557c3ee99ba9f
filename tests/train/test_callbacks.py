"""Callbacks see the logged values, and can log more, save, and stop the run."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.runs import CONFIG, ROOT, TINY
from train.lifecycle.callbacks import Event
from train.lifecycle.exit_codes import FINISHED, REFUSED
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(1, among="thorough")]

SHORT = (*TINY, "train.num_steps=6", "eval.every_steps=3")


@pytest.fixture
def watch(monkeypatch):
    """A module of the user's, without functions yet."""
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "watch", module)
    return module


def run_main(workdir, overrides, *, after_step="", after_evaluation="") -> int:
    callbacks = [f"train.step_callbacks={after_step}"] if after_step else []
    if after_evaluation:
        callbacks.append(f"train.evaluation_callbacks={after_evaluation}")
    arguments = [f"--config.{override}" for override in (*overrides, *callbacks)]
    return main([f"--config={CONFIG}", f"--workdir={workdir}", *arguments])


def entries(workdir) -> list[dict]:
    return read_metrics(workdir / "metrics.jsonl")


def saved_steps(workdir) -> set[int]:
    return {int(path.name) for path in (workdir / "checkpoints").iterdir()}


def test_callbacks_see_what_is_logged_and_log_more(watch, corpus_overrides, tmp_path):
    steps = []
    evaluations = []

    def after_step(event):
        steps.append({"step": event.step, **event.metrics})
        event.log("loss_in_bits", event.metrics["loss"] / 0.6931)
        event.log("num_calls", len(steps))

    def after_evaluation(event):
        evaluations.append({"step": event.step, **event.metrics})
        event.log("bleu", 12.5)

    watch.after_step = after_step
    watch.after_evaluation = after_evaluation
    code = run_main(
        tmp_path,
        (*SHORT, *corpus_overrides, "log.every_steps=2"),
        after_step="watch:after_step",
        after_evaluation="watch:after_evaluation",
    )
    assert code == FINISHED
    logged = entries(tmp_path)
    assert steps == [entry for entry in logged if "loss" in entry]
    assert [step["step"] for step in steps] == [1, 2, 4, 6]
    assert evaluations == [entry for entry in logged if "eval_loss" in entry]
    assert [entry for entry in logged if "bleu" in entry] == [
        {"step": 3, "bleu": 12.5},
        {"step": 6, "bleu": 12.5},
    ]
    more = [entry for entry in logged if "num_calls" in entry]
    assert [entry["num_calls"] for entry in more] == [1, 2, 3, 4]
    assert more[0]["loss_in_bits"] == steps[0]["loss"] / 0.6931


@pytest.mark.parametrize(
    "when, last_step", [("after_step", 4), ("after_evaluation", 3)], ids=["step", "evaluation"]
)
def test_callback_stops_a_run_which_saves_and_succeeds(
    when, last_step, watch, corpus_overrides, tmp_path, capsys
):
    def stop(event):
        if event.step >= 2:
            event.stop("it is good enough")

    watch.stop = stop
    # An evaluation between two steps would let the processes agree a step earlier.
    period = 0 if when == "after_step" else 3
    overrides = (*SHORT, *corpus_overrides, f"eval.every_steps={period}")
    code = run_main(tmp_path, overrides, **{when: "watch:stop"})
    assert code == FINISHED
    assert max(entry["step"] for entry in entries(tmp_path)) == last_step
    assert saved_steps(tmp_path) == {last_step}
    printed = capsys.readouterr().err
    assert f"ended after step {last_step} of train.num_steps=6: it is good enough" in printed


def test_stop_waits_for_a_state_that_can_be_saved(watch, corpus_overrides, tmp_path, monkeypatch):
    def stop(event):
        if event.step == 2:
            event.stop("it is good enough")

    watch.stop = stop
    # Step 4, at which the run would end, counts as skipped because of a NaN.
    monkeypatch.setattr(
        "train.loop._TrainingLoop._num_skipped_in_a_row", lambda loop: int(loop.step == 4)
    )
    overrides = (*SHORT, *corpus_overrides, "eval.every_steps=0")
    assert run_main(tmp_path, overrides, after_step="watch:stop") == FINISHED
    assert max(entry["step"] for entry in entries(tmp_path)) == 5
    assert saved_steps(tmp_path) == {5}


def test_callbacks_ask_for_saves(watch, corpus_overrides, tmp_path):
    def save_at(step):
        def save(event):
            if event.step == step:
                event.save()

        return save

    watch.save_at_2 = save_at(2)
    watch.save_at_5 = save_at(5)
    assert (
        run_main(
            tmp_path,
            (*SHORT, *corpus_overrides, "eval.every_steps=5"),
            after_step="watch:save_at_2",
            after_evaluation="watch:save_at_5",
        )
        == FINISHED
    )
    assert saved_steps(tmp_path) == {4, 5, 6}


@pytest.mark.thorough
def test_failing_callback_is_logged_once_and_changes_nothing(
    watch, corpus_overrides, tmp_path, capsys
):
    def fail(event):
        event.log("before", event.step)
        if event.step > 1:
            event.metrics["loss"] = 0.0  # it is read-only

    def leave(event):
        sys.exit(3)

    watch.fail = fail
    watch.leave = leave
    overrides = (*SHORT, *corpus_overrides)
    assert run_main(tmp_path / "plain", overrides) == FINISHED
    capsys.readouterr()
    code = run_main(
        tmp_path / "run",
        overrides,
        after_step="watch:fail,watch:leave",
        after_evaluation="watch:fail",
    )
    assert code == FINISHED
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 3
    assert printed.count("'mappingproxy' object does not support item assignment") == 2
    assert "the callback watch:leave failed at step 1; the run continues" in printed
    losses = [
        [entry["loss"] for entry in entries(tmp_path / name) if "loss" in entry]
        for name in ("plain", "run")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["loss", "step", "eval_mine"])
def test_callback_cannot_log_what_the_run_logs(name, tmp_path):
    event = Event(3, {"loss": 2.0}, tmp_path)
    with pytest.raises(ValueError, match=f"logs '{name}' or may do so; choose another name"):
        event.log(name, 1.0)


@pytest.mark.parametrize(
    "path, problem",
    [
        ("watch:nothing", "has no 'nothing'"),
        ("watch:number", "is of type int, but must be a function of an event"),
        ("print", "is not an import path"),
    ],
    ids=["missing", "number", "no path"],
)
def test_wrong_callback_is_refused_before_data_is_read(path, problem, watch, tmp_path, capsys):
    watch.number = 1
    watch.__name__ = "watch"
    overrides = (*SHORT, "data.paths=/nowhere/*.txt")
    assert run_main(tmp_path, overrides, after_evaluation=path) == REFUSED
    printed = capsys.readouterr().err
    assert "train.evaluation_callbacks='" in printed and problem in printed


#: The module of a user whose callbacks run on one of two processes.
WATCH = """
import jax

def after_step(event):
    event.log("process", jax.process_index())
    if event.step == 2:
        event.stop("of a step")

def after_evaluation(event):
    event.log("process", jax.process_index())
    event.stop("of an evaluation")
"""


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
@pytest.mark.parametrize("when, last_step", [("step", 4), ("evaluation", 3)])
def test_processes_stop_at_the_same_step(when, last_step, corpus_overrides, tmp_path):
    (tmp_path / "watch_two.py").write_text(WATCH)
    workdir = tmp_path / "run"
    overrides = (
        *SHORT,
        *corpus_overrides,
        "mesh.data=2",
        f"eval.every_steps={0 if when == 'step' else 3}",
        f"train.{when}_callbacks=watch_two:after_{when}",
    )
    launcher = ["-m", "launch.local", "--processes=2", "--devices_per_process=1", "--"]
    program = ["-m", "train.main", f"--config={CONFIG}", f"--workdir={workdir}"]
    flags = [f"--config.{override}" for override in overrides]
    done = subprocess.run(
        [sys.executable, *launcher, sys.executable, *program, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == FINISHED, done.stderr
    assert done.stderr.count(f"ended after step {last_step} of train.num_steps=6: of a") == 1
    logged = entries(workdir)
    assert max(entry["step"] for entry in logged) == last_step
    assert {entry["process"] for entry in logged if "process" in entry} == {0}
    assert saved_steps(workdir) == {last_step}
