"""Tests of the fault campaign on one device: it runs, and its checks detect differences."""

import dataclasses
import json
import os
import random
import subprocess
import sys

import pytest

from tests.drawn import draw as draw_indices
from tests.faults.__main__ import as_text, chosen_kinds
from tests.faults.campaign import Results, campaign, impossible_kinds, summary
from tests.faults.hits import IN_START, delete, flip_byte, truncate
from tests.faults.kinds import KINDS, draw
from tests.faults.results import compare
from tests.faults.runs import OVERRIDES, DisturbedRun, Reference, Setting, prepare
from tests.faults.start import Broken
from tests.faults.storage import build_read_errors, has_failed_read, unreadable

pytestmark = pytest.mark.drawn(1, among="thorough")

#: Overrides of a run on one device, which compiles in seconds.
SMALL = [o for o in OVERRIDES if not o.startswith(("mesh.", "model.num_layers"))]


@pytest.mark.thorough
def test_disturbed_run_ends_as_the_undisturbed_one(tmp_path):
    setting = prepare(tmp_path, [*SMALL, "model.num_layers=1"], num_steps=60)
    results = Results()
    campaign(setting, ["divergence", "byte flipped"], random.Random(0), results)
    assert results.broken == []
    figures = summary(results)
    assert (figures["faults"], figures["runs"], figures["starts"]) == (2, 1, 3)
    json.dumps(figures, allow_nan=False)
    assert (
        summary(Results.from_json(json.loads(json.dumps(dataclasses.asdict(results))))) == figures
    )
    whole = {"parts": [{"wall_s": 1.0}], "skipped": {}, "restart_overhead_s": None} | figures
    assert "byte flipped" in as_text(whole)


def test_compare_names_the_step_that_differs():
    expected = {1: ((("loss", 2.0),),), 2: ((("loss", 1.0),),)}
    compare(dict(expected), expected)
    with pytest.raises(Broken, match="step 2 differs"):
        compare(expected | {2: ((("loss", 1.0000001),),)}, expected)
    with pytest.raises(Broken, match="step 2 differs"):  # logged twice
        compare(expected | {2: 2 * expected[2]}, expected)
    with pytest.raises(Broken, match="step 1 differs"):
        compare({2: expected[2]}, expected)


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_run_survives_signals_unreadable_checkpoints_and_hard_links(tmp_path):
    setting = prepare(tmp_path, [*SMALL, "model.num_layers=1"], num_steps=60)
    kinds = [
        "signal in start-up",
        "read errors last",
        "two signals in a save",
        "hard link",
        "Ctrl-C twice",
        "read errors pass",
    ]
    names = [kinds[index] for index in draw_indices("kinds of faults", len(kinds), 3)]
    names = [name for name in names if name not in impossible_kinds(setting, names)]
    results = Results()
    campaign(setting, names, random.Random(0), results)
    assert results.broken == []
    assert sum(tally.faults for tally in results.tallies.values()) == len(names)


READ = """
import os, sys
for path in sys.argv[1:]:
    try:
        print(open(path).read())
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.parametrize(
    ("variables", "content"),
    [
        ({}, ["Input/output error", "Input/output error", "2 in a save", "a log"]),
        ({"TAIBAI_FAULTS_STEP": "2"}, ["1", "Input/output error", "2 in a save", "a log"]),
        ({"TAIBAI_FAULTS_SECONDS": "0"}, ["1", "2", "2 in a save", "a log"]),
        (
            {"TAIBAI_FAULTS_PROCESS": "1", "TAIBAI_PROCESS_ID": "0"},
            ["1", "2", "2 in a save", "a log"],
        ),
    ],
)
def test_reads_of_chosen_checkpoints_fail(variables, content, tmp_path):
    setting = Setting(scratch=tmp_path, overrides=(), num_steps=1)
    if reason := build_read_errors(setting):
        pytest.skip(reason)
    run = DisturbedRun(
        setting, Reference(trajectory={}, digests={}, start_s=0.0, save_s=0.0), tmp_path
    )
    files = {"1/state/d": "1", "2/c": "2", "2.tmp/c": "2 in a save", "../log": "a log"}
    for name, text in files.items():
        (run.checkpoints / name).parent.mkdir(parents=True, exist_ok=True)
        (run.checkpoints / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", READ, *(run.checkpoints / name for name in files)],
        env=os.environ | unreadable(run, seconds=100.0) | variables,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == content, done.stderr
    assert has_failed_read(run) == ("Input/output error" in content)


@pytest.mark.parametrize(
    ("text", "first", "count"),
    [("kill*", IN_START, 5), ("hard link,SIGTERM", "SIGTERM", 2), ("*", IN_START, len(KINDS))],
)
def test_kinds_are_chosen_by_patterns(text, first, count):
    names = chosen_kinds(text)
    assert (names[0], len(names)) == (first, count)
    with pytest.raises(ValueError, match="--kinds=.*'kil' matches none of the kinds kill in"):
        chosen_kinds(text + ",kil")


@pytest.mark.parametrize("how", [flip_byte, truncate, delete])
def test_damage_changes_a_file(how, tmp_path):
    for seed in range(50):
        file = tmp_path / "file"
        file.write_bytes(b"some bytes")
        how(file, random.Random(seed))
        assert not file.exists() or file.read_bytes() != b"some bytes"


def test_draw_has_100_kills_and_at_least_one_fault_of_each_kind():
    kills = [name for name in KINDS if name.startswith("kill")]
    assert len(draw(kills, 100, random.Random(0))) == 100
    assert set(draw(list(KINDS), 1, random.Random(0))) == set(KINDS)
    assert draw(kills, 9, random.Random(1)) == draw(kills, 9, random.Random(1))
    assert draw([IN_START], 100, random.Random(0)) == [IN_START] * KINDS[IN_START].share
