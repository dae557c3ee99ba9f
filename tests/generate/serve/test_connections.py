"""Connections that stay open too long, or are too many, and ports that cannot be used."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from generate.serve.__main__ import main
from generate.serve.connections import ConnectionLimits, listen, make_server


@contextlib.contextmanager
def serving_slowly(limits: ConnectionLimits) -> Iterator[tuple[str, int]]:
    """Serve an application whose /slow and /long answers take longer than `limits` allow."""

    async def quick(request: Request) -> Response:
        return Response(await request.body())

    async def slow(request: Request) -> Response:
        del request
        await asyncio.sleep(60)
        return Response()

    async def long(request: Request) -> Response:
        del request

        async def parts():
            for _ in range(1000):
                yield b"x" * 100_000

        return StreamingResponse(parts())

    app = Starlette(
        routes=[
            Route("/quick", quick, methods=["GET", "POST"]),
            Route("/slow", slow),
            Route("/long", long),
        ]
    )
    with listen("127.0.0.1", 0) as listening:
        server = make_server(app, limits, "critical")
        thread = threading.Thread(target=server.run, args=(listening,))
        thread.start()
        try:
            yield listening[0].getsockname()[:2]
        finally:
            server.force_exit = True
            server.should_exit = True
            thread.join()


def is_closed(connection: socket.socket, within_s: float) -> bool:
    """Return whether the server closes a connection in time."""
    connection.settimeout(within_s)
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /quick",
        b"GET /quick" + HEAD,
        b"GET /quick" + HEAD + b"\r\nGET /quick" + HEAD,
        b"GET /slow" + HEAD + b"\r\n",
        b"POST /quick" + HEAD + b"Content-Length: 9\r\n\r\n1",
    ],
    ids=["nothing", "line", "head", "second", "answer", "body"],
)
def test_connection_is_closed_after_its_deadline(sent):
    limits = ConnectionLimits(head_s=0.3, request_s=0.6, max_connections=10)
    with serving_slowly(limits) as address, socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert is_closed(connection, within_s=3)


def test_bytes_one_at_a_time_do_not_move_the_deadline():
    limits = ConnectionLimits(head_s=0.3, request_s=60, max_connections=10)
    with serving_slowly(limits) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET /quick")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < started + 5:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() < started + 3


@pytest.mark.thorough
def test_client_that_does_not_read_its_answer_is_closed():
    limits = ConnectionLimits(head_s=0.3, request_s=0.6, max_connections=10)
    with serving_slowly(limits) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET /long" + HEAD + b"\r\n")
        time.sleep(2)
        assert is_closed(connection, within_s=1)  # after the contents of its buffers


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sent",
    [b"GET /quick", b"POST /quick" + HEAD + b"Content-Length: 9\r\n\r\n1"],
    ids=["head", "body"],
)
def test_waiting_connections_make_room_for_others(sent):
    limits = ConnectionLimits(head_s=60, request_s=60, max_connections=5)
    with serving_slowly(limits) as address, contextlib.ExitStack() as stack:
        url = f"http://{address[0]}:{address[1]}"
        busy = stack.enter_context(socket.create_connection(address))
        busy.sendall(b"GET /slow" + HEAD + b"\r\n")
        for _ in range(20):
            idle = stack.enter_context(socket.create_connection(address))
            idle.sendall(sent)
            assert httpx.post(f"{url}/quick", content=b"x").text == "x"
        assert not is_closed(busy, within_s=0.2)


def test_server_listens_on_all_addresses_of_a_name(monkeypatch):
    infos = [
        (family, socket.SOCK_STREAM, 0, "", (address, 0))
        for family, address in (
            (socket.AF_INET, "127.0.0.1"),
            (socket.AF_INET, "127.0.0.2"),
            (socket.AF_INET, "203.0.113.9"),  # not an address of this machine
        )
    ]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
        with listen("name", 0) as listening:
            names = [each.getsockname() for each in listening]
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_unusable_address_is_refused_before_the_model_is_loaded(capsys, tmp_path):
    with listen("127.0.0.1", 0) as taken:
        port = taken[0].getsockname()[1]
        assert main([f"--model={tmp_path / 'none'}", f"--port={port}"]) == 2
        assert f"--port={port}: Address already in use; choose another" in capsys.readouterr().err
    assert main([f"--model={tmp_path / 'none'}", "--port=70000"]) == 2
    assert "--port=70000 must be from 0 to 65535" in capsys.readouterr().err
    assert main([f"--model={tmp_path / 'none'}", "--host=nowhere.invalid"]) == 2
    assert "--host=nowhere.invalid" in capsys.readouterr().err
