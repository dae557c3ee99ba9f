r"""Prints the digest of a run's initial parameters, gathered from all processes.

python -m launch.local --processes=2 --devices_per_process=4 -- \
    python -m tests.print_digest section.key=value …
"""

import sys

from jax.experimental import multihost_utils

from distributed import startup
from tests.runs import CONFIG, digest, make_run
from train.config.config_files import load
from train.config.schema import validate_config

if __name__ == "__main__":
    startup.start(validate_config(load(CONFIG, sys.argv[1:])).mesh)
    run, _ = make_run(sys.argv[1:])
    params = multihost_utils.process_allgather(run.state_layout.initial().params, tiled=True)
    print(f"digest {digest(params)}", flush=True)
