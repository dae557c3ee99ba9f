"""Tests of the drawn step: everything is drawn at its time, and the files stay small."""

import json
from xml.etree import ElementTree

import pytest

from predict.time.picture import draw
from predict.time.prediction import Prediction, predict
from predict.time.trace import trace, write_trace
from tests.predict.time.programs import (
    MACHINE,
    MESH,
    computation,
    done,
    fusion,
    gather,
    loop,
    module,
)


def predicted(computations: str, entry: str) -> Prediction:
    return predict(module(computations, entry), MESH, MACHINE)


def layers(trips: int) -> Prediction:
    body = gather("ag", 500, "body.arg") + fusion("f", 450, "body.arg") + done("ag")
    entry = loop("w", "body", trips, "layers") + fusion("last", 100, "w")
    return predicted(computation("body", body), entry)


def spans(prediction: Prediction) -> list[dict]:
    return [event for event in trace(prediction)["traceEvents"] if event["ph"] == "X"]


def lane_names(prediction: Prediction) -> dict[int, str]:
    events = trace(prediction)["traceEvents"]
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_trace_places_kernels_and_communication_on_their_lanes():
    found = predicted("", gather("ag", 500) + fusion("f", 200) + done("ag") + fusion("g", 100))
    lanes = lane_names(found)
    placed = {e["name"]: (lanes[e["tid"]], e["ts"], e["dur"]) for e in spans(found)}
    assert placed["f"] == ("compute", 0, pytest.approx(200))
    assert placed["ag"] == ("all-gather", 0, pytest.approx(500))
    assert placed["g"] == ("compute", pytest.approx(500), pytest.approx(100))


def test_trace_summarizes_repeated_iterations(tmp_path):
    found = layers(100)
    kernels = [e for e in spans(found) if lane_names(found)[e["tid"]] == "compute"]
    assert [e["name"] for e in kernels] == ["f"] * 4 + ["layers × 96", "last"]
    assert kernels[-2]["args"] == {"iterations": 96}
    assert kernels[-2]["dur"] == pytest.approx(96 * 500)
    assert kernels[-1]["ts"] == pytest.approx(100 * 500)
    write_trace(found, tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8")) == trace(found)


def test_trace_and_picture_of_deep_loops_stay_small():
    body = "".join(fusion(f"f{i}", 100, f"f{i - 1}" if i else "a.arg") for i in range(50))
    computations = computation("a", body)
    for inner, outer in ("ab", "bc", "cd", "de"):
        computations += computation(outer, loop(f"w{outer}", inner, 50, operand=f"{outer}.arg"))
    found = predicted(computations, loop("w", "e", 50))
    assert found.step_s == pytest.approx(50**6 * 1e-4)
    assert len(json.dumps(trace(found))) < 20e6
    assert len(draw(found)) < 1e6


def test_draw_shows_each_part_for_its_time():
    entry = gather("ag", 500) + fusion("f", 200) + done("ag") + fusion("g", 500)
    svg = draw(predicted("", entry), "toy")
    root = ElementTree.fromstring(svg)
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "toy: predicted step, 1 ms" in texts
    assert "other kernels 0.7 ms" in texts
    assert "communication 0.5 ms, 0.3 exposed" in texts
    assert not any("attention" in text or "host" in text for text in texts)
    # The box of the gather is half as wide as the lane.
    (communication,) = (p for p in root.iter() if p.get("fill") == "#009e73" and p.get("d"))
    widths = [
        float(box.split("h")[1].split("v")[0]) for box in communication.attrib["d"].split("z")[:-1]
    ]
    assert sum(widths) == pytest.approx(1026 / 2, abs=1.5)


def test_draw_names_loops():
    assert "layers × 100" in draw(layers(100))
