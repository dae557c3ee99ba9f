"""Environment variables that must be set before a training process starts.

`launch.local` sets these variables for the processes that it starts. A batch script starts

    python -m launch.environment -- python -m train.main ...

which sets the XLA and NCCL settings and then becomes the given command. It needs no variables for
distributed start-up: under srun, `train.main` reads SLURM's own. Variables that the user has
already set always take precedence. XLA_FLAGS is merged flag by flag. Options of the GPU compiler
are not set here: the training process passes them with every step that it compiles
(sharding/compiler_options.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from distributed.variables import CPU_XLA_FLAGS, merge_xla_flags
from untrusted.commands import command_parser, run_command

GPU_VARIABLES = {
    # A single hardware queue runs collectives in the order in which the scheduler issued them.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Leaves 10 % of the memory to NCCL and cuDNN, which allocate outside of JAX's memory pool.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
}

PLATFORMS = ("cpu", "gpu")


def detect_platform(user: Mapping[str, str]) -> str:
    """Return the platform that JAX will choose, without importing JAX.

    Returns:
        'cpu' or 'gpu'. JAX_PLATFORMS decides if it is set; otherwise, it is 'gpu' if an NVIDIA
        driver is loaded.
    """
    chosen = user.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen:
        return "cpu" if chosen == "cpu" else "gpu"
    return "gpu" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def compiler_variables(platform: str, user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for XLA and NCCL on a platform.

    Args:
        user: environment variables that the user has set; they are not overridden.

    Returns:
        Values by variable name. XLA_FLAGS contains the user's flags too.

    Raises:
        ValueError: `platform` is neither 'cpu' nor 'gpu'.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r} must be one of {', '.join(PLATFORMS)}")
    if platform == "cpu":
        return {"XLA_FLAGS": merge_xla_flags(CPU_XLA_FLAGS, user.get("XLA_FLAGS", ""))}
    return {name: value for name, value in GPU_VARIABLES.items() if name not in user}


def gpu_variables(
    process_id: int, num_processes: int, devices_per_process: int, user: Mapping[str, str]
) -> dict[str, str]:
    """Return the CUDA_VISIBLE_DEVICES that gives one process on this machine its own GPUs.

    With CUDA_VISIBLE_DEVICES=4,5,6,7 and two processes of two devices each, process 0 gets `4,5`
    and process 1 gets `6,7`.

    Args:
        user: environment variables that the user has set. CUDA_VISIBLE_DEVICES limits the GPUs
            to share; without it, all GPUs of this machine are shared.

    Raises:
        ValueError: the processes need more GPUs than there are.
    """
    visible = user.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
        source = "CUDA_VISIBLE_DEVICES lists"
    else:
        driver = Path("/proc/driver/nvidia/gpus")
        count = len(list(driver.iterdir())) if driver.is_dir() else 0
        gpus = [str(gpu) for gpu in range(count)]
        source = "this machine has"
    needed = num_processes * devices_per_process
    if needed > len(gpus):
        raise ValueError(
            f"--processes={num_processes} × --devices_per_process={devices_per_process} needs"
            f" {needed} GPUs, but {source} {len(gpus)}; start fewer processes or set"
            " JAX_PLATFORMS=cpu to simulate devices"
        )
    first = process_id * devices_per_process
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + devices_per_process])}


def main() -> NoReturn:
    """Set the variables for XLA and NCCL, and become the given command."""
    parser = command_parser(
        "launch.environment",
        usage="%(prog)s [--platform=cpu|gpu] -- COMMAND ...",
        description=main.__doc__,
    )
    parser.add_argument("--platform", choices=PLATFORMS, default=detect_platform(os.environ))
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    os.environ.update(compiler_variables(options.platform, os.environ))
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    run_command(main)
