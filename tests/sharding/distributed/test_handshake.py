"""The handshake before processes join, with threads in place of processes."""

import re
import socket
import sys
import threading
import time
import types
from dataclasses import replace

import pytest

from sharding.distributed.handshake import Process, _own_version, perform_handshake, software
from sharding.distributed.startup import DistributedEnv, read_distributed_env

SOFTWARE = {"python": "3.11.7", "jax": "0.10.2"}


def process(number: int, count: int = 3, **changes) -> Process:
    own = Process(process_id=number, num_processes=count, host=f"n{number}", software=SOFTWARE)
    return replace(own, **changes)


def answers(*present: Process, timeout_s: float = 20.0) -> list[str | None]:
    """Run a handshake, and return each process's error message, or None."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    replies: list[str | None] = [None] * len(present)

    def call(number: int) -> None:
        try:
            perform_handshake(present[number], coordinator, timeout_s)
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
            perform_handshake(process(0), f"127.0.0.1:{port}", 1.0)


@pytest.mark.thorough
def test_strangers_at_the_port_are_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first = threading.Thread(
        target=perform_handshake, args=(process(0, 2), f"127.0.0.1:{port}", 20.0)
    )
    first.start()
    for content in (b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"process_id": "x"}\n', b""):
        with connect(port) as stranger:
            stranger.sendall(content)
    silent = connect(port)  # stays connected and sends nothing
    perform_handshake(process(1, 2), f"127.0.0.1:{port}", 20.0)
    first.join(timeout=30)
    assert not first.is_alive()
    silent.close()


def connect(port: int) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError(f"nobody listens on port {port}")


SLURM = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[03-04]",
}


@pytest.mark.parametrize(
    ("changes", "host", "local_device_ids"),
    [
        ({}, "n03", [1]),
        ({"SLURM_STEP_NODELIST": "a7,n[1-3]"}, "a7", [1]),
        ({"SLURM_STEP_NODELIST": "n[001,007-015],x"}, "n001", [1]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "n03", [1]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "n03", None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, "n03", None),
    ],
)
def test_slurm_says_how_a_process_was_started(changes, host, local_device_ids):
    assert read_distributed_env({**SLURM, **changes}) == DistributedEnv(
        coordinator=f"{host}:{61440 + 802}",
        num_processes=4,
        process_id=3,
        local_device_ids=local_device_ids,
    )


def test_one_process_alone_joins_nobody():
    assert read_distributed_env({}) is None
    assert read_distributed_env({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
