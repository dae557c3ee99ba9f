"""The stored checks of the planner, and the tables that show them."""

import json

import pytest

from benchmarks import plans
from benchmarks.harness import docs_page
from predict.machines.targets import parse_target
from sharding.memory import MemoryConfig
from train.planning.memory.budget import target_budget
from train.planning.plan_devices import described_devices

RESULTS = json.loads(plans._RESULTS.read_text(encoding="utf-8"))


def test_docs_show_the_stored_results():
    text = plans._DOCS.read_text(encoding="utf-8")
    assert docs_page.with_tables(plans._DOCS, plans.tables(RESULTS)) == text


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result["command"].split()[5])
def test_stored_choices_are_as_good_as_promised(result):
    if result["check"] == "times":
        assert result["tau"] >= 0.6
        return
    steps = result["steps_s"]
    assert result["num_plans"] == len(steps)
    assert result["best_s"] == min(steps.values()) == steps[result["best"]]
    assert result["loss"] == pytest.approx(steps[result["chosen"]] / result["best_s"] - 1)
    assert result["loss"] <= 0.03


def test_times_need_the_devices_of_the_target():
    target = parse_target("h100:1x2")
    budget = target_budget(MemoryConfig(), target)
    devices = described_devices(target, budget, lambda config, target: pytest.fail("not needed"))
    expected = "--target=h100:1x2: --check=times needs these devices, and this machine has"
    with pytest.raises(ValueError, match=expected):
        plans._present(devices)


def test_what_to_check_is_required(capsys):
    with pytest.raises(SystemExit):
        plans.main(["--target=h100:1x8"])
    assert "required: --config, --target, --check" in capsys.readouterr().err
