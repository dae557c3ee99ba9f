"""Chooses the mesh of a run, and everything that depends on it, for GPUs that you do not have.

    python -m train.plan --config=configs/llama.py:3-70b --target=h100:8x8 --out=plan.yaml

Values that are set on the command line stay as they are. A plan changes how fast a step is, and
never a result. docs/plan.md explains the output.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from sharding.analysis.targets import parse_target
from train.compile import load_config, print_or_refuse, run_for, target_parser
from train.config import config_files
from train.config.overrides import Override, parse_overrides
from train.planning.explanation import plans_as_json, plans_as_text
from train.planning.parallel_plan import open_config
from train.planning.plan_devices import described_devices
from train.planning.plan_search import PlanSearch


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
        fixed = {Override.parse(override).key for override in overrides}
        config = open_config(given, fixed)
        choices = PlanSearch(config, described_devices(target, config, run_for), fixed).best()
        if args.out is not None:
            plain: Any = config_files.load(args.config, overrides, allow_import=args.allow_import)
            with plain.ignore_type():
                plain.update_from_flattened_dict(choices[0].plan.settings())
            args.out.write_text(config_files.as_yaml(plain.to_dict()), encoding="utf-8")
        if args.json:
            devices = {"target": target.name, "num_devices": target.num_devices}
            return json.dumps(devices | {"plans": plans_as_json(choices, target.gpus_per_host)})
        options = " ".join(f"--config.{k}={v}" for k, v in choices[0].plan.settings().items())
        return f"{plans_as_text(choices, target.gpus_per_host)}\n\n{options}"

    return print_or_refuse(report)


if __name__ == "__main__":
    sys.exit(main())
