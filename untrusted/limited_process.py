"""The process that limits its own calls, and the messages between it and its parent.

untrusted/limited.py starts it. It imports as little as possible, because it starts often.
"""

import dataclasses
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from untrusted.messages import shortened

#: Precedes each message: its size in bytes.
HEADER = struct.Struct("<Q")
#: The first message, once calls are possible.
READY = b"ready"
#: Exit codes of a process that notices a limit itself.
OUT_OF_MEMORY = 91
TOO_LONG = 92
#: Signals to all processes of a job, whose meaning the parent decides.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one call.

    Attributes:
        cpu_s: processor time.
        memory_bytes: memory, not counting the process itself before the call.
        wall_s: time until the answer, for a call that waits or a computer that is busy.
        reply_bytes: maximum size of the result as JSON.
        file_bytes: maximum size of a file that the function writes.
    """

    cpu_s: float
    memory_bytes: int
    wall_s: float = 60.0
    reply_bytes: int = 64 * 2**20
    file_bytes: int = 64 * 2**10


def read(stream: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Read bytes from a socket; an end of the stream is an OSError."""
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            stream.settimeout(max(1e-3, deadline - time.monotonic()))
        part = stream.recv(min(size - len(content), 2**20))
        if not part:
            raise ConnectionResetError("the stream has ended")
        content += part
    return bytes(content)


def as_bytes(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, or in its extension to lone surrogates."""
    # Unlike \u escapes, this keeps two lone surrogates apart that would make one character.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def serve(descriptor: int, path: str, limits: Limits) -> None:
    """Answer calls until the parent closes its end of the socket.

    Args:
        path: function, `package.module:name`.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGPROF, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    with open("/proc/self/statm") as file:
        data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    _limit(resource.RLIMIT_DATA, data_bytes + limits.memory_bytes)
    _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=descriptor) as stream:
        stream.sendall(HEADER.pack(len(READY)) + READY)
        while True:
            try:
                (size,) = HEADER.unpack(read(stream, HEADER.size))
            except OSError:
                return  # the parent has ended, or needs this process no longer
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            reply = _answer(stream, size, function)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _end_when_closed(stream, False)
            if len(reply) > limits.reply_bytes:
                os._exit(TOO_LONG)
            stream.sendall(HEADER.pack(len(reply)) + reply)


def _answer(stream: socket.socket, size: int, function: Callable[[Any], Any]) -> bytes:
    try:
        argument = json.loads(read(stream, size).decode("utf-8", "surrogatepass"))
        _end_when_closed(stream, True)
        try:
            return as_bytes(["value", function(argument)])
        except ValueError as error:
            return as_bytes(["error", str(error)])
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return as_bytes(["failure", f"{type(error).__name__}: {shortened(error)}"])


def _end_when_closed(stream: socket.socket, is_on: bool) -> None:
    """Let the kernel end this process, whatever it does, when the parent's end is closed.

    The kernel closes that end if the parent is killed. It then sends SIGIO, whose default is to end
    the process. SIGIO would also announce a message, but none arrives during a call.
    """
    flags = fcntl.fcntl(stream, fcntl.F_GETFL)
    if not is_on:
        fcntl.fcntl(stream, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    fcntl.fcntl(stream, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(stream, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(stream, 0)  # reports only that the other end is closed
    if poll.poll(0):
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
