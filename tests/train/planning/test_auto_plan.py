"""`mesh.auto=True`: the plan of a run is chosen for its devices, saved, and kept."""

import logging
import types

import pytest

from predict.machines.targets import parse_target
from sharding.memory import MemoryConfig
from tests.train.planning.test_parallel_plan import config_of
from train.planning import auto_plan
from train.planning.auto_plan import plan_config, saved_settings
from train.planning.memory.budget import target_budget
from train.planning.plan_devices import described_devices

SAVED = {
    "mesh": {"auto": True, "data": 4, "model": 2, "pipeline": 1, "fsdp": 1, "context": 1}
    | {"expert": 1},
    "train": {"num_microbatches": 2, "remat": "full", "seed": 3},
    "memory": {"zero_stage": 1},
    "pipeline": {"schedule": "1f1b", "chunks": 1, "layers_per_stage": []},
}
NEW = {"mesh.data": 8, "mesh.model": 1, "train.num_microbatches": 1}


def plan(monkeypatch, *overrides: str, saved=SAVED, num_devices: int = 8):
    """Return the planned config; a search would choose NEW."""
    monkeypatch.setattr(auto_plan, "_search", lambda *_: NEW)
    config = config_of("mesh.auto=True", *overrides)
    fixed = {override.partition("=")[0] for override in overrides}
    devices: auto_plan.PlanDevices = types.SimpleNamespace(count=num_devices)  # pyright: ignore
    return plan_config(config, fixed, devices, saved, timeout_s=1)


def test_run_keeps_the_plan_of_its_workdir(monkeypatch):
    config = plan(monkeypatch)
    assert (config.mesh.data, config.mesh.model) == (4, 2)
    assert (config.train.num_microbatches, config.train.remat) == (2, "full")
    assert config.memory.zero_stage == 1 and config.pipeline.layers_per_stage == ()
    assert config.mesh.auto
    assert config.train.seed != 3  # not a part of the plan


def test_saved_lists_are_the_tuples_of_the_command_line(monkeypatch):
    saved = SAVED | {"pipeline": SAVED["pipeline"] | {"layers_per_stage": ["auto"]}}
    config = plan(monkeypatch, "pipeline.layers_per_stage=auto", saved=saved)
    assert (config.mesh.data, config.pipeline.layers_per_stage) == (4, ("auto",))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("overrides", "values", "reason"),
    [
        ((), {"saved": None}, ""),
        ((), {"num_devices": 4}, "it is for 8 devices, and 4 were found"),
        (("mesh.replan=True",), {}, ""),
        (("mesh.model=1",), {}, "mesh.model was 2, and the command line sets 1"),
        (("memory.zero_stage=0",), {}, "memory.zero_stage was 1, and the command line sets 0"),
        ((), {"saved": SAVED | {"mesh": {"data": 8}}}, ""),
        # The run's other checks refuse another batch size.
        (
            ("data.global_batch_size=24", "mesh.auto=True"),
            {"saved": SAVED | {"train": {"num_microbatches": 5}}},
            "train.num_microbatches=5 × mesh.data=4 × mesh.fsdp=1 must divide",
        ),
    ],
)
def test_run_is_planned_again(overrides, values, reason, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, auto_plan.__name__):
        config = plan(monkeypatch, *overrides, **values)
    assert (config.mesh.data, config.mesh.model) == (8, 1)
    assert config.mesh.auto and not config.mesh.replan
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("overrides", "expected"), [((), "host"), (("memory.placement=auto",), "auto")]
)
def test_kept_plan_keeps_its_placement_unless_it_is_chosen_by_the_memory(
    overrides, expected, monkeypatch
):
    # A checkpoint of a run with memory.placement=auto has what was chosen, such as "host".
    saved = SAVED | {"memory": {"zero_stage": 1, "placement": "host"}}
    config = plan(monkeypatch, *overrides, saved=saved)
    assert config.mesh.data == 4 and config.memory.placement == expected


def test_saved_config_of_a_run_with_its_own_mesh_has_no_plan():
    assert saved_settings({"mesh": {"data": 8}}) is None
    assert saved_settings({"mesh": {"data": 8, "auto": False}}) is None


def test_choosing_again_needs_a_plan():
    with pytest.raises(ValueError, match=r"mesh\.replan=True .* set mesh\.auto=True"):
        config_of("mesh.replan=True")


def test_memory_is_not_planned_for_every_mesh_that_is_tried():
    configs = []
    target = parse_target("h100:1x8")
    devices = described_devices(
        target,
        target_budget(MemoryConfig(), target),
        lambda config, _: configs.append(config),  # pyright: ignore[reportArgumentType]
    )
    config = config_of("memory.placement=auto")
    devices.assemble(config)
    devices.assemble_part(config, 2)
    assert [each.memory.placement for each in configs] == ["device"] * 2
