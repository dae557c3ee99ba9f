"""Limits of a message socket: its deadline, the size of a message, its interface."""

import contextlib
import json
import socket
import threading
import time

import pytest

from distributed import message_socket
from distributed.message_socket import MessageSocket


def send_byte_by_byte(connection: socket.socket, stop: threading.Event) -> None:
    """Send a message that never ends, one byte every 20 ms."""
    with contextlib.suppress(OSError):
        while not stop.wait(0.02):
            connection.sendall(b" ")


def test_socket_times_out_at_its_deadline_while_bytes_arrive():
    """Each byte arrives long before the socket's own timeout, which restarts at every byte."""
    receiving_end, sending_end = socket.socketpair()
    stop = threading.Event()
    sender = threading.Thread(target=send_byte_by_byte, args=(sending_end, stop))
    sender.start()
    since = time.monotonic()
    end = threading.Timer(10.0, sending_end.shutdown, args=(socket.SHUT_RDWR,))
    end.start()
    with contextlib.closing(MessageSocket(receiving_end, since + 0.5)) as slow:
        with pytest.raises(TimeoutError):
            slow.receive()
    assert 0.4 < time.monotonic() - since < 5
    end.cancel()
    stop.set()
    sender.join()
    sending_end.close()


def test_socket_rejects_a_long_message_because_of_its_size():
    receiving_end, sending_end = socket.socketpair()
    message = json.dumps({"nonce": "0" * message_socket._MAX_BYTES}).encode() + b"\n"

    def send() -> None:
        with contextlib.suppress(OSError):
            sending_end.sendall(message)

    sender = threading.Thread(target=send)
    sender.start()
    with contextlib.closing(MessageSocket(receiving_end, time.monotonic() + 20)) as flooded:
        with pytest.raises(ValueError, match="a message has more than 65,536 bytes"):
            flooded.receive()
    sender.join()
    sending_end.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("localhost:7", "127.0.0.1:7"),
        ("n03:7", "[::]:7"),
        ("10.0.0.1:7", "[::]:7"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_bind_address_is_loopback_only_for_peers_on_this_machine(address, expected):
    assert message_socket.bind_address(address) == expected


def test_listener_for_peers_on_this_machine_is_on_loopback():
    with message_socket.listen("localhost:0") as server:
        assert server.getsockname()[0] == "127.0.0.1"
