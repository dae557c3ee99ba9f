"""A handshake of all processes before they join `jax.distributed`, with clear errors.

`jax.distributed` itself waits silently for a process that never starts, accepts processes that
disagree on their number, and aborts all of them in the end. In this handshake, process 0 listens on
the coordinator's address. Every other process describes itself, and all of them get the same
answer. Each side proves that it knows the run's secret, by a code (HMAC) of its message and of two
random numbers, one from each side:

    process 0  -- {"nonce": a} --------------------------------------------------> process 1
    process 1  -- {"nonce": b, "process": {"process_id": 1, ...}, "proof": ...} -> process 0
    process 0  -- {"answer": null or "process 2 has jax 0.12.0, ...", "proof"} --> all
"""

import contextlib
import hashlib
import json
import os
import platform
import queue
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import taibai
from distributed.message_socket import MessageSocket, connect, listen
from distributed.secret import is_proof, proof
from distributed.variables import SECRET
from untrusted.documents import parse_json
from untrusted.schema import check_fields

#: Packages of which all processes must have the same version.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_RETRY_S = 0.2
_OPEN_FILES = 512
_INTRODUCTION_S = 5.0  # a process introduces itself right after connecting
_MAX_STRANGERS = 256  # simultaneous connections, in addition to one per process of the run
_IS_MISSING = " processes are missing after "


def software() -> dict[str, str]:
    """Return the versions of Python, of PACKAGES, and of the project's own code."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions | {"taibai": _own_version(Path(__file__).parents[1])}


def _own_version(root: Path) -> str:
    """Return a digest of the modules below `root` that this process has loaded."""
    files = (Path(getattr(each, "__file__", None) or "") for each in sys.modules.values())
    names = {file.relative_to(root) for file in files if file.is_relative_to(root)}
    digest = hashlib.sha256()
    for name in sorted(name for name in names if name.parts[0] in taibai.PACKAGES):
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

    def to_json(self) -> str:
        """Return this description as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Process":
        """Read a description.

        Raises:
            ValueError: The text is not the JSON of a process.
        """
        values = parse_json(text, "a process")
        kinds = {"process_id": int, "num_processes": int, "host": str, "pid": int}
        check_fields(values, {**kinds, "software": dict[str, str]}, "a process")
        process = cls(**{name: values[name] for name in (*kinds, "software")})
        if not 0 < process.process_id < process.num_processes:
            raise ValueError(
                f"process_id={process.process_id} must be at least 1 and less than "
                f"num_processes={process.num_processes}"
            )
        return process

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}"


def perform_handshake(own: Process, coordinator: str, secret: bytes, timeout_s: float) -> None:
    """Wait until all processes are present, and check that they are compatible.

    Args:
        own: this process; the one with id 0 listens.
        coordinator: address of process 0, host:port or unix:PATH.
        secret: run's secret, see distributed/secret.py.
        timeout_s: seconds to wait for other processes; hosts may start slowly.

    Raises:
        ValueError: some processes are incompatible. It is raised on all processes that are present
            and names the incompatible ones.
        OSError: processes are missing, or process 0 cannot listen or cannot be reached.
    """
    deadline_s = time.monotonic() + timeout_s
    run = _listen if own.process_id == 0 else _report
    error = run(own, coordinator, secret, deadline_s, timeout_s)
    if error:
        # Another start may help if processes are missing, but not if they are incompatible.
        raise TimeoutError(error) if _IS_MISSING in error else ValueError(error)


def problem(other: Process, present: Mapping[int, Process]) -> str | None:
    """Return one sentence about why a process cannot join the others, or None.

    Args:
        other: process that has just connected.
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


def _listen(
    process: Process, coordinator: str, secret: bytes, deadline_s: float, timeout_s: float
) -> str | None:
    """Collect all processes as process 0, answer them, and return the problem or None."""
    _allow_connections(process.num_processes)
    present = {0: process}
    error = None
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(listen(coordinator))
        except OSError as failure:
            port = coordinator.rpartition(":")[2]
            raise ConnectionError(
                f"process 0 on {process.host} cannot listen on port {port} ({failure.strerror}), "
                "where the other processes expect it; is another run using that port?"
            ) from None
        reception = stack.enter_context(contextlib.closing(_Reception(server, secret, process)))
        while len(present) < process.num_processes and error is None:
            try:
                other = reception.next_process(deadline_s)
            except queue.Empty:
                error = _missing(present, timeout_s, reception.num_strangers)
                break
            error = problem(other, present)
            present.setdefault(other.process_id, other)
        reception.answer(error)
    return error


class _Reception:
    """Process 0's side of the handshake: handles each connection in a thread of its own.

    A stranger who sends nothing, or one byte at a time, delays no other connection.

    Attributes:
        num_strangers: connections that did not prove that they know the secret.
    """

    def __init__(self, server: socket.socket, secret: bytes, process: Process):
        self.num_strangers = 0
        self._server = server
        self._secret = secret
        self._free = threading.Semaphore(process.num_processes + _MAX_STRANGERS)
        self._known: queue.SimpleQueue[tuple[Process, _Peer]] = queue.SimpleQueue()
        self._peers: list[_Peer] = []
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name="handshake")
        self._acceptor.start()

    def next_process(self, deadline_s: float) -> Process:
        """Return the next process that has introduced itself.

        Raises:
            queue.Empty: There is none before the deadline.
        """
        process, peer = self._known.get(timeout=max(deadline_s - time.monotonic(), 0.01))
        self._peers.append(peer)
        return process

    def answer(self, error: str | None) -> None:
        """Send the result of the handshake to all processes that `next_process` returned."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.channel.deadline_s = time.monotonic() + _INTRODUCTION_S
                text = json.dumps(error)
                code = proof(self._secret, "answer", *peer.nonces, text)
                peer.channel.send({"answer": text, "proof": code})

    def close(self) -> None:
        """Stop accepting connections, and close the open ones."""
        self._is_closed = True
        for peer in self._peers:
            peer.channel.close()
        # The port is in use as long as this thread waits for connections, and JAX needs it next.
        self._acceptor.join()

    def _accept(self) -> None:
        while not self._is_closed:
            self._server.settimeout(_RETRY_S)
            try:
                connection = self._server.accept()[0]
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            if not self._free.acquire(blocking=False):
                connection.close()  # a process of this run tries again
                continue
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        """Let one peer introduce itself, and remember it if it knows the secret."""
        channel = MessageSocket(connection, time.monotonic() + _INTRODUCTION_S)
        try:
            own_nonce = secrets.token_hex(16)
            channel.send({"nonce": own_nonce})
            message = channel.receive()
            check_fields(message, {"nonce": str, "process": str, "proof": str}, "a message")
            nonces = (own_nonce, message["nonce"])
            if not is_proof(message["proof"], self._secret, "process", *nonces, message["process"]):
                raise ValueError("it does not know the secret")
            process = Process.from_json(message["process"])
        except (OSError, ValueError):
            self.num_strangers += 1
            channel.close()
        else:
            self._known.put((process, _Peer(channel=channel, nonces=nonces)))
        finally:
            self._free.release()


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """A process that has introduced itself.

    Attributes:
        channel: open connection to it.
        nonces: random numbers of both sides, without which a recorded message could be replayed.
    """

    channel: MessageSocket
    nonces: tuple[str, str]


def _report(
    process: Process, coordinator: str, secret: bytes, deadline_s: float, timeout_s: float
) -> str | None:
    """Report to process 0, and return its answer: the problem, or None."""
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            # Process 0 answers once all have connected; it waits no longer than this process.
            return _introduce(process, coordinator, secret, deadline_s + _INTRODUCTION_S)
        except (OSError, ValueError) as error:
            if left_s <= 0:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConnectionError(
                    f"{process} could not reach process 0 at {coordinator} within "
                    f"{timeout_s:.0f} s ({reason}); is process 0 running there, can the hosts "
                    f"reach each other, and is {SECRET} the same for all?"
                ) from None
        time.sleep(_RETRY_S)


def _introduce(process: Process, coordinator: str, secret: bytes, deadline_s: float) -> str | None:
    """Introduce this process to process 0, and return its answer.

    Raises:
        OSError: Process 0 cannot be reached or closes the connection.
        ValueError: The process that answers does not know the secret.
    """
    timeout_s = max(deadline_s - _INTRODUCTION_S - time.monotonic(), 0.01)
    channel = MessageSocket(connect(coordinator, timeout_s), deadline_s)
    try:
        hello = channel.receive()
        check_fields(hello, {"nonce": str}, "a message")
        nonces = (hello["nonce"], secrets.token_hex(16))
        text = process.to_json()
        code = proof(secret, "process", *nonces, text)
        channel.send({"nonce": nonces[1], "process": text, "proof": code})
        message = channel.receive()
        check_fields(message, {"answer": str, "proof": str}, "a message")
        if not is_proof(message["proof"], secret, "answer", *nonces, message["answer"]):
            raise ValueError("the process that answers there has another secret")
        return json.loads(message["answer"])
    finally:
        channel.close()


def _allow_connections(count: int) -> None:
    """Raise the limit on open files, as far as the system permits, for `count` connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _missing(present: Mapping[int, Process], timeout_s: float, num_strangers: int) -> str:
    num = present[0].num_processes
    missing = [str(i) for i in range(num) if i not in present]
    listed = ", ".join(missing[:20]) + (" and more" if len(missing) > 20 else "")
    hosts = ", ".join(sorted({process.host for process in present.values()}))
    return (
        f"{len(missing)} of {num}{_IS_MISSING}{timeout_s:.0f} s: {listed}; the "
        f"others are on {hosts}; look at the output of the missing processes"
        + (f" ({num_strangers} connections lacked the secret, {SECRET})" if num_strangers else "")
    )
