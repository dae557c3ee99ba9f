"""Runs a real SLURM cluster of two nodes on this machine, without containers.

The cluster consists of munged, slurmctld and two slurmd. To install them as root from Debian's
packages slurm-wlm and munge:

    python -m tests.launch.slurm install
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
_PACKAGES = ("slurm-wlm", "munge")

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=30
SlurmdTimeout=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def install() -> str | None:
    """Install SLURM and make its nodes' names resolve.

    Returns:
        The reason why this is not possible, or None.
    """
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "SLURM's daemons must be started by root"
    if missing and shutil.which("apt-get") is None:
        return f"{', '.join(missing)} are not installed, and there is no apt-get"
    if missing:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *_PACKAGES],
        ):
            try:
                done = subprocess.run(
                    command,
                    env=quiet,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
            except subprocess.TimeoutExpired:
                return f"{' '.join(command)} did not end within 10 minutes"
            if done.returncode:
                return f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-300:]}"
    # The other processes reach process 0 by the name of its node.
    unknown = [node for node in NODES if not _resolves(node)]
    if unknown:
        with open("/etc/hosts", "a") as file:
            file.write(f"127.0.0.1 {' '.join(unknown)}\n")
    return None


def _resolves(name: str) -> bool:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(name).startswith("127.")
    return False


@dataclass(frozen=True)
class Cluster:
    """A running SLURM cluster, accessed through SLURM's own commands.

    Attributes:
        directory: holds its configuration, its state and its logs.
    """

    directory: Path

    def __call__(self, *command: str) -> str:
        """Run a SLURM command and return its output."""
        variables = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}
        return subprocess.run(
            command, env=variables, check=True, capture_output=True, text=True
        ).stdout

    def submit(self, *arguments: str, directory: Path, **variables: str) -> "Job":
        """Submit a job.

        Args:
            *arguments: arguments of `sbatch --parsable`.
            directory: job's working directory.
            **variables: environment variables of the job.
        """
        chosen = [f"{name}={value}" for name, value in variables.items()]
        number = self("env", *chosen, "sbatch", "--parsable", f"--chdir={directory}", *arguments)
        return Job(self, int(number))


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    number: int

    @property
    def fields(self) -> dict[str, str]:
        """The job's fields as SLURM reports them: JobState, Restarts, ExitCode and others."""
        words = self.cluster("scontrol", "show", "job", "-o", str(self.number)).split()
        pairs = [word.partition("=") for word in words]
        return {name: value for name, _, value in pairs}

    @property
    def has_ended(self) -> bool:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        if self.fields["JobState"] not in ends:
            return False
        time.sleep(5)  # a job that is being requeued can briefly look as if it had failed
        return self.fields["JobState"] in ends

    def requeue(self) -> None:
        self.cluster("scontrol", "requeue", str(self.number))

    def cancel(self) -> None:
        self.cluster("scancel", str(self.number))

    @property
    def minutes_run(self) -> int:
        """Whole minutes since the job's last start."""
        hours, minutes, _ = self.fields["RunTime"].rpartition("-")[2].split(":")
        return 60 * int(hours) + int(minutes)

    def set_time_limit(self, minutes: int) -> None:
        """Set the time limit in minutes, counted from the job's last start."""
        self.cluster("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def step_daemons(self, step: str = "") -> list[int]:
        """Return the process ids of the job's step daemons, one per step and node."""
        return _step_daemons(self.cluster.directory, rf"{self.number}\.{step}")

    def start_now(self) -> None:
        """Start a requeued job without SLURM's delay of two minutes.

        Does nothing while step daemons of the previous start are still running: a node would refuse
        the new start, and SLURM would count that as a failure of the job.
        """
        if self.fields["JobState"] == "PENDING" and not self.step_daemons():
            time.sleep(3)
            with contextlib.suppress(subprocess.CalledProcessError):  # it has already started
                self.cluster("scontrol", "update", f"JobId={self.number}", "StartTime=now")


@contextlib.contextmanager
def start(directory: Path) -> Iterator[Cluster]:
    """Run a cluster for the duration of a `with` block, and kill all of its processes afterwards.

    Args:
        directory: empty directory for the cluster's files.

    Yields:
        The cluster, with both nodes idle.
    """
    config = directory / "slurm.conf"
    key = directory / "munge.key"
    config.write_text(
        _CONFIG.format(directory=directory, host=socket.gethostname(), ports=_free_ports(3))
    )
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (directory / name).mkdir()
    munge = [f"--{name}={directory}/munge.{name}" for name in ("socket", "log-file", "pid-file")]
    munge += [f"--key-file={key}", f"--seed-file={directory}/munge.seed"]
    cluster = Cluster(directory)
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-f", str(config)],
        *(["slurmd", "-D", "-N", node, "-f", str(config)] for node in NODES),
    ]
    daemons: list[subprocess.Popen] = []
    try:
        for command in commands:
            with open(directory / f"{command[0]}.{len(daemons)}.out", "wb") as out:
                daemons.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                    )
                )
            if command[0] == "munged":
                wait_until((directory / "munge.socket").exists, "munge's socket")
        wait_until(lambda: _are_idle(cluster), "two idle nodes")
        yield cluster
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            cluster("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        for pid in _step_daemons(directory):  # step daemons outlive slurmd
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _step_daemons(directory: Path, step: str = "") -> list[int]:
    """Return the process ids of this cluster's step daemons.

    Other clusters may run on the same machine. A step daemon belongs to this one if it has a file
    open in `directory`, where it writes its log.
    """
    done = subprocess.run(
        ["pgrep", "-f", rf"^slurmstepd: \[{step}"], capture_output=True, text=True
    )
    return [pid for pid in map(int, done.stdout.split()) if _has_open(pid, directory)]


def _has_open(pid: int, directory: Path) -> bool:
    files = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                files.append(descriptor.readlink())
    return any(file.is_relative_to(directory) for file in files)


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Wait until `is_so()` is true; raise AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.2)


def _are_idle(cluster: Cluster) -> bool:
    with contextlib.suppress(subprocess.CalledProcessError):  # slurmctld does not listen yet
        return cluster("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES)
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    sys.exit(install())
