"""Checks the plans of `train.plan`: `python -m benchmarks.plans`.

    python -m benchmarks.plans --config=configs/gpt2.py --target=h100:1x8 --check=all
    python -m benchmarks.plans --config=configs/gpt2.py:small --target=h100:4x2 --check=first
    python -m benchmarks.plans --config=configs/gpt2.py --target=cpu:1x8 --check=times
    python -m benchmarks.plans --config=configs/gpt2.py:small --target=h100:1x1 --check=times
    python -m benchmarks.plans --check=again --out=benchmarks/results/plans.json
    python -m benchmarks.plans --docs

- *all* compiles every legal plan whole, and says by how much the planner's choice is slower than
  the best of them, by the same predictor. Fix values on the command line until few plans are left.
- *first* does the same with the first plans by composed time, `--count` of them, each with another
  mesh, schedule or number of microbatches. It is for spaces that are too large to compile.
- *times* runs the best plan of each mesh on this machine, in turns, and compares the order of the
  measured times with the predicted order (Kendall's tau). A single device has one mesh; there it
  runs the best plan of each number of microbatches and rematerialization.
- *again* plans the configs of all *all* and *first* in a file again, and compares the choices with
  the times in the file. If the predictor has changed, or the rates that `train.plan --calibrate`
  has stored for this machine's CPU, these must be compiled again.

A plan that does not fit into memory, or that the run's checks refuse, is not legal. With --docs,
the command writes the tables of docs/plan.md from benchmarks/results/plans.json.
"""

import concurrent.futures
import itertools
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import docs_page, report
from benchmarks.harness.batches import random_batch
from benchmarks.harness.ranks import kendall_tau
from benchmarks.harness.timing import interleave
from benchmarks.step import contender_of
from fields.paths import local_path
from predict.machines.targets import target_of
from train.compile import load_config, sizes_without_data
from train.config.overrides import Overrides
from train.config.schema import RunConfig
from train.plan import devices_of
from train.planning.memory.budget import fits, needs_of
from train.planning.parallel_plan import ParallelPlan, open_config
from train.planning.plan_devices import PlanDevices
from train.planning.plan_search import PlanSearch
from train.run.assemble import assemble_run
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "plans.json"
_DOCS = _ROOT / "docs" / "plan.md"
#: Relative difference of two predictions of the same step.
_SAME_TIME = 1e-6


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.plans")
    parser.add_argument("--config", help="file.py, file.py:argument or config.yaml")
    parser.add_argument("--target", help="as for train.plan; --check=times needs these devices")
    parser.add_argument("--network", type=float, help="as for train.plan")
    parser.add_argument("--check", choices=("all", "first", "times", "again"))
    parser.add_argument("--count", type=int, default=20, help="plans of --check=first")
    parser.add_argument("--out", type=local_path, help="add the figures to this JSON file")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each plan that is timed")
    parser.add_argument("--docs", action="store_true", help="write docs/plan.md from the results")
    args, others = parser.parse_known_args(argv)
    if args.docs:
        docs_page.write_tables(_DOCS, tables(report.read_json(_RESULTS)))
        return 0
    if args.check == "again" and args.out is not None:
        return _again(args.out)
    if args.config is None or args.target is None or args.check is None:
        parser.error("the following arguments are required: --config, --target, --check")
    logging.basicConfig(format="%(message)s", level=logging.INFO, force=True)
    if args.check != "times" or args.target.startswith("cpu:"):
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    config, devices, fixed = _inputs(args.config, args.target, args.network, others)
    if args.check == "times":
        figures = check_times(config, devices, fixed, num_rounds=args.rounds)
    else:
        count = args.count if args.check == "first" else None
        figures = check_plans(config, devices, fixed, count=count)
    command = command_line("benchmarks.plans", argv)
    machine = {"cpu": report.cpu_name(), "num_cores": report.num_cores()}
    figures = {"command": command, "versions": report.versions(), "machine": machine} | figures
    print(json.dumps(figures, indent=1, allow_nan=False))
    if args.out is not None:
        known = report.read_json(args.out) if args.out.exists() else []
        other_results = [result for result in known if result["command"] != command]
        report.write_json(args.out, [*other_results, figures], indent=1)
    return 0


def _inputs(
    config: str, target: str, network: float | None, others: list[str]
) -> tuple[RunConfig, PlanDevices, set[str]]:
    """Return the config, the devices, and the keys that the command line fixes.

    Layers are a loop, unless the command line asks for others: the planner unrolls only the best
    plan, after the search.
    """
    overrides = Overrides.parse(others)
    config_dict = load_config(config, overrides)
    with config_dict.ignore_type():
        config_dict.train.unroll = bool(config_dict.train.unroll)
    fixed = overrides.keys | {"train.unroll"}
    opened = open_config(config_dict, fixed)
    return opened, devices_of(target, opened, network), fixed


def _again(file: Path) -> int:
    """Plan the configs in a file again, and update their choices; return the exit code."""
    jax.config.update("jax_platforms", "cpu")
    results = report.read_json(file)
    asked = {
        number: _arguments_of(result["command"])
        for number, result in enumerate(results)
        if result["check"] != "times"
    }
    # Compiling for GPUs starts jax, which then keeps its number of devices.
    targets = [target for _, target, _, _ in asked.values()]
    simulated = [target.rpartition("x")[2] for target in targets if "cpu:" in target]
    jax.config.update("jax_num_cpu_devices", max(map(int, simulated), default=1))
    for number, (config, target, network, others) in asked.items():
        result = results[number]
        search = PlanSearch(*_inputs(config, target, network, others))
        chosen = search.best()[0]
        name = str(chosen.plan)
        stored_s = result["steps_s"].get(name)
        chosen_s = chosen.step.prediction.step_s
        if stored_s is None and result["check"] == "first":
            stored_s = result["steps_s"][name] = chosen_s
        if stored_s is None or abs(chosen_s / stored_s - 1) > _SAME_TIME:
            print(
                f"error: {name} now takes {chosen_s} s, but {file} has {stored_s} s; compile all "
                f"plans again: {result['command']}",
                file=sys.stderr,
            )
            return 2
        best = min(result["steps_s"], key=lambda name: result["steps_s"][name])
        loss = stored_s / result["steps_s"][best] - 1
        print(f"{loss:6.1%}  {target}  {config}  {name}", flush=True)
        results[number] = result | {
            "num_plans": len(result["steps_s"]),
            "chosen": name,
            "chosen_s": stored_s,
            "best": best,
            "best_s": result["steps_s"][best],
            "loss": loss,
        }
    report.write_json(file, results, indent=1)
    return 0


def _arguments_of(command: str) -> tuple[str, str, float | None, list[str]]:
    """Return the config, the target, the network and the overrides of a command of this module."""
    words = shlex.split(command)[3:]
    options = dict(word.split("=", 1) for word in words)
    option_prefixes = ("--config=", "--target=", "--network=", "--check=", "--count=", "--out=")
    others = [word for word in words if not word.startswith(option_prefixes)]
    network = float(options["--network"]) if "--network" in options else None
    return options["--config"], options["--target"], network, others


def check_plans(
    config: RunConfig, devices: PlanDevices, fixed: set[str], *, count: int | None
) -> dict[str, Any]:
    """Compile legal plans; return their predicted times and the loss of the planner's choice.

    Args:
        config: run's config, from `open_config`.
        devices: devices to plan for.
        fixed: keys of the config that stay as they are.
        count: how many plans of different shapes to compile, those with the shortest composed times
            first; None: all plans.
    """
    search = PlanSearch(config, devices, fixed)
    chosen = search.best()[0]
    chosen_s = chosen.step.prediction.step_s
    plans = search.plans
    steps: dict[str, float] = {}
    if count is not None:
        plans = _best_of_each(search, lambda plan: plan.shape)
        steps[str(chosen.plan)] = chosen_s
    for plan, run in itertools.islice(_legal_runs(config, devices, plans), count):
        steps[str(plan)] = devices.compile_whole(run).prediction.step_s
        jax.clear_caches()
        print(f"{1e3 * steps[str(plan)]:10.3f} ms  {plan}", file=sys.stderr, flush=True)
    best = min(steps, key=lambda name: steps[name])
    return {
        "check": "all" if count is None else "first",
        "num_plans": len(steps),
        "chosen": str(chosen.plan),
        "chosen_s": chosen_s,
        "best": best,
        "best_s": steps[best],
        "loss": chosen_s / steps[best] - 1,
        "steps_s": steps,
    }


def check_times(
    config: RunConfig, devices: PlanDevices, fixed: set[str], *, num_rounds: int
) -> dict[str, Any]:
    """Time the best plan of each mesh; return measured and predicted times and Kendall's tau.

    Args:
        config: run's config, from `open_config`.
        devices: devices, which must be present.
        fixed: keys of the config that stay as they are.
        num_rounds: turns of each plan.

    Raises:
        ValueError: the devices are not present.
    """
    present = _present(devices)
    search = PlanSearch(config, devices, fixed)
    search.best()
    runs = dict(_legal_runs(config, devices, _best_of_each(search, _way)))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = [*pool.map(devices.compile_whole, runs.values())]
        predicted = {
            str(plan): step.prediction.step_s for plan, step in zip(runs, steps, strict=True)
        }
        if present:
            budget = devices.budget.device_bytes
            runs = {plan: _on(present, run.config, budget) for plan, run in runs.items()}
            _ = [*pool.map(Run.compile_train_step, runs.values())]
    trained = {str(plan): contender_of(run, random_batch(run)).step for plan, run in runs.items()}
    times = interleave(trained, num_rounds=num_rounds, num_steps=2)
    measured = {name: each.median_s for name, each in times.items()}
    return {
        "check": "times",
        "device_kind": jax.devices()[0].device_kind,
        "tau": kendall_tau([*predicted.values()], [*measured.values()]),
        "plans": {
            name: {"predicted_s": predicted[name], "measured_s": measured[name]}
            for name in sorted(measured, key=lambda name: measured[name])
        },
    }


def _present(devices: PlanDevices) -> list[Any]:
    """Return the GPUs of this machine if the plans are for a description of them, or []."""
    if not devices.are_described:
        return []
    gpus = jax.devices()[: devices.count]
    kind = gpus[0].device_kind
    target = target_of(kind, len(gpus), devices.machine.gpus_per_host)
    if target is None or target.name != devices.name:
        raise ValueError(
            f"--target={devices.name}: --check=times needs these devices, and this machine has "
            f"{len(gpus)} × {kind}"
        )
    return gpus


def _best_of_each(search: PlanSearch, kind: Callable[[ParallelPlan], Any]) -> list[ParallelPlan]:
    """Return the plan of each kind with the shortest composed time, the fastest first."""
    best_plans: dict[Any, ParallelPlan] = {}
    for plan in sorted(search.plans, key=lambda plan: search.cost(plan).step_s):
        best_plans.setdefault(kind(plan), plan)
    return [*best_plans.values()]


def _way(plan: ParallelPlan) -> tuple[Any, ...]:
    """Return a plan's mesh; on a single device, also the ways to divide its work."""
    is_single = plan.mesh.num_devices == 1
    return plan.mesh, *((plan.num_microbatches, plan.remat) if is_single else ())


def _legal_runs(
    config: RunConfig, devices: PlanDevices, plans: list[ParallelPlan]
) -> Iterator[tuple[ParallelPlan, Run]]:
    """Yield the legal ones of the plans with their runs."""
    for plan in plans:
        try:
            run = devices.assemble(plan.applied(config))
        except ValueError:
            continue
        if fits(needs_of(run, devices.budget), devices.budget):
            yield plan, run


def _on(devices: list[Any], config: RunConfig, budget_bytes: float) -> Run:
    """Return the run of a config on devices that are present."""
    sizes = sizes_without_data(config)
    return assemble_run(
        config,
        config.make_mesh(devices),
        vocab_size=sizes.vocab_size,
        num_labels=sizes.num_labels,
        device_budget=budget_bytes,
    )


def tables(results: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of the docs page, from figures as this command writes them."""
    every = [["model", "devices", "plans", "fastest", "slowest", "chosen plan is slower by"]]
    first = [["model", "devices", "Gb/s", *every[0][2:]]]
    timed = [["model", "devices", "plans", "fastest", "slowest", "τ", "predicted ÷ measured"]]
    for result in results:
        options = dict(word.split("=", 1) for word in shlex.split(result["command"])[3:])
        row = [options["--config"].removeprefix("configs/"), options["--target"]]
        if result["check"] != "times":
            is_first = result["check"] == "first"
            row += [options.get("--network", "-")] * is_first
            steps_s = result["steps_s"].values()
            row += [str(result["num_plans"]), *_range_ms(steps_s), f"{result['loss']:.1%}"]
            (first if is_first else every).append(row)
        else:
            plans = result["plans"].values()
            ratios = [plan["predicted_s"] / plan["measured_s"] for plan in plans]
            row += [str(len(plans)), *_range_ms(plan["measured_s"] for plan in plans)]
            timed.append([*row, f"{result['tau']:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    rows_by_table = {"all plans": every, "first plans": first, "timed plans": timed}
    return {name: docs_page.markdown(rows) for name, rows in rows_by_table.items()}


def _range_ms(seconds: Iterable[float]) -> tuple[str, str]:
    """Return the shortest and the longest of some times."""
    times = sorted(seconds)
    return f"{1e3 * times[0]:.1f} ms", f"{1e3 * times[-1]:.1f} ms"


if __name__ == "__main__":
    run_command(main)
