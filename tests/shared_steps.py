"""Runs that share their traced and compiled steps, for tests of what happens around a step.

Tracing and compiling takes most of the time of a tiny run. Tests of checkpoints, logs and signals
train the same model dozens of times, and only its data and its files differ.
"""

import dataclasses
from typing import Any

import jax

from train.config.schema import RunConfig
from train.run.assemble import assemble_run
from train.run.run import Run

#: Sections and keys on which no step depends.
_OF_FILES = (
    "paths",
    "mixture",
    "cache_dir",
    "verify",
    "num_threads",
    "validation_fraction",
    "streaming",
    "cache_gb",
    "shuffle_window",
    "num_workers",
)
_OF_LOOP = (
    "max_nonfinite_steps",
    "on_nonfinite",
    "failure_timeout_s",
    "compilation_cache",
    "early_stopping",
    "early_stopping_min_delta",
    "step_callbacks",
    "evaluation_callbacks",
)
_SECTIONS = ("log", "eval", "checkpoint", "init_from")

#: What a step depends on -> the newest run with such a step.
_newest: dict[str, Run] = {}


def assemble_with_shared_steps(
    config: RunConfig, mesh: jax.sharding.Mesh, *, device_budget: float = float("inf"), **sizes: Any
) -> Run:
    """Assemble a run as `assemble_run` does, with the steps of an earlier run if possible."""
    jax_config: Any = jax.config
    parts = (_step_config(config), mesh, mesh.devices, sizes, jax_config.jax_enable_x64)
    key = repr(parts)
    earlier = _newest.get(key)
    if earlier is None:
        run = assemble_run(config, mesh, device_budget=device_budget, **sizes)
    else:
        run = dataclasses.replace(earlier, config=config, device_budget=device_budget)
        results = {name: x for name, x in vars(earlier).items() if name.endswith("_result")}
        vars(run).update(results)
    _newest[key] = run
    return run


def _step_config(config: RunConfig) -> dict[str, Any]:
    """Return the values of a config on which its steps depend."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    for section, names in {"data": _OF_FILES, "train": _OF_LOOP}.items():
        values[section] = {
            each.name: getattr(values[section], each.name)
            for each in dataclasses.fields(values[section])
            if each.name not in names
        }
    if config.optimizer.schedule == "constant" and config.train.ema_decay is None:
        del values["train"]["num_steps"]
    return {name: value for name, value in values.items() if name not in _SECTIONS}
