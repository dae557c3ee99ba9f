"""Chooses the mesh of a run, and everything that depends on it, for GPUs that you do not have.

    python -m train.plan --config=configs/llama.py:3-70b --target=h100:8x8 --out=plan.yaml

Values that are set on the command line stay as they are. A plan changes how fast a step is, and
never a result. docs/plan.md explains the output.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharding.analysis.targets import Target, parse_target
from train.compile import compile_run, load_config, print_or_refuse, run_for, target_parser
from train.config import config_files
from train.config.overrides import Override, parse_overrides
from train.config.schema import validate_config
from train.planning.explanation import why_slower
from train.planning.memory_budget import size, target_budget
from train.planning.parallel_plan import UNPLANNED
from train.planning.plan_search import Choice, PlanSearch

#: How many plans are compiled whole, and listed.
NUM_PLANS = 5


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code, see train/lifecycle/exit_codes.py."""
    parser = target_parser("train.plan", "Chooses the mesh of a run, and all that depends on it.")
    parser.add_argument(
        "--out", type=Path, help="write the config with the best plan here, as YAML"
    )
    args, others = parser.parse_known_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO, force=True)

    def report() -> str:
        overrides = parse_overrides(others)
        target = parse_target(args.target, args.network)
        given = load_config(args.config, overrides, allow_import=args.allow_import)
        choices = find_plans(given, overrides, target)
        if args.out is not None:
            plain: Any = config_files.load(args.config, overrides, allow_import=args.allow_import)
            with plain.ignore_type():
                plain.update_from_flattened_dict(choices[0].plan.settings())
            args.out.write_text(config_files.as_yaml(plain.to_dict()), encoding="utf-8")
        return json.dumps(as_json(choices, target)) if args.json else as_text(choices)

    return print_or_refuse(report)


def find_plans(given: Any, overrides: Sequence[str], target: Target) -> list[Choice]:
    """Return the best plans of a config for target GPUs, compiled, the fastest first.

    Args:
        given: the ConfigDict of the run, with the overrides applied; it is changed.
        overrides: `section.key=value` of the values that stay as they are.
        target: the GPUs.

    Raises:
        ValueError: the config is not valid, or no plan fits.
    """
    fixed = {Override.parse(override).key for override in overrides}
    with given.ignore_type():
        given.update_from_flattened_dict(
            {key: value for key, value in UNPLANNED.items() if key not in fixed}
        )
    config = validate_config(given)
    search = PlanSearch(
        config,
        target,
        fixed,
        run_for,
        compile_run,
        target_budget(config.memory, target),
    )
    return search.best(NUM_PLANS)


def as_text(choices: Sequence[Choice]) -> str:
    """Format plans as a table, and the best one as options of train.main."""
    cells = [("plan", "step, ms", "MFU", "memory", "bubble", "exposed", "")]
    fastest = choices[0].step.prediction.step_s
    for choice in choices:
        step = choice.step
        prediction = step.prediction
        slower = prediction.step_s / fastest - 1
        cells.append(
            (
                str(choice.plan),
                f"{1e3 * prediction.step_s:,.0f}",
                "-" if step.mfu is None else f"{step.mfu:.1%}",
                size(step.memory.in_all or 0),
                f"{prediction.bubble_s / prediction.step_s:.1%}",
                f"{prediction.exposed_communication_s / prediction.step_s:.1%}",
                f"+{slower:.1%}" if slower else "best",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    reasons = [f"{choice.plan}: {reason(choice, choices[0])}" for choice in choices[1:]]
    if reasons:
        reasons = ["", "Why the others are slower:", *reasons]
    options = " ".join(f"--config.{k}={v}" for k, v in choices[0].plan.settings().items())
    return "\n".join([*lines, *reasons, "", options])


def reason(choice: Choice, best: Choice) -> str:
    """Return why a plan is slower than the best one; "" for the best."""
    step = choice.step
    return why_slower(
        best.step.prediction, step.prediction, step.run.mesh.shape, step.target.gpus_per_host
    )


def as_json(choices: Sequence[Choice], target: Target) -> dict[str, Any]:
    """Return plans as a dict for `json.dumps`, the fastest first."""
    plans = []
    for choice in choices:
        report = choice.step.to_json()
        plans.append(
            {
                "settings": choice.plan.settings(),
                "composed_step_time_s": choice.cost.step_s,
                "reason": reason(choice, choices[0]),
                "predicted": report["predicted"],
                "memory": report["memory"],
            }
        )
    return {"target": target.name, "num_devices": target.num_devices, "plans": plans}


if __name__ == "__main__":
    sys.exit(main())
