"""Tests of a prediction as text and as JSON."""

import json

import pytest

from sharding.analysis.cost.prediction import format_prediction
from tests.sharding.analysis.cost.programs import (
    done,
    fusion,
    gather,
    step,
)


def test_prediction_as_text_and_json():
    found = step("", gather("ag", 500) + fusion("f", 200) + done("ag") + fusion("g", 500))
    parsed = json.loads(json.dumps(found.to_json()))
    assert parsed["step_s"] == pytest.approx(1e-3)
    assert parsed["collectives"][0]["kind"] == "all-gather"
    lines = format_prediction(found).splitlines()
    assert lines[-1].split()[:3] == ["all-gather", "fsdp", "-"]
    assert "step                          1.00  100.0%" in lines
    assert format_prediction(step("", fusion("f", 5))).endswith("no collectives")
