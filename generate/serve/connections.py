"""Listens on a port, and limits how long and how many connections stay open.

A connection is either waiting for the head of a request, or busy with one. Both states have a
deadline, so that neither a client that sends one byte at a time nor one that never reads its answer
keeps a connection (and its file descriptor) for long:

    opened ──> waiting ──── head is complete ────> busy ── answer is sent ──> waiting ──> ...
                  └── head_s is over: closed        └── request_s is over: closed

If a new connection exceeds their largest number, the one that has waited longest is closed. A
connection whose request has no complete body counts as waiting, too.
"""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

_SHUTDOWN_S = 10
_BACKLOG = 2048
_MOST_CONNECTIONS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections."""

    # most seconds until the head of a request is complete, from the opening of the connection or
    # the end of the answer before it
    head_s: float
    request_s: float  # most seconds from the head of a request to the end of its answer
    max_connections: int  # most connections at the same time


def max_connections() -> int:
    """Return a number of connections that leaves half of the process's file descriptors free."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft_limit // 2, _MOST_CONNECTIONS) if soft_limit > 0 else _MOST_CONNECTIONS


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listen on all addresses of a host; requests wait until a server accepts them.

    `localhost`, for example, may have an address of IPv4 and one of IPv6.

    Args:
        port: port; 0: any free one.

    Yields:
        A socket for each address, all with the same port; they are closed at the end.

    Raises:
        ValueError: The port is not from 0 to 65535.
        OSError: The address does not exist on this machine, or its port is in use.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"--port={port} must be from 0 to 65535")
    with contextlib.ExitStack() as stack:
        try:
            sockets = [stack.enter_context(each) for each in _open_sockets(host, port)]
        except OSError as error:
            number = error.errno or 0  # negative if the host has no address
            reason = os.strerror(number) if number > 0 else error.strerror
            raise OSError(
                f"the server cannot listen on --host={host} --port={port}: {reason}; choose "
                "another address or port"
            ) from None
        yield sockets


def _open_sockets(host: str, port: int) -> Iterator[socket.socket]:
    kind = socket.SOCK_STREAM
    infos = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address[0]) for family, _, _, _, address in infos)
    has_opened = False
    for family, address in addresses:
        try:
            opened = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # A host may have a name for IPv6 without supporting it.
            if has_opened and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise
        port = opened.getsockname()[1]
        has_opened = True
        yield opened


def make_server(
    app: Starlette, limits: ConnectionLimits, log_level: str = "info"
) -> uvicorn.Server:
    """Return a server; its `run(sockets=...)` ends when the process is stopped."""
    connection: Any = functools.partial(_Connection, limits=limits)
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        log_level=log_level,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    return uvicorn.Server(config)


class _Connection(H11Protocol):
    """A connection with a deadline."""

    def __init__(self, *, limits: ConnectionLimits, **options: Any):
        super().__init__(**options)
        self._limits = limits
        self._is_busy = False
        self._waits_since = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; close another connection if there are too many."""
        super().connection_made(transport)
        self._set_deadline(self._limits.head_s)
        if len(self.connections) > self._limits.max_connections:
            waiting = [
                other
                for other in self.connections
                if isinstance(other, _Connection) and not other._has_request()
            ]
            min(waiting, key=lambda other: other._waits_since)._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived already."""
        self._is_busy = False
        self._waits_since = self.loop.time()
        self._set_deadline(self._limits.head_s)
        super().on_response_complete()
        self._update()

    def _update(self) -> None:
        """Change the deadline if the head of a request has become complete."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self._is_busy:
            self._is_busy = True
            self._set_deadline(self._limits.request_s)

    def _has_request(self) -> bool:
        """Return whether a request is complete and has not been answered yet."""
        return self._is_busy and not self.cycle.more_body

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _abort(self) -> None:
        """Close the connection at once, and drop data that the client has not read yet."""
        self.connections.discard(self)  # now, because more connections may follow at once
        self.transport.abort()
