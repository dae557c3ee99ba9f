"""How a process learns from its environment that it is one of several; does not import JAX.

`LAUNCHERS` lists the variables of every launcher that is understood. Taibai's own variables, which
`launch.local` sets and you can set yourself, take precedence over all others. The other launchers
may run inside each other:

    srun ── starts ──> mpirun's daemons ── start ──> processes    Open MPI is right, not srun
    srun ── starts ──> torchrun         ── starts ──> processes   both claim to be right
    a shell with a forgotten WORLD_SIZE ── srun ────> processes   both claim to be right

In the last two cases, it is not known which of the two has started this process, so both must say
the same.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from distributed.message_socket import UNIX
from distributed.variables import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from fields.numbers import shown

_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedEnv:
    """How this process was started, if it is one of several."""

    coordinator: str  # host:port or unix:PATH
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None  # None: all devices that are visible to the process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables with which a launcher describes each of its processes.

    Attributes:
        title: its name in messages.
        num_processes: variable with the number of all processes.
        process_id: variable with the number of this process, from 0.
        fallback_process_id: variable to read if `process_id` is not set; '' if there is none.
        local_process_id: variable with the number of this process on its host; '' if there is none.
        num_local_processes: variable with the number of processes on this host, as a number or in
            SLURM's notation; '' if there is none.
        coordinator: function that returns the address of process 0, from all variables.
    """

    title: str
    num_processes: str
    process_id: str
    coordinator: Callable[[Mapping[str, str], "Launcher"], str]
    fallback_process_id: str = ""
    local_process_id: str = ""
    num_local_processes: str = ""

    def read_count(self, env: Mapping[str, str]) -> int:
        """Return the number of processes; 1 if this launcher has not started this process."""
        return read_number(env, self.num_processes, 1, default="1")

    def read_process_id(self, env: Mapping[str, str]) -> int:
        """Return the number of this process."""
        name = self.process_id
        if not env.get(name) and env.get(self.fallback_process_id):
            name = self.fallback_process_id
        self.require(env, name)
        return read_number(env, name, 0, self.read_count(env) - 1)

    def read_local_device_ids(self, env: Mapping[str, str]) -> list[int] | None:
        """Return the GPU of this process if several share a host whose GPUs all of them see."""
        if not env.get(self.local_process_id):
            return None
        # "1", or in SLURM's notation "1(x4)": one on each of four hosts.
        is_alone = re.fullmatch(r"1(\(x\d+\))?", env.get(self.num_local_processes, ""))
        if is_alone or "," not in env.get("CUDA_VISIBLE_DEVICES", ","):
            return None
        return [read_number(env, self.local_process_id, 0)]

    def require(self, env: Mapping[str, str], name: str) -> str:
        """Return a variable that this launcher must set."""
        if not env.get(name):
            value = " to host:port of process 0" if name == COORDINATOR else ""
            raise ValueError(
                f"the environment variable {name} is missing, but {self.num_processes}="
                f"{shown(env.get(self.num_processes))} announces several processes; set {name}"
                f"{value} in all of them, or unset {self.num_processes} to start a single process"
            )
        return env[name]


def _own_coordinator(env: Mapping[str, str], launcher: Launcher) -> str:
    """Return TAIBAI_COORDINATOR."""
    address = launcher.require(env, COORDINATOR)
    port = address.rpartition(":")[2]
    is_port = re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) <= _MAX_PORT
    if not address.startswith(UNIX) and not (is_port and address.rpartition(":")[0]):
        raise ValueError(
            f"the environment variable {COORDINATOR}={shown(address)} must be host:port of "
            "process 0, such as n1:6000"
        )
    return address


def _master(env: Mapping[str, str], launcher: Launcher) -> str:
    """Return MASTER_ADDR:MASTER_PORT, or the next port if torchrun itself uses that one."""
    host = launcher.require(env, "MASTER_ADDR")
    launcher.require(env, "MASTER_PORT")
    port = read_number(env, "MASTER_PORT", 1, _MAX_PORT - 1)
    return f"{host}:{port + (env.get('TORCHELASTIC_USE_AGENT_STORE') == 'True')}"


def _first_slurm_host(env: Mapping[str, str], launcher: Launcher) -> str:
    """Return the step's first host, and a port that is unlikely to be used by another step."""
    # The first host of "n[01-03,7]" or "n01,m7".
    hosts = launcher.require(env, "SLURM_STEP_NODELIST")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", hosts)
    host = "".join(first.groups(default="")) if first else ""
    if not host:
        raise ValueError(
            f"SLURM_STEP_NODELIST={shown(hosts)} names no host; start with srun or "
            "launch/train.sbatch"
        )
    launcher.require(env, "SLURM_JOB_ID")
    step = read_number(env, "SLURM_JOB_ID", 0) * 8 + read_number(
        env, "SLURM_STEP_ID", 0, default="0"
    )
    return f"{host}:{61440 + step % 4096}"


OWN = Launcher(
    title="Taibai",
    num_processes=NUM_PROCESSES,
    process_id=PROCESS_ID,
    fallback_process_id="JOB_COMPLETION_INDEX",  # Kubernetes sets it for Jobs that are Indexed
    coordinator=_own_coordinator,
)
TORCHRUN = Launcher(
    title="torchrun",
    num_processes="WORLD_SIZE",
    process_id="RANK",
    local_process_id="LOCAL_RANK",
    num_local_processes="LOCAL_WORLD_SIZE",
    coordinator=_master,
)
OPEN_MPI = Launcher(
    title="Open MPI",
    num_processes="OMPI_COMM_WORLD_SIZE",
    process_id="OMPI_COMM_WORLD_RANK",
    local_process_id="OMPI_COMM_WORLD_LOCAL_RANK",
    num_local_processes="OMPI_COMM_WORLD_LOCAL_SIZE",
    coordinator=_own_coordinator,
)
SRUN = Launcher(
    title="srun",
    num_processes="SLURM_STEP_NUM_TASKS",
    process_id="SLURM_PROCID",
    local_process_id="SLURM_LOCALID",
    num_local_processes="SLURM_STEP_TASKS_PER_NODE",
    coordinator=_first_slurm_host,
)
LAUNCHERS = (OWN, TORCHRUN, OPEN_MPI, SRUN)


def read_distributed_env(env: Mapping[str, str]) -> DistributedEnv | None:
    """Read from the environment how this process was started; None if it is the only one.

    Raises:
        ValueError: a variable is missing or has an invalid value, or two launchers contradict each
            other; the message names the variables.
    """
    launcher = _find_launcher(env)
    if launcher is None or launcher.read_count(env) == 1:
        return None
    return DistributedEnv(
        coordinator=launcher.coordinator(env, launcher),
        num_processes=launcher.read_count(env),
        process_id=launcher.read_process_id(env),
        local_device_ids=launcher.read_local_device_ids(env),
    )


def _find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process as one of several; None if there is none."""
    if env.get(NUM_PROCESSES):
        return OWN
    if not any(env.get(each.num_processes) for each in LAUNCHERS):
        lonely = [name for name in (PROCESS_ID, COORDINATOR) if env.get(name)]
        if lonely:
            raise ValueError(
                f"the environment variable {NUM_PROCESSES} is missing, but {lonely[0]}="
                f"{shown(env[lonely[0]])} is set; set it to the number of processes in all of "
                f"them, or unset {' and '.join(lonely)} to start a single process"
            )
        return None
    claims = [each for each in (OPEN_MPI, SRUN, TORCHRUN) if each.read_count(env) > 1]
    if OPEN_MPI in claims and SRUN in claims:
        claims.remove(SRUN)  # mpirun starts its daemons with srun, one on each host
    places = {(each.read_count(env), each.read_process_id(env)) for each in claims}
    if len(places) > 1:
        outer, inner = claims
        raise ValueError(
            f"{_description(inner, env)}, but {_description(outer, env)}; unset the variable whose "
            "launcher did not start this process"
        )
    # If both agree, the first knows more: which processes share a host.
    return claims[0] if claims else None


def _description(launcher: Launcher, env: Mapping[str, str]) -> str:
    count = launcher.read_count(env)
    return (
        f"{launcher.num_processes}={count} ({launcher.title}) says that this is process "
        f"{launcher.read_process_id(env)} of {count}"
    )


def read_number(
    env: Mapping[str, str],
    name: str,
    minimum: int,
    maximum: int = 2**32 - 1,
    default: str = "",
) -> int:
    """Return a variable that is an integer from `minimum` to `maximum`.

    Args:
        default: value if the variable is not set.

    Raises:
        ValueError: its value is anything else.
    """
    text = env.get(name, default)
    if not re.fullmatch(r"[0-9]{1,10}", text) or not minimum <= int(text) <= maximum:
        raise ValueError(
            f"the environment variable {name}={shown(text)} must be an integer from {minimum} to "
            f"{maximum}; correct it, or unset it to start a single process"
        )
    return int(text)
