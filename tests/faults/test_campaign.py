"""Tests of the fault campaign on one device: it runs, and its checks detect differences."""

import dataclasses
import json
import random

import pytest

from tests.faults.__main__ import as_text
from tests.faults.campaign import Results, campaign, summary
from tests.faults.hits import IN_START, delete, flip_byte, truncate
from tests.faults.kinds import KINDS, draw
from tests.faults.results import compare
from tests.faults.runs import OVERRIDES, prepare
from tests.faults.start import Broken

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
