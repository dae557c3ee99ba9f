"""Trackers record all logged values, and none of their failures reaches the run."""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.runs import CONFIG, ROOT, TINY
from train.lifecycle.exit_codes import FINISHED, REFUSED
from train.main import main
from train.reporting import trackers
from train.reporting.metrics import read_metrics
from train.reporting.trackers import MAX_WAITING, Trackers

SHORT = (*TINY, "train.num_steps=6", "eval.every_steps=3")


class Recorder:
    """A tracker that remembers everything."""

    record_id = "record 7"

    def __init__(self, run):
        self.run = run
        self.logged = []
        self.ended = None

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def finish(self, ended):
        self.ended = ended


class Failing(Recorder):
    """A tracker whose methods fail."""

    def log(self, step, metrics):
        super().log(step, metrics)
        raise ConnectionError(f"no answer at {step}")

    def finish(self, ended):
        sys.exit(5)


def start(workdir, **factories) -> Trackers:
    return Trackers(factories, workdir, {"train.seed": 0}, first_step=0)


def run_main(workdir, overrides) -> int:
    arguments = [f"--config.{override}" for override in overrides]
    return main([f"--config={CONFIG}", f"--workdir={workdir}", *arguments])


def stop_at_3(event):
    """A callback that ends a run, whose next start continues it."""
    if event.step == 3:
        event.stop("half is enough")


@pytest.fixture
def own(monkeypatch):
    """A module of the user's with trackers, which keeps the started ones."""
    started = []

    def remember(run):
        started.append(Recorder(run))
        return started[-1]

    module = SimpleNamespace(Tracker=remember, stop_at_3=stop_at_3, number=3, __name__="own")
    monkeypatch.setitem(sys.modules, "own", module)
    return started


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_steps")
def test_own_tracker_records_what_is_logged_and_continues_its_record(
    own, corpus_overrides, tmp_path
):
    overrides = (*SHORT, *corpus_overrides, "log.trackers=own:Tracker")
    stop = "train.evaluation_callbacks=own:stop_at_3"
    assert run_main(tmp_path, (*overrides, stop)) == FINISHED
    assert run_main(tmp_path, overrides) == FINISHED
    first, second = own
    entries = read_metrics(tmp_path / "metrics.jsonl")
    logged = [{"step": step, **metrics} for step, metrics in first.logged + second.logged]
    numbers = [{k: v for k, v in entry.items() if v is not None} for entry in entries]
    assert logged == numbers
    assert [first.ended, second.ended] == ["finished", "finished"]
    assert [first.run.record_id, second.run.record_id] == [None, "record 7"]
    assert [first.run.first_step, second.run.first_step] == [0, 3]
    assert second.run.parameters["optimizer.learning_rate"] == 0.01
    assert second.run.parameters["log.trackers"] == ["own:Tracker"]


def test_failing_tracker_is_logged_once(tmp_path, caplog):
    failing = []

    def make_failing(run):
        failing.append(Failing(run))
        return failing[-1]

    def fail_to_start(run):
        raise ConnectionError("nobody is there")

    running = start(tmp_path, failing=make_failing, absent=fail_to_start, good=Recorder)
    for step in range(1, 4):
        running.log(step, {"loss": 1.0})
    running.finish("finished")
    assert [step for step, _ in failing[0].logged] == [1, 2, 3]
    messages = sorted(record.getMessage() for record in caplog.records)
    assert messages == [
        "log.trackers=absent cannot record; the run continues without it",
        "log.trackers=failing failed; the run continues, and later failures are not logged",
    ]
    assert caplog.text.count("Traceback") == 2 and "no answer at 1" in caplog.text
    assert json.loads((tmp_path / "trackers.json").read_text()).keys() == {"failing", "good"}
    assert not trackers.has_hanging_trackers()


def test_hanging_tracker_delays_nothing_and_is_left_behind(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT_S", 0.2)
    is_called = threading.Event()
    network = threading.Event()
    hanging = []

    class Hanging(Recorder):
        def __init__(self, run):
            super().__init__(run)
            hanging.append(self)

        def log(self, step, metrics):
            is_called.set()
            network.wait()
            super().log(step, metrics)

    running = start(tmp_path, hanging=Hanging)
    running.log(1, {"loss": 1.0})
    is_called.wait()
    for step in range(2, 2 * MAX_WAITING):
        running.log(step, {"loss": 1.0})
    running.finish("finished")
    assert trackers.has_hanging_trackers()
    dropped, late = [record.getMessage() for record in caplog.records]
    assert f"hanging is too slow: the values of step {MAX_WAITING + 2}, and" in dropped
    assert "did not end its record in 0 s" in late
    network.set()
    for thread in threading.enumerate():
        if thread.name == "tracker hanging":
            thread.join()
    assert [step for step, _ in hanging[0].logged] == [*range(1, MAX_WAITING + 2)]
    assert hanging[0].ended == "finished"


@pytest.mark.thorough
def test_process_does_not_wait_for_a_tracker_that_was_left_behind(tmp_path):
    program = f"""
import atexit, pathlib, time
from train.main import _end
from train.reporting import trackers

trackers.STOP_TIMEOUT_S = 0.2
atexit.register(time.sleep, 300)

def hang(run):
    time.sleep(300)

running = trackers.Trackers({{"hanging": hang}}, pathlib.Path({str(tmp_path)!r}), {{}}, 0)
running.finish("stopped")
print("the end")
_end(75)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 75
    assert done.stdout == "the end\n"


@pytest.mark.parametrize("name, command", [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_missing_package_is_named_before_data_is_read(name, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"train.reporting.{name}_tracker", raising=False)
    overrides = (*SHORT, "data.paths=/nowhere/*.txt", f"log.trackers={name}")
    assert run_main(tmp_path, overrides) == REFUSED
    printed = capsys.readouterr().err
    assert f"error: log.trackers={name}: " in printed
    assert f"install it: pip install {command}\n" in printed


@pytest.mark.parametrize(
    "name, problem",
    [
        ("wanbd", "is unknown; choose wandb, mlflow, or an import path"),
        ("own:number", "is of type int, but must be a class"),
        ("own:Missing", "has no 'Missing'"),
    ],
    ids=["unknown", "number", "missing"],
)
def test_wrong_tracker_is_refused_before_data_is_read(name, problem, own, tmp_path, capsys):
    overrides = (*SHORT, "data.paths=/nowhere/*.txt", f"log.trackers={name}")
    assert run_main(tmp_path, overrides) == REFUSED
    printed = capsys.readouterr().err
    assert f"log.trackers={name!r}" in printed and problem in printed


def test_damaged_file_with_record_ids_is_refused(tmp_path):
    (tmp_path / "trackers.json").write_text('{"wandb": 3}')
    with pytest.raises(ValueError, match="trackers.json .* must be of type dict"):
        start(tmp_path, good=Recorder)
