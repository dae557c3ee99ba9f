"""A handshake of all processes before they join `jax.distributed`, with clear errors.

`jax.distributed` itself waits silently for a process that never starts, accepts processes that
disagree on their number, and aborts all of them in the end. In this handshake, process 0 listens on
the coordinator's address. Every other process sends one line of JSON about itself, and all of them
get the same answer:

    process 1  -- {"process_id": 1, "num_processes": 3, "host": "n1", "software": ...} -> process 0
    process 2  -- {"process_id": 2, "num_processes": 3, "host": "n2", "software": ...} -> process 0
    process 0  -- {"error": null}, or {"error": "process 2 on n2 has jax 0.12.0, ..."} -> all
"""

import contextlib
import hashlib
import json
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

#: Packages of which all processes must have the same version.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
#: Top-level folders of the project's own code.
ROOMS = ("checkpoint", "convert", "data", "fields", "models", "sharding", "train")
_RETRY_S = 0.2
_OPEN_FILES = 512
_READ_S = 5.0  # a process introduces itself right after connecting
_IS_MISSING = " processes are missing after "


def software() -> dict[str, str]:
    """Return the versions of Python, of PACKAGES, and of the project's own code."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions | {"taibai": _own_version(Path(__file__).parents[2])}


def _own_version(root: Path) -> str:
    """Return a digest of the modules below `root` that this process has loaded."""
    files = (Path(getattr(each, "__file__", None) or "") for each in sys.modules.values())
    names = {file.relative_to(root) for file in files if file.is_relative_to(root)}
    digest = hashlib.sha256()
    for name in sorted(name for name in names if name.parts[0] in ROOMS):
        digest.update(str(name).encode() + (root / name).read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process's description of itself."""

    process_id: int
    num_processes: int  # as configured when it was started
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    software: Mapping[str, str] = field(default_factory=software)

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}"


def perform_handshake(own: Process, coordinator: str, timeout_s: float) -> None:
    """Wait until all processes are present, and check that they are compatible.

    Args:
        own: this process; the one with id 0 listens.
        coordinator: host:port of process 0.
        timeout_s: seconds to wait for other processes; hosts may start slowly.

    Raises:
        ValueError: some processes are incompatible. It is raised on all processes that are present
            and names the incompatible ones.
        OSError: processes are missing, or process 0 cannot listen or cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    if own.process_id == 0:
        error = _listen(own, coordinator, deadline, timeout_s)
    else:
        error = _report(own, coordinator, deadline, timeout_s)
    if error:
        # Another start may help if processes are missing, but not if they are incompatible.
        raise TimeoutError(error) if _IS_MISSING in error else ValueError(error)


def problem(other: Process, present: Mapping[int, Process]) -> str | None:
    """Return one sentence about why a process cannot join the others, or None.

    Args:
        other: the process that has just connected.
        present: processes that connected before it, by id; includes process 0.
    """
    first = present[0]
    same = present.get(other.process_id)
    if other.num_processes != first.num_processes:
        return (
            f"{other} was started as one of {other.num_processes} processes, and {first} as "
            f"one of {first.num_processes}; start all with one command"
        )
    if same is not None:
        where = " and ".join(f"on {p.host} (pid {p.pid})" for p in (same, other))
        return f"process {other.process_id} was started twice, {where}; give each its own id"
    names = sorted({*first.software, *other.software})
    differing = [n for n in names if first.software.get(n) != other.software.get(n)]
    if not differing:
        return None
    theirs, ours = (
        ", ".join(f"{name} {p.software.get(name, 'missing')}" for name in differing)
        for p in (other, first)
    )
    return f"{other} has {theirs}, and {first} has {ours}; install the same on all hosts"


def _listen(own: Process, coordinator: str, deadline: float, timeout_s: float) -> str | None:
    """Collect all processes as process 0, answer them, and return the problem or None."""
    port = int(coordinator.rpartition(":")[2])
    connections = []
    present = {0: own}
    _allow_connections(own.num_processes)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("", port), backlog=4096))
        except OSError as error:
            raise ConnectionError(
                f"process 0 on {own.host} cannot listen on port {port} ({error.strerror}), where "
                "the other processes expect it; is another run using that port?"
            ) from None
        error = None
        while len(present) < own.num_processes and error is None:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                error = _missing(present, timeout_s)
                break
            try:
                connection.settimeout(_READ_S)
                other = Process(**json.loads(_read_line(connection)))
            except (OSError, ValueError, TypeError):
                connection.close()  # a port scanner, or a process that died meanwhile
                continue
            connections.append(connection)
            error = problem(other, present)
            present.setdefault(other.process_id, other)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"error": error}).encode() + b"\n")
        return error


def _report(own: Process, coordinator: str, deadline: float, timeout_s: float) -> str | None:
    """Report to process 0, and return its answer: the problem, or None."""
    host, _, port = coordinator.rpartition(":")
    while True:
        left = deadline - time.monotonic()
        try:
            # Process 0 answers once all have connected; it waits no longer than this process.
            with socket.create_connection((host, int(port)), timeout=max(left, 0.01)) as connection:
                connection.settimeout(max(left, 0) + 5)
                connection.sendall(json.dumps(asdict(own)).encode() + b"\n")
                return json.loads(_read_line(connection))["error"]
        except (OSError, ValueError, KeyError) as error:
            if left <= 0:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConnectionError(
                    f"{own} could not reach process 0 at {coordinator} within {timeout_s:.0f} s "
                    f"({reason}); is process 0 running there, and can the hosts reach each other?"
                ) from None
        time.sleep(_RETRY_S)


def _allow_connections(count: int) -> None:
    """Raise the limit on open files, as far as the system permits, for `count` connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _missing(present: Mapping[int, Process], timeout_s: float) -> str:
    num = present[0].num_processes
    missing = [str(i) for i in range(num) if i not in present]
    listed = ", ".join(missing[:20]) + (" and more" if len(missing) > 20 else "")
    hosts = ", ".join(sorted({process.host for process in present.values()}))
    return (
        f"{len(missing)} of {num}{_IS_MISSING}{timeout_s:.0f} s: {listed}; the "
        f"others are on {hosts}; look at the output of the missing processes"
    )


def _read_line(connection: socket.socket) -> str:
    with connection.makefile("r", encoding="utf-8") as file:
        return file.readline(2**20)
