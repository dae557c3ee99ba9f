"""Messages over a socket: lines of JSON, with a limited size and an absolute deadline.

The address of process 0 is `host:port`, or `unix:PATH` for processes on one machine. Only users who
may enter the folder of the socket PATH can connect to it.
"""

import json
import socket
import time
from pathlib import Path
from typing import Any

from untrusted.documents import parse_json

UNIX = "unix:"
_MAX_BYTES = 2**16
_BACKLOG = 4096


class MessageSocket:
    """Sends and receives messages over a socket.

    Args:
        deadline_s: value of time.monotonic() at which sending and receiving fail.
    """

    def __init__(self, connection: socket.socket, deadline_s: float):
        self._connection = connection
        self._pending = b""
        self.deadline_s = deadline_s

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The peer cannot be reached before the deadline.
        """
        self._wait_until_deadline()
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            OSError: There is no whole message before the deadline.
            ValueError: The peer sent something other than a message.
        """
        while b"\n" not in self._pending:
            self._wait_until_deadline()
            received = self._connection.recv(4096)
            if not received:
                raise ConnectionError("the connection was closed")
            self._pending += received
            if len(self._pending) > _MAX_BYTES:
                raise ValueError(f"a message has more than {_MAX_BYTES:,} bytes")
        line, _, self._pending = self._pending.partition(b"\n")
        return parse_json(line, "a message")

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _wait_until_deadline(self) -> None:
        # A socket's timeout restarts at every call, so set it to the time until the deadline.
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connect to an address.

    Raises:
        OSError: Nobody listens there, or the host cannot be reached.
    """
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.removeprefix(UNIX))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def listen(address: str) -> socket.socket:
    """Listen on an address; for `host:port`, on the port on all interfaces or on loopback only.

    Raises:
        OSError: The address is in use.
    """
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        path.unlink(missing_ok=True)  # Left by a process that was killed.
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen(_BACKLOG)
        return server
    host, _, port = bind_address(address).rpartition(":")
    return socket.create_server(("" if host == "[::]" else host, int(port)), backlog=_BACKLOG)


def bind_address(address: str) -> str:
    """Return the address to listen on, for peers that connect to `address`.

    It is the loopback interface if they connect there. Otherwise it is all interfaces, because a
    host's name may stand for another address on the host itself than on the others.
    """
    if address.startswith(UNIX):
        return address
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("127.0.0.1", "localhost") else f"[::]:{port}"
