"""`mesh.auto=True`: the plan of a run for the devices that it found, chosen or kept.

    workdir has a plan for as many devices ──> keep it
    otherwise ──> PlanSearch on process 0 ──> settings on all processes ──> config of the run

The run's config.yaml and its checkpoints contain the chosen values, so a resumed run keeps them.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from distributed.compilation_cache import without_compilation_cache
from distributed.messages import Exchange
from fields.numbers import shown
from sharding.memory import AUTO
from sharding.mesh import AXES
from train.config.schema import RunConfig
from train.planning.explanation import plans_as_text
from train.planning.parallel_plan import SETTINGS, with_open_choices
from train.planning.plan_devices import PlanDevices
from train.planning.plan_search import PlanSearch

_log = logging.getLogger(__name__)


def plan_config(
    config: RunConfig,
    fixed: Collection[str],
    devices: PlanDevices,
    saved: Mapping[str, Any] | None,
    *,
    timeout_s: float,
) -> RunConfig:
    """Return the config of a run with a plan: the saved one if it may be kept, or a new one.

    All processes call this; process 0 searches.

    Args:
        config: run's config, from `open_config`, with `mesh.auto=True`.
        fixed: keys of the config that stay as they are.
        saved: config that the run's workdir has; None if it has no checkpoint.
        timeout_s: seconds that process 0 may take.

    Raises:
        ValueError: no plan divides the model and the batch, or none fits into memory.
        OSError: process 0 does not answer.
    """
    config, fixed = with_open_choices(config, fixed)
    workdir_settings = None if saved is None or config.mesh.replan else saved_settings(saved)
    if workdir_settings is not None:
        if config.memory.placement == AUTO:  # planned again, for the mesh that is kept
            workdir_settings.pop("memory.placement", None)
        problem = _why_not_kept(workdir_settings, config, fixed, devices.count)
        if not problem:
            _log.info("plan    kept from the workdir; mesh.replan=True chooses again")
            return _with_plan(config, workdir_settings)
        _log.info("plan    the workdir's plan is not kept: %s", problem)
    settings = Exchange(timeout_s).on_first(lambda: _search(config, fixed, devices))
    return _with_plan(config, settings)


def saved_settings(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the plan in a saved config: `section.key` -> value; None if it was not planned."""
    if not saved.get("mesh", {}).get("auto"):
        return None
    settings = {}
    for key in SETTINGS:
        section, name = key.split(".")
        if name in saved.get(section, {}):
            value = saved[section][name]  # YAML has no tuples
            settings[key] = tuple(value) if isinstance(value, list) else value
    return settings


def _why_not_kept(
    workdir_settings: Mapping[str, Any], config: RunConfig, fixed: Collection[str], num_devices: int
) -> str:
    sizes = [workdir_settings.get(f"mesh.{axis}") for axis in AXES]
    planned_for = math.prod(size if isinstance(size, int) else 0 for size in sizes)
    if planned_for != num_devices:
        return f"it is for {planned_for} devices, and {num_devices} were found"
    for key in workdir_settings.keys() & set(fixed):
        section, name = key.split(".")
        fixed_value = getattr(getattr(config, section), name)
        if fixed_value != workdir_settings[key] and fixed_value != -1:
            return (
                f"{key} was {shown(workdir_settings[key])}, and the command line sets "
                f"{shown(fixed_value)}"
            )
    try:
        _with_plan(config, workdir_settings)
    except ValueError as error:  # such as another batch size
        return str(error)
    return ""


def _search(config: RunConfig, fixed: Collection[str], devices: PlanDevices) -> dict[str, Any]:
    """Search on this process, log the plans, and return the settings of the best."""
    _log.info("plan    chooses the mesh for %s", devices.name)
    cached = without_compilation_cache() if devices.are_described else contextlib.nullcontext()
    with cached:
        choices = PlanSearch(config, devices, fixed).best()
    _log.info("%s", plans_as_text(choices, devices.machine.gpus_per_host))
    return choices[0].plan.settings()


def _with_plan(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    changed = config.with_values(settings)
    return dataclasses.replace(changed, mesh=dataclasses.replace(changed.mesh, replan=False))
