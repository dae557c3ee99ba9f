"""The handshake before processes join, with threads in place of processes."""

import contextlib
import json
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from distributed.handshake import Process, _own_version, perform_handshake, software
from distributed.message_socket import MessageSocket
from distributed.secret import proof, run_secret

SOFTWARE = {"python": "3.11.7", "jax": "0.10.2"}


def process(number: int, count: int = 3, **changes) -> Process:
    own = Process(process_id=number, num_processes=count, host=f"n{number}", software=SOFTWARE)
    return replace(own, **changes)


def free_address() -> str:
    """Return an address of the loopback interface with a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def answers(
    *present: Process,
    timeout_s: float = 20.0,
    coordinator: str | None = None,
    secrets: Sequence[bytes] = (b"the run's",) * 9,
) -> list[str | None]:
    """Run a handshake, and return each process's error message, or None."""
    coordinator = coordinator or free_address()
    replies: list[str | None] = [None] * len(present)

    def call(number: int) -> None:
        try:
            perform_handshake(present[number], coordinator, secrets[number], timeout_s)
        except (ValueError, OSError) as error:
            replies[number] = str(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(present))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return replies


def test_those_that_fit_each_other_go_on():
    assert answers(*(process(number) for number in range(3))) == [None] * 3


def test_processes_on_one_machine_meet_at_a_socket_in_a_folder(tmp_path):
    coordinator = f"unix:{tmp_path}/socket"
    present = [process(number) for number in range(3)]
    assert answers(*present, coordinator=coordinator) == [None] * 3
    assert answers(*present, coordinator=coordinator) == [None] * 3  # the old socket is replaced


def test_processes_with_another_secret_do_not_join():
    replies = answers(process(0, 2), process(1, 2), timeout_s=1.0, secrets=(b"one", b"other"))
    assert re.match(
        r"1 of 2 processes are missing after 1 s: 1; .* \(\d+ connections lacked the secret, "
        r"TAIBAI_SECRET\)",
        str(replies[0]),
    )
    assert re.match(r"process 1 .* and is TAIBAI_SECRET the same for all\?", str(replies[1]))


def test_process_0_with_another_secret_is_not_believed():
    """A lying process 0 accepts everyone, because it checks no proof itself."""
    coordinator = free_address()
    stop = threading.Event()

    def lie() -> None:
        with socket.create_server(("127.0.0.1", int(coordinator.rpartition(":")[2]))) as server:
            server.settimeout(0.1)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError, OSError):
                    connection, _ = server.accept()
                    with contextlib.closing(
                        MessageSocket(connection, time.monotonic() + 5)
                    ) as channel:
                        channel.send({"nonce": "a"})
                        nonces = ("a", channel.receive()["nonce"])
                        code = proof(b"a guess", "answer", *nonces, "null")
                        channel.send({"answer": "null", "proof": code})

    liar = threading.Thread(target=lie)
    liar.start()
    (reply,) = answers(process(1, 2), timeout_s=1.0, coordinator=coordinator)
    stop.set()
    liar.join()
    assert re.search(r"\(the process that answers there has another secret\)", str(reply))


def test_missing_processes_are_named_to_those_that_came():
    since = time.monotonic()
    replies = answers(process(0), process(2), timeout_s=1.0)
    assert time.monotonic() - since < 20
    message = "1 of 3 processes are missing after 1 s: 1; the others are on n0, n2"
    assert all(error is not None and error.startswith(message) for error in replies)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            process(1, 3),
            "process 1 on n1 was started as one of 3 processes, and process 0 on n0 as one of 2",
        ),
        (
            process(1, 2, software={**SOFTWARE, "jax": "0.12.0"}),
            "process 1 on n1 has jax 0.12.0, and process 0 on n0 has jax 0.10.2; install the same",
        ),
        (
            process(1, 2, software={"python": "3.11.7"}),
            "process 1 on n1 has jax missing, and process 0 on n0 has jax 0.10.2",
        ),
    ],
    ids=["world size", "version", "package"],
)
def test_a_process_that_does_not_fit_is_named_to_all(other, message):
    replies = answers(process(0, 2), other)
    assert all(error is not None and error.startswith(message) for error in replies)


def test_software_holds_the_code_that_is_loaded(tmp_path, monkeypatch):
    """Only project code counts: a run on one host may read its config from anywhere."""
    assert {"python", "jax", "taibai"} <= software().keys()
    (tmp_path / "train" / "step").mkdir(parents=True)
    for name in ("train/step/train_step.py", "notes.py"):
        (tmp_path / name).write_text("x = 1")
    for i, name in enumerate(("train/step/train_step.py", "notes.py")):
        module = types.SimpleNamespace(__file__=str(tmp_path / name))
        monkeypatch.setitem(sys.modules, f"of_this_test_{i}", module)
    versions = [_own_version(tmp_path)]
    for name in ("notes.py", "train/step/train_step.py"):
        (tmp_path / name).write_text("x = 2")
        versions.append(_own_version(tmp_path))
    assert versions[0] == versions[1] != versions[2]


def test_two_processes_with_one_id_are_named():
    replies = answers(process(0), process(1, pid=7), process(1, pid=8))
    assert all(
        re.match(r"process 1 was started twice, on n1 \(pid [78]\) and", str(e)) for e in replies
    )


def test_coordinator_that_is_not_there_is_named():
    (replies,) = answers(process(1), timeout_s=0.5)
    assert re.match(
        r"process 1 on n1 could not reach process 0 at 127.0.0.1:\d+ within", str(replies)
    )


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"process 0 on n0 cannot listen on port {port} "):
            perform_handshake(process(0), f"127.0.0.1:{port}", b"x", 1.0)


def test_strangers_at_the_port_are_passed_over():
    coordinator = free_address()
    port = int(coordinator.rpartition(":")[2])
    first = threading.Thread(
        target=perform_handshake, args=(process(0, 2), coordinator, b"the run's", 20.0)
    )
    first.start()
    claim = json.dumps({"nonce": "0", "process": process(1, 2).to_json(), "proof": "0" * 64})
    wrong_types = json.dumps({"nonce": 0, "process": [], "proof": None})
    nested = "[" * 60_000
    for content in ("GET / HTTP/1.1\r\n", "[1]", claim, wrong_types, nested, "x" * 200_000, ""):
        with connect(port) as stranger, contextlib.suppress(OSError):
            stranger.sendall(content.encode() + b"\n")
    silent = [connect(port) for _ in range(20)]  # stay connected and send nothing
    since = time.monotonic()
    perform_handshake(process(1, 2), coordinator, b"the run's", 20.0)
    assert time.monotonic() - since < 4, "a stranger kept the processes waiting"
    first.join(timeout=30)
    assert not first.is_alive()
    for connection in silent:
        connection.close()


@pytest.mark.thorough
def test_port_is_free_right_after_the_handshake():
    for _ in range(10):
        coordinator = free_address()
        other = threading.Thread(
            target=perform_handshake, args=(process(1, 2), coordinator, b"the run's", 20.0)
        )
        other.start()
        perform_handshake(process(0, 2), coordinator, b"the run's", 20.0)
        # As JAX does, but without the options that let two servers share a port.
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", int(coordinator.rpartition(":")[2])))
            server.listen()
        other.join()


@pytest.mark.thorough
def test_slow_stranger_does_not_delay_the_deadline():
    coordinator = free_address()
    replies = []

    def listen():
        with pytest.raises(TimeoutError) as error:
            perform_handshake(process(0, 2), coordinator, b"the run's", 3.0)
        replies.append((time.monotonic(), str(error.value)))

    since = time.monotonic()
    first = threading.Thread(target=listen)
    first.start()
    with connect(int(coordinator.rpartition(":")[2])) as stranger, contextlib.suppress(OSError):
        for _ in range(40):
            stranger.sendall(b"x")
            time.sleep(0.1)
    first.join(timeout=30)
    ((ended, message),) = replies
    assert ended - since < 6 and message.startswith("1 of 2 processes are missing after 3 s: 1")


def test_slow_stranger_is_dropped_long_before_the_deadline(monkeypatch):
    monkeypatch.setattr("distributed.handshake._INTRODUCTION_S", 1.0)
    coordinator = free_address()
    first = threading.Thread(
        target=perform_handshake, args=(process(0, 2), coordinator, b"the run's", 60.0)
    )
    first.start()
    since = time.monotonic()
    with connect(int(coordinator.rpartition(":")[2])) as stranger:
        with pytest.raises(OSError):
            while time.monotonic() - since < 20:
                stranger.sendall(b" ")
                time.sleep(0.05)
    perform_handshake(process(1, 2), coordinator, b"the run's", 60.0)
    first.join(timeout=30)
    assert not first.is_alive()


def test_secret_file_is_created_once_and_must_be_private(tmp_path):
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: run_secret(env), range(8)))
    assert len(found) == 1 and len(found.pop()) == 64
    path = tmp_path / "taibai" / "secret"
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert run_secret({**env, "TAIBAI_SECRET": "own"}) == b"own"
    path.chmod(0o644)
    with pytest.raises(ValueError, match="taibai/secret must be a file .* only you can read"):
        run_secret(env)


def connect(port: int) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError(f"nobody listens on port {port}")
