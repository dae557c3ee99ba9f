"""Tests of a prediction as text and as JSON."""

import dataclasses
import json

import pytest

from predict.time.prediction import format_prediction, predict
from tests.predict.time.programs import (
    MACHINE,
    MESH,
    US,
    done,
    fusion,
    gather,
    module,
    step,
)


def test_predict_counts_the_allocation_of_memory_that_a_machine_does_not_keep():
    program = module("", fusion("f", 200))
    kept = predict(program, MESH, MACHINE, temp_bytes=10**6)
    assert kept.step_s == pytest.approx(200 * US)
    machine = dataclasses.replace(MACHINE, allocation_s_per_byte=3e-9)
    cleared = predict(program, MESH, machine, temp_bytes=10**6)
    assert cleared.step_s == cleared.other_s == pytest.approx(3200 * US)


def test_prediction_as_text_and_json():
    found = step("", gather("ag", 500) + fusion("f", 200) + done("ag") + fusion("g", 500))
    parsed = json.loads(json.dumps(found.to_json()))
    assert parsed["step_s"] == pytest.approx(1e-3)
    assert parsed["collectives"][0]["kind"] == "all-gather"
    lines = format_prediction(found).splitlines()
    assert lines[-1].split()[:3] == ["all-gather", "fsdp", "-"]
    assert "step                          1.00  100.0%" in lines
    assert format_prediction(step("", fusion("f", 5))).endswith("no collectives")
