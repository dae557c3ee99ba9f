"""Profiles of steps can be opened, and metrics name the slowest process."""

import gzip
import json

import jax
import numpy as np
import pytest

from docs.examples import slowest_operations
from tests.runs import TINY, arguments
from tests.train.lifecycle.test_stop_signals import of_two, start
from tests.train.refusals import refusal
from train.main import main
from train.reporting.metrics import read_metrics
from train.reporting.throughput import HostTimes

SMALL = (*TINY, "model.num_layers=1", "train.num_steps=4", "log.every_steps=2")


@pytest.fixture
def overrides(corpus_overrides):
    return (*SMALL, *corpus_overrides)


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_steps")
def test_profile_has_the_steps_for_xprof_and_perfetto(overrides, tmp_path, capsys):
    mesh = ("mesh.pipeline=2", "model.num_layers=2")
    assert main(arguments(tmp_path, (*overrides, *mesh, "log.profile_steps=2,3"))) == 0
    (directory,) = (tmp_path / "profile" / "process_0" / "plugins" / "profile").iterdir()
    assert directory.name == "steps_2_3"
    (file,) = directory.glob("*.xplane.pb")
    steps = [
        dict(event.stats)["step_num"]
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert steps == [2, 3]
    with gzip.open(directory / "perfetto_trace.json.gz") as content:
        names = [event.get("name") for event in json.load(content)["traceEvents"]]
    assert names.count("train") == 2
    output = capsys.readouterr()
    assert f"profile of steps 2 to 3: {tmp_path}/profile/process_0" in output.err
    slowest_operations.main(str(tmp_path / "profile"))
    milliseconds = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(milliseconds) == 8 and milliseconds == sorted(milliseconds, reverse=True)


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_steps")
def test_profile_that_cannot_be_written_is_a_warning(overrides, tmp_path, capsys):
    (tmp_path / "profile").write_text("a file in the place of the folder")
    assert main(arguments(tmp_path, (*overrides, "log.profile_steps=1,2"))) == 0
    assert "no profile: NotADirectoryError: " in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 4, 4]


@pytest.mark.parametrize(
    "steps, message",
    [
        ("3,2", "log.profile_steps=(3, 2): the first step must be before the last one"),
        ("3,5", "log.profile_steps=(3, 5) must be at most train.num_steps=4; choose earlier"),
        ("3", "log.profile_steps=(3,) must be 2 numbers, each at least 1, or (); choose"),
        ("0,2", "log.profile_steps=(0, 2) must be 2 numbers, each at least 1"),
        ("1.5,2", "log.profile_steps=(1.5, 2) must be two whole numbers, such as 10,13"),
    ],
)
def test_unusable_steps_are_refused(steps, message, overrides, tmp_path, capsys):
    error = refusal(tmp_path, (*overrides, f"log.profile_steps={steps}"), capsys)
    assert message in error and not (tmp_path / "profile").exists()


def test_length_in_epochs_limits_the_steps(overrides, tmp_path, capsys):
    epochs = [each for each in overrides if "num_steps" not in each]
    epochs += ["train.num_epochs=0.1", "log.profile_steps=3,40"]
    error = refusal(tmp_path, epochs, capsys)
    assert "log.profile_steps=(3, 40) must be at most train.num_steps=4" in error


def test_host_times_are_compared_over_processes():
    times = HostTimes()
    assert times.lap() == {}
    for row in ([0, 0, 0], [1000, 9000, 2000], [3000, 5000, 4000]):
        times.add(np.array(row, np.int32))
    lap = times.lap()
    assert lap == pytest.approx(
        {"host_time_max_s": 0.007, "host_time_mean_s": 0.004, "slowest_process": 1}
    )
    assert times.lap() == {}
    times.add(np.array([5], np.int32))
    assert times.lap() == {}  # a single process has nothing to compare with


SLOW_HOST = """
import sys, time
import jax
from train.main import main
from train.run.run import Run
place_batch = Run.place_batch
def slow(run, batch):
    time.sleep(0.2 * jax.process_index())
    return place_batch(run, batch)
Run.place_batch = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_slowest_process_is_named(overrides, tmp_path):
    mesh = ("mesh.pipeline=2", "mesh.data=4", "model.num_layers=2", "log.profile_steps=2,3")
    launch = of_two(tmp_path, (*overrides, *mesh, "log.every_steps=1"))
    program = launch.index("train.main")
    launch[program - 1 : program + 1] = "-c", SLOW_HOST
    launcher = start(launch)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    last = read_metrics(tmp_path / "metrics.jsonl")[-2]
    assert last["step"] == 4 and last["slowest_process"] == 1
    assert last["host_time_max_s"] > 0.2 > last["host_time_mean_s"] > 0.1
    # Each process has a pipeline stage of its own.
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"process_0", "process_1"}
