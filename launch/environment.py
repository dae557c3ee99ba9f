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

from untrusted.commands import command_parser, run_command

# Read by `train.main`. Set either all of the first three or none of them.
COORDINATOR = "TAIBAI_COORDINATOR"  # host:port of process 0, or unix:PATH of its socket
NUM_PROCESSES = "TAIBAI_NUM_PROCESSES"
PROCESS_ID = "TAIBAI_PROCESS_ID"
DEVICES_PER_PROCESS = "TAIBAI_DEVICES_PER_PROCESS"  # CPU devices to simulate in each process
SECRET = "TAIBAI_SECRET"  # the secret with which processes recognize each other

# Simulated devices share the CPU cores, so one of them can reach a collective minutes after
# another. By default XLA assumes a deadlock after 40 s and aborts; these flags allow 5 minutes.
CPU_XLA_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "300",
    "xla_cpu_collective_timeout_seconds": "300",
}

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


def merge_xla_flags(flags: Mapping[str, str], user: str) -> str:
    """Return an XLA_FLAGS string with the given flags and the user's flags.

    A flag that the user has set keeps the user's value:

        merge_xla_flags({"xla_a": "1", "xla_b": "2"}, "--xla_b=9") == "--xla_a=1 --xla_b=9"

    Args:
        flags: values by flag name, without dashes.
        user: XLA_FLAGS that the user has set, '' if none.
    """
    tokens = user.split()
    if tokens and not tokens[0].startswith("-"):
        return user  # XLA reads its flags from a file of this name; nothing can be added to them
    taken = {token.lstrip("-").partition("=")[0] for token in tokens}
    ours = [f"--{name}={value}" for name, value in flags.items() if name not in taken]
    return " ".join(ours + ([user] if tokens else []))


def process_variables(
    *,
    coordinator: str,
    secret: str,
    num_processes: int,
    process_id: int,
    devices_per_process: int | None,
) -> dict[str, str]:
    """Return the variables that `train.main` needs to connect its process to the others.

    Args:
        coordinator: 'host:port' or 'unix:PATH' on which process 0 will listen.
        num_processes: number of processes of the run.
        process_id: number of this process, from 0.
        devices_per_process: CPU devices to simulate in each process; None on accelerators.
    """
    variables = {
        COORDINATOR: coordinator,
        SECRET: secret,
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process_id),
    }
    if devices_per_process is not None:
        variables[DEVICES_PER_PROCESS] = str(devices_per_process)
    return variables


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
