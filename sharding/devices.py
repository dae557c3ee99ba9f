"""Getting hold of devices: one code path for CPU and accelerators, one process or many.

A process finds out how it was started from its environment. `python -m launch.local` sets

    TAIBAI_COORDINATOR         host:port of process 0
    TAIBAI_NUM_PROCESSES       number of processes
    TAIBAI_PROCESS_ID          0 .. TAIBAI_NUM_PROCESSES - 1
    TAIBAI_DEVICES_PER_PROCESS CPU devices that each process simulates

and under SLURM's `srun` jax reads SLURM's own variables.
"""

import contextlib
import logging
import os

import jax

from sharding.mesh import MeshConfig, make_mesh

#: Simulated devices on few, busy cores can miss XLA's default time-outs and abort the process.
CPU_XLA_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "300",
    "xla_cpu_collective_timeout_seconds": "300",
}

_log = logging.getLogger(__name__)


def start(config: MeshConfig) -> jax.sharding.Mesh:
    """Joins the other processes, if there are any, and returns the mesh.

    Must run before anything else asks jax for its devices: on CPU the devices that the mesh needs
    and the machine lacks are simulated, and one line says so.

    Raises:
      ValueError: an accelerator backend, or a set of CPU processes, has too few devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    extra = [f"--{name}={value}" for name, value in CPU_XLA_FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *extra])

    per_process = os.environ.get("TAIBAI_DEVICES_PER_PROCESS")
    distributed = _join_processes()
    if per_process or not distributed:
        with contextlib.suppress(RuntimeError):  # jax has its devices already, as in a notebook
            jax.config.update("jax_num_cpu_devices", int(per_process or config.num_devices))
    devices = jax.devices()
    mesh = make_mesh(config, devices)
    if devices[0].platform == "cpu" and not distributed and mesh.size > 1:
        _log.info("simulating the mesh's %d devices on this machine's CPU", mesh.size)
    if mesh.size < len(devices):
        if distributed:
            raise ValueError(
                f"mesh {config} uses {mesh.size} of the {len(devices)} devices of "
                f"{jax.process_count()} processes; every device must have its place, "
                "for example with mesh.data=-1"
            )
        _log.warning("the mesh uses %d of %d devices", mesh.size, len(devices))
    return mesh


def _join_processes() -> bool:
    """Returns whether this is one of several processes; if so, they are connected."""
    env = os.environ
    if int(env.get("TAIBAI_NUM_PROCESSES", "1")) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator_address=env["TAIBAI_COORDINATOR"],
            num_processes=int(env["TAIBAI_NUM_PROCESSES"]),
            process_id=int(env["TAIBAI_PROCESS_ID"]),
        )
        return True
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize()
        return True
    return False
