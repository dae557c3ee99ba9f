"""Goodput: productive and lost time over several starts of a run."""

import json
import logging
import re

import pytest

from train import goodput
from train.goodput import CAUSES, GoodputRecord, summarize
from train.lifecycle.phases import NAMES, Phases


class World:
    """A monotonic clock and a time of day, which may disagree."""

    def __init__(self):
        self.monotonic_s = 50.0
        self.time_of_day = 1_700_000_000.0

    def pass_(self, seconds):
        self.monotonic_s += seconds
        self.time_of_day += seconds


@pytest.fixture
def world():
    return World()


def begin(workdir, world, *, first_step=0, startup_s=5.0, **options):
    """Start the run; it takes `startup_s` to reach its first step."""
    world.monotonic_s = 0.0  # a new process has a new clock
    phases = Phases(age_s=0, clock=lambda: world.monotonic_s)
    world.pass_(startup_s)
    record = GoodputRecord(
        workdir,
        phases,
        first_step=first_step,
        num_devices=8,
        num_processes=2,
        time_of_day=lambda: world.time_of_day,
        **options,
    )
    return phases, record


def train(world, phases, steps, *, step_s=10.0, data_s=1.0):
    for step in steps:
        with phases("step", step):
            with phases("data", step):
                world.pass_(data_s)
            world.pass_(step_s)


def read(workdir, number):
    return json.loads((workdir / "goodput" / f"{number:04d}.json").read_text())


def lost(summary):
    return {cause: seconds for cause, seconds in summary.lost_s.items() if seconds}


def test_each_start_writes_its_record(tmp_path, world):
    phases, record = begin(tmp_path, world)
    with phases("compile"):
        world.pass_(7)
    train(world, phases, range(1, 4))
    record.write(3)
    assert read(tmp_path, 1) == {
        "started_at": 1_700_000_000.0,
        "written_at": 1_700_000_045.0,
        "seconds": dict.fromkeys(NAMES, 0.0)
        | {"startup": 5.0, "compile": 7.0, "data": 3.0, "step": 30.0},
        "first_step": 0,
        "last_step": 3,
        "recomputed_steps": 0,
        "recomputed_s": 0.0,
        "num_devices": 8,
        "num_processes": 2,
        "ended": None,
    }
    record.write(3, "finished")
    assert read(tmp_path, 1)["ended"] == "finished"
    assert [path.name for path in (tmp_path / "goodput").iterdir()] == ["0001.json"]


def test_summary_covers_a_killed_and_resumed_run(tmp_path, world):
    phases, record = begin(tmp_path, world)
    train(world, phases, range(1, 8))
    record.write(7)
    world.pass_(100)
    phases, record = begin(tmp_path, world, first_step=5)
    with phases("restore"):
        world.pass_(4)
    train(world, phases, range(6, 11))
    with phases("save", 10):
        world.pass_(2)
    record.write(10, "finished")

    second = read(tmp_path, 2)
    assert (second["recomputed_steps"], second["recomputed_s"]) == (2, 22)
    summary = summarize(tmp_path)
    assert summary == record.summary()
    # The run has 10 steps. Steps 6 and 7 were done twice; only their first time is productive.
    assert summary.productive_s == 100
    assert lost(summary) == {
        "startup": 10,
        "restore": 4,
        "data": 10,
        "save": 2,
        "recomputed": 22,
        "down": 100,
    }
    assert summary.total_s == 248 == world.time_of_day - 1_700_000_000
    assert summary.fraction == 100 / 248
    assert len(summary.starts) == 2


def test_recomputed_steps_are_those_done_before(tmp_path, world):
    phases, record = begin(tmp_path, world)
    train(world, phases, range(1, 10))
    record.write(9)
    phases, record = begin(tmp_path, world, first_step=4)
    for last, steps, seconds in ((4, 0, 0), (6, 2, 22), (9, 5, 55), (12, 5, 55)):
        train(world, phases, range(record.summary().starts[-1].last_step + 1, last + 1))
        record.write(last)
        entry = read(tmp_path, 2)
        assert (entry["recomputed_steps"], entry["recomputed_s"]) == (steps, seconds)


def test_recomputed_steps_follow_from_the_furthest_start(tmp_path, world):
    for first, last in ((0, 9), (0, 3)):
        phases, record = begin(tmp_path, world, first_step=first)
        record.write(last)
    phases, record = begin(tmp_path, world, first_step=2)
    train(world, phases, range(3, 11))
    record.write(10)
    assert read(tmp_path, 3)["recomputed_steps"] == 7


@pytest.mark.parametrize("jump_s", [-1e9, -3600, 3600])
def test_setting_the_time_of_day_changes_no_duration(tmp_path, world, jump_s):
    phases, record = begin(tmp_path, world)
    train(world, phases, [1])
    world.time_of_day += jump_s
    train(world, phases, [2])
    record.write(2)
    summary = summarize(tmp_path)
    assert summary.total_s == 27
    assert lost(summary) == {"startup": 5, "data": 2}


def test_downtime_is_never_negative(tmp_path, world):
    _, record = begin(tmp_path, world)
    record.write(0)
    world.time_of_day -= 10_000
    _, record = begin(tmp_path, world)
    record.write(0)
    summary = summarize(tmp_path)
    assert summary.lost_s["down"] == 0
    assert summary.total_s == 10


def test_finished_run_has_no_downtime(tmp_path, world):
    for ended in ("finished", "stopped", "failed"):
        _, record = begin(tmp_path, world)
        record.write(0, ended)
        world.pass_({"finished": 1e6, "stopped": 30, "failed": 7}[ended])
    _, record = begin(tmp_path, world)
    record.write(0)
    assert summarize(tmp_path).lost_s["down"] == 37


@pytest.mark.parametrize(
    "name, text",
    [
        ("0002.json", ""),
        ("0002.json", '{"started_at": 17000'),
        ("0002.json", "[1, 2]"),
        ("0002.json", '{"loss": 3}'),
        ("0002.json", "[" * 100_000),
        ("0002.json", "\0\0\0"),
        ("notes.txt", "a note"),
    ],
)
def test_invalid_record_is_skipped_with_a_warning(tmp_path, world, caplog, name, text):
    _, record = begin(tmp_path, world)
    record.write(3)
    (tmp_path / "goodput" / name).write_text(text)
    with caplog.at_level(logging.WARNING):
        summary = summarize(tmp_path)
    assert [start.number for start in summary.starts] == [1]
    assert re.search(f"{name} is ignored", caplog.text)
    caplog.clear()
    _, record = begin(tmp_path, world, first_step=2)
    record.write(3)
    # A torn file keeps its number, so that it is not overwritten.
    assert (tmp_path / "goodput" / name).read_text() == text
    assert [start.number for start in summarize(tmp_path).starts] == [1, 2 + (name[0] == "0")]


@pytest.mark.parametrize(
    "change",
    [
        {"started_at": float("nan")},
        {"started_at": 1e300},
        {"written_at": "today"},
        {"seconds": {"step": -1}},
        {"seconds": {"step": 10**400}},
        {"seconds": [1]},
        {"last_step": 1.5},
        {"last_step": True},
        {"recomputed_s": None},
        {"ended": "broken"},
        {"colour": "blue"},
    ],
)
def test_file_with_impossible_values_is_skipped(tmp_path, world, caplog, change):
    for _ in range(2):
        _, record = begin(tmp_path, world)
        record.write(3)
    entry = read(tmp_path, 2)
    (tmp_path / "goodput" / "0002.json").write_text(json.dumps(entry | change))
    assert [start.number for start in summarize(tmp_path).starts] == [1]
    assert "0002.json is ignored" in caplog.text


def test_a_phase_of_another_version_counts_as_other(tmp_path, world):
    _, record = begin(tmp_path, world)
    record.write(3)
    entry = read(tmp_path, 1)
    entry["seconds"]["upload"] = 12.5
    (tmp_path / "goodput" / "0001.json").write_text(json.dumps(entry))
    assert summarize(tmp_path).lost_s["other"] == 12.5


def test_interrupted_write_leaves_the_previous_record(tmp_path, world, monkeypatch, caplog):
    _, record = begin(tmp_path, world)
    record.write(3)

    def fail(source, target):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        record.write(4)
        record.write(5)
    assert len(re.findall("no space left", caplog.text)) == 1
    assert summarize(tmp_path).starts[0].last_step == 3
    record.write(6)
    assert summarize(tmp_path).starts[0].last_step == 6


def test_leftover_of_an_interrupted_write_is_not_a_start(tmp_path, world, caplog):
    _, record = begin(tmp_path, world)
    record.write(3)
    (tmp_path / "goodput" / ".0002.json.tmp").write_text('{"started_at": 17')
    assert [start.number for start in summarize(tmp_path).starts] == [1]
    assert caplog.text == ""


def test_only_the_first_process_writes(tmp_path, world):
    _, record = begin(tmp_path, world, is_writer=False)
    record.write(3)
    assert list(tmp_path.iterdir()) == []


def test_unknown_end_is_rejected(tmp_path, world):
    _, record = begin(tmp_path, world)
    with pytest.raises(ValueError, match="ended='done' is unknown"):
        record.write(3, "done")


def test_main_prints_one_line_per_cause_and_per_start(tmp_path, world, capsys):
    phases, record = begin(tmp_path, world)
    train(world, phases, range(1, 5))
    record.write(4)
    world.pass_(51)
    phases, record = begin(tmp_path, world, first_step=4)
    train(world, phases, range(5, 9))
    record.write(8, "finished")
    assert goodput.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "goodput 53.7% of 149.0 s" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["productive"] == ["80.0", "53.7"]
    assert rows["down"] == ["51.0", "34.2"]
    assert rows["data"] == ["8.0", "5.4"]
    assert rows["total"] == ["149.0", "100.0"]
    assert set(CAUSES) < set(rows)
    assert rows["0001"][2:] == "49.0 0 to 4 0 8 device(s) of 2 process(es), killed".split()
    assert rows["0002"][2:] == "49.0 4 to 8 0 8 device(s) of 2 process(es), finished".split()


def test_main_reports_unreadable_files_in_one_sentence(tmp_path, capsys):
    assert goodput.main([str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r"error: .*nowhere/goodput has no record of a start; give .*\n", captured.err
    )
