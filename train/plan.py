"""Chooses the mesh of a run, and everything that depends on it, for GPUs that you do not have.

    python -m train.plan --config=configs/llama.py:3-70b --target=h100:8x8 --out=plan.yaml

Values that are set on the command line stay as they are. A plan changes how fast a step is, and
never a result. docs/plan.md explains the output.

The target `cpu:1x8` stands for 8 devices that this machine simulates. With `--calibrate`, the
command measures the devices of this machine, and stores their rates for the plans of `mesh.auto`.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import re
import shlex
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax

from convert.options import read_options
from distributed.startup import skip_absent_gpus
from fields.paths import cache_path, local_path
from predict.machines.targets import parse_target
from sharding.mesh import MeshConfig, make_mesh
from train.compile import (
    load_config,
    print_or_refuse,
    run_for,
    sizes_without_data,
    target_parser,
)
from train.config import config_files
from train.config.overrides import Overrides
from train.config.schema import RunConfig
from train.pictures import check_picture, plot_plans
from train.planning.calibration import calibrate
from train.planning.explanation import (
    first_tried_as_json,
    not_compiled_as_json,
    not_compiled_as_text,
    plans_as_json,
    plans_as_text,
)
from train.planning.finalists import Choice
from train.planning.memory.budget import budget_of, target_budget
from train.planning.parallel_plan import UNPLANNED, ParallelPlan, open_config
from train.planning.plan_devices import PlanDevices, described_devices, present_devices
from train.planning.plan_limits import check_max_microbatches, check_replicas
from train.planning.plan_search import PlanSearch
from train.run.assemble import assemble_run
from untrusted.commands import run_command
from untrusted.outputs import check_file

#: Most devices that a CPU simulates for a plan.
_MAX_CPU_DEVICES = 512


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code, see train/lifecycle/exit_codes.py."""
    parser = target_parser(
        "train.plan", "Chooses the mesh of a run, and all that depends on it.", required=False
    )
    parser.add_argument(
        "--out", type=local_path, help="write the config with the best plan here, as YAML"
    )
    parser.add_argument(
        "--picture",
        type=local_path,
        help="draw the step times of all plans into this file, such as .svg",
    )
    parser.add_argument(
        "--max_microbatches", type=int, help="try at most this many microbatches per step"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="instead, measure the devices of this machine for the plans of mesh.auto",
    )
    args, others = parser.parse_known_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO, force=True)
    if args.calibrate:
        return print_or_refuse(partial(_calibrate, args, others), needs_devices=True)
    if args.config is None or args.target is None:
        parser.error("the following arguments are required: --config, --target")
    return print_or_refuse(partial(_plan, args, others))


def _plan(args: argparse.Namespace, others: list[str]) -> str:
    """Return the report on the best plans, and write the best into `--out`."""
    check_file("--out", args.out)
    check_picture("--picture", args.picture)
    overrides = Overrides.parse(others)
    config_dict = load_config(args.config, overrides, read_options(args))
    fixed = overrides.keys
    check_replicas(config_dict, fixed, _num_devices(args.target, args.network))
    config = open_config(config_dict, fixed)
    check_max_microbatches(args.max_microbatches, config, fixed)
    devices = devices_of(args.target, config, args.network)
    per_host = devices.machine.gpus_per_host
    search = PlanSearch(config, devices, fixed, args.max_microbatches)
    choices = search.best()
    runners_up = search.runners_up(choices)
    tried = search.first_tried()
    budget_bytes = devices.budget.device_bytes
    plain: Any = config_files.load(args.config, overrides, allow_import=args.allow_import)
    settings = _settings(choices[0].plan, plain, fixed)
    if args.out is not None:
        with plain.ignore_type():
            plain.update_from_flattened_dict(settings)
        args.out.write_text(config_files.as_yaml(plain.to_dict()), encoding="utf-8")
    if args.picture is not None:
        _draw(search, choices, budget_bytes, args.picture)
    if args.json:
        report = {"target": args.target, "num_devices": devices.count}
        report["plans"] = plans_as_json(choices, per_host)
        report["runners_up"] = not_compiled_as_json(runners_up, choices, math.inf)
        report["first_tried"] = first_tried_as_json(tried, choices, budget_bytes, per_host)
        return json.dumps(report)
    options = " ".join(_option(key, value) for key, value in settings.items())
    not_compiled = not_compiled_as_text(runners_up, tried, choices, budget_bytes)
    parts = [plans_as_text(choices, per_host), not_compiled, options]
    return "\n\n".join(part for part in parts if part)


def _settings(plan: ParallelPlan, config_dict: Any, fixed: Collection[str]) -> dict[str, Any]:
    """Return the values to change in the user's config, so that it follows a plan."""
    settings = plan.settings()
    # Without a pipeline, a plan sets no keys of it, but the values of the file do not fit the mesh.
    others = {"mesh.auto": False} | {key: x for key, x in UNPLANNED.items() if key not in fixed}
    for key, value in others.items():
        section, name = key.split(".")
        if key not in settings and config_dict.get(section, {}).get(name, value) != value:
            settings[key] = value
    return settings


def _draw(search: PlanSearch, choices: list[Choice], budget_bytes: float, out: Path) -> None:
    """Draw the composed times of all plans, and the predicted times of those that were compiled."""
    composed: dict[str, list[tuple[float, bool]]] = {}
    for plan in search.plans:
        cost = search.cost(plan)
        fits = cost.memory_bytes <= budget_bytes
        composed.setdefault(str(plan.mesh), []).append((cost.step_s, fits))
    compiled: dict[str, float] = {}
    for choice in choices:  # the fastest first
        compiled.setdefault(str(choice.plan.mesh), choice.step.prediction.step_s)
    plot_plans(composed, compiled, out)


def _calibrate(args: argparse.Namespace, others: list[str]) -> str:
    """Measure the devices of this machine; return their rates as text."""
    if args.out is not None or args.json:
        raise ValueError("--calibrate plans nothing; leave out --out and --json")
    directory = cache_path()
    if args.config is not None:
        config_dict = load_config(args.config, Overrides.parse(others), read_options(args))
        directory = cache_path(config_dict.data.cache_dir)
    elif others:
        raise ValueError(f"--calibrate needs no {others[0]}; leave it out, or add --config")
    if args.target is None:
        skip_absent_gpus()
        devices = jax.devices()
    else:
        devices = _simulated_devices(args.target)
    calibration = calibrate(devices, directory)
    rates = dataclasses.asdict(calibration)
    rows = [f"{name:22s} {rates[name]:.3g}" for name in rates if name.endswith("_s")]
    head = (
        f"{calibration.num_devices} × {calibration.device_kind}, rates of one while all are busy:"
    )
    return "\n".join([head, *rows, f"stored in {directory}"])


def _option(key: str, value: Any) -> str:
    """Return the option of train.main that sets a key, for a shell."""
    text = ",".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)
    return shlex.quote(f"--config.{key}={text}")


def devices_of(target: str, config: RunConfig, network: float | None = None) -> PlanDevices:
    """Return the devices of a target, to plan for.

    Raises:
        ValueError: the target or the network is not valid.
    """
    if not target.startswith("cpu:"):
        gpus = parse_target(target, network)
        return described_devices(gpus, target_budget(config.memory, gpus), run_for)
    jax.config.update("jax_enable_x64", config.precision.compute == "float64")
    devices = _simulated_devices(target)
    budget = budget_of(config.memory, make_mesh(MeshConfig(data=-1), devices))
    sizes = sizes_without_data(config)
    assemble = partial(
        assemble_run,
        vocab_size=sizes.vocab_size,
        num_labels=sizes.num_labels,
        device_budget=budget.device_bytes,
    )
    return present_devices(devices, budget, config.data.cache_path, assemble)


def _num_devices(target: str, network: float | None) -> int:
    """Return the number of devices of a target; raises the same errors as `devices_of`."""
    if target.startswith("cpu:"):
        return _num_simulated(target)
    return parse_target(target, network).num_devices


def _simulated_devices(target: str) -> list[Any]:
    """Return N devices that this machine's CPU simulates, for a target `cpu:1xN`."""
    count = _num_simulated(target)
    with contextlib.suppress(RuntimeError):  # already initialized, as in a notebook
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"--target={target}: this process has {len(devices)} CPU devices already; start a new "
            "process"
        )
    return devices[:count]


def _num_simulated(target: str) -> int:
    shape = re.fullmatch(r"cpu:1x([1-9]\d{0,2})", target)
    if shape is None or int(shape[1]) > _MAX_CPU_DEVICES:
        raise ValueError(
            f"--target={target[:200]!r} must be cpu:1xN, such as cpu:1x8 for 8 devices that this "
            f"machine simulates; N is at most {_MAX_CPU_DEVICES}"
        )
    return int(shape[1])


if __name__ == "__main__":
    run_command(main)
