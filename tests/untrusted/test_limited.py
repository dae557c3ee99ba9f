"""Processes with limits: a call that exceeds one or crashes is one sentence, and others work."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.untrusted.hostile import act
from untrusted.limited import LimitedProcesses, LimitExceeded, Limits, run_limited

_LIMITS = Limits(cpu_s=0.2, memory_bytes=2**28, wall_s=20.0, reply_bytes=2**20)


_IMPORTS = """
import os, signal, sys
from tests.untrusted.hostile import act
from untrusted.limited import LimitedProcesses, Limits
pool = LimitedProcesses(act, Limits(cpu_s=1, memory_bytes=2**28))
"""


@pytest.fixture(scope="module")
def processes():
    return LimitedProcesses(act, _LIMITS)


def test_values_return_as_they_are(processes):
    value = {"a": [1, 0.1, 10**30, None, True], "é\ud83d\ude00\ud800": float("inf"), "": "\0\n"}
    assert processes.call(value, "x") == value


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("loop", "takes more than 0.2 s of processor time"),
        ("multiply", "takes more than 0.2 s of processor time"),
        ("allocate", "takes more than 256 MiB of memory"),
        ("allocate natively", "takes more than 256 MiB of memory"),
        ("long reply", "has a result of more than 1 MiB"),
        ("abort", r"crashes the process that reads it \(SIGABRT\)"),
        ("crash", r"crashes the process that reads it \(SIGSEGV\)"),
        ("be killed", "needs a process that was killed, as happens if .* runs out of memory"),
        ("exit", r"crashes the process that reads it \(exit code 0\)"),
    ],
)
def test_exceeding_a_limit_is_one_sentence_and_the_next_call_works(processes, action, problem):
    with pytest.raises(LimitExceeded, match=f"^gift.json {problem}$"):
        processes.call(action, "gift.json")
    assert processes.call([1], "gift.json") == [1]


def test_waiting_is_limited_too():
    with pytest.raises(LimitExceeded, match=r"^gift.json takes more than 0.5 s$"):
        run_limited(act, "sleep", "gift.json", Limits(cpu_s=1, memory_bytes=2**28, wall_s=0.5))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("refuse", r"^the file is bad; replace it$"),
        ("fail", r"^gift.json cannot be used \(KeyError: 'left'\)$"),
        ("nest", r"^gift.json cannot be used \(RecursionError: .*\)$"),
    ],
)
def test_errors_of_the_function_are_value_errors_and_the_process_goes_on(
    processes, argument, message
):
    before = processes.call("describe", "x")["pid"]
    with pytest.raises(ValueError, match=message) as raised:
        processes.call(argument, "gift.json")
    assert not isinstance(raised.value, LimitExceeded)
    assert processes.call("describe", "x")["pid"] == before


def test_deeply_nested_values_are_refused(processes):
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match=r"gift.json has values that are nested too deeply"):
        processes.call(value, "gift.json")


def test_process_gets_no_secrets_no_jax_and_no_files(processes, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/tmp")
    with open("/dev/null"):
        found = run_limited(act, "describe", "x", _LIMITS)
    assert "PATH" in found["environment"]
    assert not {"HF_TOKEN", "PYTHONPATH", "TAIBAI_SECRET"} & {*found["environment"]}
    assert not found["has_jax"]
    assert found["open_files"] == 5  # the standard streams, the socket, and the folder itself


def test_process_that_was_killed_between_calls_is_replaced(processes):
    os.kill(processes.call("describe", "x")["pid"], signal.SIGKILL)
    time.sleep(0.1)
    assert processes.call(3, "x") == 3


def test_threads_call_at_the_same_time():
    processes = LimitedProcesses(act, _LIMITS, num_processes=2)
    barrier = threading.Barrier(2)

    def call(value):
        if value in (0, 1):
            barrier.wait(20)
        found = processes.call(value, "x")
        return found, processes.call("describe", "x")["pid"]

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(call, range(40))]
    assert [value for value, _ in found] == [*range(40)]
    assert 1 <= len({pid for _, pid in found}) <= 2
    processes.close()


def test_forked_process_starts_its_own():
    found = _run(
        """
        ours = pool.call("describe", "x")["pid"]
        if os.fork() == 0:
            print(pool.call("describe", "x")["pid"], flush=True)
            sys.exit()
        os.wait()
        print(ours, pool.call("describe", "x")["pid"])
        """
    )
    theirs, ours, later = found.split()
    assert theirs != ours == later


def test_pickled_object_starts_its_own(processes):
    copy = pickle.loads(pickle.dumps(processes))
    assert copy.call("describe", "x")["pid"] != processes.call("describe", "x")["pid"]
    copy.close()


_KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("busy", ["", "sleep", "multiply"])
@pytest.mark.parametrize("end", ["sys.exit()", _KILL])
def test_processes_end_with_their_parent(end, busy):
    """Also in the middle of a call, even in native code that no signal handler of Python stops."""
    if busy:
        pool = "pool = LimitedProcesses(act, Limits(cpu_s=60, memory_bytes=2**30))"
        call = f"threading.Thread(target=pool.call, args=({busy!r}, 'x'), daemon=True).start()"
        end = f"import threading, time; {call}; time.sleep(0.5); {end}"
    else:
        pool = ""
    pid = int(_run(f"{pool}\nprint(pool.call('describe', 'x')['pid'], flush=True); {end}"))
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except OSError:
            return
        if state == "Z":  # nobody waits for it here
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is left")


def _run(program: str) -> str:
    """Run a program without jax, which warns about forks; return its output."""
    command = [sys.executable, "-c", _IMPORTS + textwrap.dedent(program)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def test_function_that_cannot_be_imported_is_an_error_of_ours():
    with pytest.raises(OSError, match=r"test_limited:test_.* cannot start: .*AttributeError"):
        run_limited(_local(), 1, "x", _LIMITS)


def _local():
    def function(argument):
        return argument

    function.__qualname__ = "test_that_does_not_exist"
    return function
