"""Starts several processes of one run on this machine.

    python -m launch.local --processes=2 --devices_per_process=4 -- python -m train.main ...

Process 0 writes directly to the terminal, so its progress bars work. Lines from the other
processes are prefixed with the process number, as in `[1] ...`.

If a process fails, the launcher stops the others and prints which one failed and how. Its exit code
is that process's exit code, or 128 + the number of the signal that killed it. With
`--max_restarts=N` it restarts all processes instead, up to N times.

If the launcher or one of the processes is asked to stop, by Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP, the
launcher stops all processes. A training run then saves a checkpoint and exits with code 75; the
same command resumes it. A second signal changes nothing, except for a second Ctrl-C, which kills
all processes.
"""

import argparse
import contextlib
import math
import os
import queue
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import FrameType

import taibai
from distributed.variables import (
    COORDINATOR,
    DEVICES_PER_PROCESS,
    NUM_PROCESSES,
    PROCESS_ID,
    SECRET,
)
from launch import environment
from launch.processes import Event, Processes
from train.lifecycle.exit_codes import FINAL, FINISHED, STOPPED
from train.lifecycle.stop_signals import heeded_signals, is_stopped
from untrusted.commands import REFUSED, command_parser, exit_process, print_error
from untrusted.streams import open_missing_streams

#: Largest number of processes, and of devices of a process: more could end a machine.
_MAX_COUNT = 512


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's options, and the command after '--'.

    Exits with code 2 and a one-sentence error if the arguments are invalid or the command cannot
    be found.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    command = list(argv[end + 1 :])
    parser = command_parser(
        "launch.local",
        usage="%(prog)s --processes=N [--devices_per_process=D] -- COMMAND ...",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "--processes", type=_positive, required=True, help="number of processes to start"
    )
    parser.add_argument(
        "--devices_per_process",
        type=_positive,
        default=1,
        help="devices of each process: simulated on a CPU, GPUs otherwise (default: 1)",
    )
    parser.add_argument(
        "--grace_s",
        type=_seconds,
        default=60.0,
        help="seconds between SIGTERM and SIGKILL when stopping processes (default: 60)",
    )
    parser.add_argument(
        "--max_restarts",
        type=_count,
        default=0,
        help="number of times to restart all processes after one fails (default: 0)",
    )
    options, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        parser.error(
            f"unknown option {unknown[0]!r}; the options are --processes, --devices_per_process,"
            " --grace_s and --max_restarts; put the command to start after --"
        )
    if not command:
        parser.error("no command to start: put one after --, as in -- python -m train.main ...")
    if command[0] in ("python", "python3"):
        # The interpreter that has the project's packages, which may not be the first on PATH.
        command = [sys.executable, *command[1:]]
    elif command[0] == "taibai":
        command = [sys.executable, taibai.__file__, *command[1:]]
    if shutil.which(command[0]) is None:
        parser.error(f"cannot start {command[0]!r}: no such program on PATH; check its spelling")
    return options, command


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} must be a whole number of at least 1 and at most {_MAX_COUNT}"
        )
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} must be a whole number of at least 0, with at most 9 digits"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return seconds


def environments(
    num_processes: int, devices_per_process: int, user: Mapping[str, str], directory: str
) -> list[dict[str, str]]:
    """Return the complete environment of each process.

    Args:
        user: launcher's own environment; its XLA and NCCL settings override the defaults.
        directory: directory that only the user can enter, for the socket of process 0.

    Raises:
        ValueError: the processes need more GPUs than there are.
    """
    platform = environment.detect_platform(user)
    shared = {
        **user,
        **environment.compiler_variables(platform, user),
        COORDINATOR: f"unix:{directory}/coordinator",
        SECRET: secrets.token_hex(32),
        NUM_PROCESSES: str(num_processes),
    }
    result = []
    for process_id in range(num_processes):
        if platform == "cpu":
            devices = {DEVICES_PER_PROCESS: str(devices_per_process)}
        else:
            devices = environment.gpu_variables(
                process_id, num_processes, devices_per_process, user
            )
        result.append(shared | devices | {PROCESS_ID: str(process_id)})
    return result


class StopRequests:
    """Signals that asked the launcher to stop, from the creation of this object on.

    Each of them is also an event, which wakes up the thread that waits for events.

    Attributes:
        first: first of them, or None.
    """

    def __init__(self, events: "queue.SimpleQueue[Event]"):
        self.first: signal.Signals | None = None
        self._num_interrupts = 0
        # SimpleQueue.put is reentrant: the signal handler may interrupt a `get` of this queue.
        self._events = events
        for name in heeded_signals():
            signal.signal(name, self._on_signal)

    def is_urgent(self) -> bool:
        """Whether Ctrl-C was pressed again, because the processes take too long to save."""
        return self._num_interrupts > 1

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        self.first = self.first or name
        self._num_interrupts += name == signal.SIGINT
        self._events.put((None, -number))


def run(processes: Processes, requests: StopRequests, grace_s: float) -> tuple[int, bool]:
    """Wait until all processes have ended; stop the others if one of them fails or was stopped.

    A process that ends with STOPPED either has agreed on it with the others, which then end by
    themselves and ignore SIGTERM; or it had not connected to all of them yet, and they would wait
    for it.

    Args:
        requests: signals to the launcher, which stop all processes.
        grace_s: seconds between SIGTERM and SIGKILL.

    Returns:
        The launcher's exit code, and whether a restart may help: true if a process failed with
        an exit code that is not in `train.lifecycle.exit_codes.FINAL`.
    """
    while processes.running:
        event = processes.next_event()
        if event is None or event[1] == FINISHED:
            continue
        who, code = event
        if code != STOPPED:
            how = f"killed by {_name(code)}" if code < 0 else f"exited with code {code}"
            what = f"received {_name(code)}" if who is None else f"process {who} {how}"
            left = len(processes.running)
            _say(what + (f"; stopping the {left} still running" if left else ""))
        processes.stop(grace_s, requests.is_urgent)
        codes = processes.codes.values()
        if is_stopped(code):
            errors = [each for each in codes if each in FINAL and each != FINISHED]
            if errors or STOPPED in codes:
                return max(errors, default=STOPPED), False
        can_restart = who is not None and not is_stopped(code) and code not in FINAL
        return code if code > 0 else 128 - code, can_restart
    return FINISHED, False


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def _say(message: str) -> None:
    # On a terminal, this keeps process 0's last progress bar readable above this line.
    start = "\n" if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):  # stop the processes even if stderr is closed
        print(f"{start}launch.local: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Start the processes that the arguments ask for, and return the launcher's exit code."""
    options, command = parse_arguments(argv)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    requests = StopRequests(events)
    # Only this user can enter the directory. The path of a socket may have at most 107 bytes.
    base = tempfile.gettempdir()
    base = base if len(base) < 60 else "/tmp"
    for restarts_left in reversed(range(options.max_restarts + 1)):
        with tempfile.TemporaryDirectory(prefix="taibai-", dir=base) as directory:
            try:
                variables = environments(
                    options.processes, options.devices_per_process, os.environ, directory
                )
            except ValueError as error:
                print_error(error)
                return REFUSED
            processes = Processes(command, variables, events)
            try:
                code, can_restart = run(processes, requests, options.grace_s)
            finally:
                processes.stop(options.grace_s)
        if not can_restart or not restarts_left:
            break
        if requests.first is not None:
            _say(f"received {requests.first.name}; not restarting")
            break
        _say(f"restarting ({restarts_left} left)")
    return code


if __name__ == "__main__":
    open_missing_streams()
    exit_process(main(sys.argv[1:]))
