"""Joins the processes of a run and creates the mesh: one code path for CPUs and accelerators.

A process learns from its environment how it was started; see distributed/launchers.py.
"""

import contextlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import jax

from distributed.handshake import Process, perform_handshake
from distributed.launchers import DistributedEnv, read_distributed_env, read_number
from distributed.message_socket import bind_address
from distributed.secret import run_secret
from distributed.variables import CPU_XLA_FLAGS, DEVICES_PER_PROCESS, merge_xla_flags
from fields.numbers import shown
from sharding.mesh import MeshConfig, make_mesh
from untrusted.messages import shortened

#: Most devices that a CPU simulates for a mesh; each takes memory.
_MAX_SIMULATED_DEVICES = 512

_log = logging.getLogger(__name__)


def start(
    config: MeshConfig, *, start_timeout_s: float = 60.0, heartbeat_timeout_s: int = 100
) -> jax.sharding.Mesh:
    """Join the other processes, if there are any, and return the mesh.

    Call this before anything else asks jax for its devices. On CPU, devices that the mesh needs and
    the machine lacks are simulated, and one log line says so.

    Args:
        config: size of every mesh axis.
        start_timeout_s: seconds to wait for the other processes.
        heartbeat_timeout_s: if another process sends jax no heartbeat for this many seconds, this
            process exits. Each sends one every half of it.

    Raises:
        ValueError: processes are incompatible, an accelerator backend or a set of CPU processes has
            too few devices, or the mesh does not use all devices of several processes.
        OSError: processes are missing, or process 0 cannot listen or cannot be reached.
    """
    skip_absent_gpus()
    os.environ["XLA_FLAGS"] = merge_xla_flags(CPU_XLA_FLAGS, os.environ.get("XLA_FLAGS", ""))
    per_process = None
    if DEVICES_PER_PROCESS in os.environ:
        per_process = read_number(os.environ, DEVICES_PER_PROCESS, 1, _MAX_SIMULATED_DEVICES)
    join(start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s)
    distributed = read_distributed_env(os.environ) is not None
    if per_process or not distributed:
        with contextlib.suppress(RuntimeError):  # already initialized, as in a notebook
            settings: Any = jax.config
            # A notebook may have asked for more, for other meshes later.
            num_simulated = max(
                min(config.num_devices, _MAX_SIMULATED_DEVICES), settings.jax_num_cpu_devices
            )
            if per_process or -1 not in config.sizes.values() or not _are_cpu_devices_counted():
                jax.config.update("jax_num_cpu_devices", per_process or num_simulated)
    devices = _devices()
    mesh = make_mesh(config, devices)
    if devices[0].platform == "cpu" and not distributed and mesh.size > 1:
        _log.info("simulating the mesh's %d devices on this machine's CPU", mesh.size)
    if mesh.size < len(devices):
        if distributed:
            raise ValueError(
                f"mesh {config} uses {mesh.size} of the {len(devices)} devices of "
                f"{jax.process_count()} processes, but must use all of them; "
                "set for example mesh.data=-1"
            )
        _log.warning("the mesh uses %d of %d devices", mesh.size, len(devices))
    return mesh


def join(*, start_timeout_s: float, heartbeat_timeout_s: int) -> None:
    """Join the other processes, if there are any and this process has not joined them yet.

    Afterwards processes can exchange messages. `start` joins them, too; call this before if they
    have to agree on something that the mesh depends on.

    Args:
        start_timeout_s: see `start`.
        heartbeat_timeout_s: see `start`.

    Raises:
        ValueError: processes are incompatible.
        OSError: processes are missing, or process 0 cannot listen or cannot be reached.
    """
    how = read_distributed_env(os.environ)
    if how is not None and not jax.distributed.is_initialized():
        _join(how, start_timeout_s, heartbeat_timeout_s)


def skip_absent_gpus() -> None:
    """Select CPUs if jax's CUDA plugin is installed on a machine without an NVIDIA GPU.

    The plugin would otherwise print a stack trace before jax falls back to CPUs. Call this before
    jax is asked for its devices. `JAX_PLATFORMS` takes precedence, and plugins of other vendors are
    left alone.
    """
    config: Any = jax.config  # its fields are added when jax is imported
    if config.jax_platforms:
        return
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins is not None else None
    names = {path.name for folder in folders or () for path in Path(folder).iterdir()}
    names = {name for name in names if not name.startswith(("_", "."))}
    is_cuda_only = bool(names) and all(name.startswith("xla_cuda") for name in names)
    if is_cuda_only and not _has_nvidia_gpu() and importlib.util.find_spec("libtpu") is None:
        jax.config.update("jax_platforms", "cpu")


def _are_cpu_devices_counted() -> bool:
    """Return whether the user has told jax how many devices a CPU simulates."""
    config: Any = jax.config
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return in_flags or config.jax_num_cpu_devices > 0


def _has_nvidia_gpu() -> bool:
    # /dev/dxg is the GPU in Windows Subsystem for Linux.
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _devices() -> list[Any]:
    """Return the devices that jax finds.

    Raises:
        ValueError: JAX_PLATFORMS names a platform that jax does not have.
    """
    try:
        return jax.devices()
    except RuntimeError as error:
        if "list of known backends" not in str(error):
            raise
        config: Any = jax.config
        raise ValueError(
            f"JAX_PLATFORMS={shown(config.jax_platforms)} names an unknown platform "
            f"({shortened(error)}); correct it, or unset it to let jax choose"
        ) from error


def _join(start: DistributedEnv, start_timeout_s: float, heartbeat_timeout_s: int) -> None:
    process = Process(process_id=start.process_id, num_processes=start.num_processes)
    perform_handshake(process, start.coordinator, run_secret(os.environ), start_timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The preemption service would catch SIGTERM, which the run itself handles.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=start.coordinator,
        coordinator_bind_address=bind_address(start.coordinator),
        num_processes=start.num_processes,
        process_id=start.process_id,
        local_device_ids=start.local_device_ids,
        heartbeat_timeout_seconds=heartbeat_timeout_s,
    )
