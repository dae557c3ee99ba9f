"""Starts several processes of one run on this machine.

    python -m launch.local --processes=2 --devices_per_process=4 -- python -m train.main ...

Process 0 writes straight to the terminal, so its progress bars work; the lines of the others begin
with their number, as in `[1] ...`. If a process fails, the others are stopped, one line says which
failed and how, and the exit code is its own, or 128 + the signal that killed it; with
`--max_restarts=N` all are started again, up to N times. Ctrl-C and SIGTERM are passed on to all: a
training run then saves and ends with code 75, and whoever starts it again goes on from there.
"""

import argparse
import contextlib
import math
import os
import queue
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from launch import environment
from launch.processes import Event, Processes
from train.lifecycle.exit_codes import FINAL, STOPPED

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"launch.local: {message}\n")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's options, and the command behind '--'."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    command = list(argv[end + 1 :])
    parser = _Parser(
        prog="python -m launch.local",
        usage="%(prog)s --processes=N [--devices_per_process=D] -- COMMAND ...",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=_positive, required=True, help="how many to start")
    parser.add_argument(
        "--devices_per_process",
        type=_positive,
        default=1,
        help="devices of each: simulated ones on a CPU, else GPUs (default: 1)",
    )
    parser.add_argument(
        "--grace_s",
        type=_seconds,
        default=60.0,
        help="seconds between SIGTERM and SIGKILL for processes that must stop (default: 60)",
    )
    parser.add_argument(
        "--max_restarts",
        type=_count,
        default=0,
        help="how often to start all processes again when one fails (default: 0)",
    )
    options, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        parser.error(
            f"unknown option {unknown[0]!r}; the options are --processes, --devices_per_process,"
            " --grace_s and --max_restarts, and the command to start comes behind --"
        )
    if not command:
        parser.error("no command to start: put one behind --, as in -- python -m train.main ...")
    if command[0] in ("python", "python3"):
        # The interpreter that has the project's packages, whatever comes first on PATH.
        command = [sys.executable, *command[1:]]
    if shutil.which(command[0]) is None:
        parser.error(f"cannot start {command[0]!r}: no such program on PATH; check the spelling")
    return options, command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return seconds


def free_port() -> int:
    """A TCP port that is free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(
    num_processes: int, devices_per_process: int, user: Mapping[str, str]
) -> list[dict[str, str]]:
    """The whole environment of each process.

    Args:
      num_processes: number of processes.
      devices_per_process: devices of each process.
      user: the launcher's own environment; its compiler settings win over ours.

    Raises:
      ValueError: more GPUs are needed than there are.
    """
    platform = environment.detect_platform(user)
    shared = {**user, **environment.compiler_variables(platform, user)}
    coordinator = f"127.0.0.1:{free_port()}"
    result = []
    for process_id in range(num_processes):
        variables = environment.process_variables(
            coordinator=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            devices_per_process=devices_per_process if platform == "cpu" else None,
        )
        if platform == "gpu":
            variables |= environment.gpu_variables(
                process_id, num_processes, devices_per_process, user
            )
        result.append(shared | variables)
    return result


def run(processes: Processes, grace_s: float) -> tuple[int, bool]:
    """The exit code of the run, once none of its processes is left, and whether one failed."""
    while processes.running:
        event = processes.next_event()
        # Those that stop have agreed to, and one may still be saving for all.
        if event is None or event[1] in (0, STOPPED):
            continue
        who, code = event
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        what = f"received {signal.Signals(-code).name}" if who is None else f"process {who} {how}"
        left = len(processes.running)
        rest = f"; stopping the {left} still running" if left else ""
        # On a terminal, process 0's last progress bar stays readable above this line.
        start = "\n" if sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):  # whoever read this may be gone; stopping matters more
            print(f"{start}launch.local: {what}{rest}", file=sys.stderr, flush=True)
        processes.stop(grace_s)
        if who is None and set(processes.codes.values()) == {STOPPED}:
            return STOPPED, False
        return code if code > 0 else 128 - code, who is not None and code not in FINAL
    return max(processes.codes.values()), False


def main(argv: Sequence[str]) -> int:
    """Starts the processes that the arguments ask for and returns the launcher's exit code."""
    options, command = parse_arguments(argv)
    # Simple, because a handler writes to it that may interrupt a read of it.
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for number in _STOPPING:
        # What nohup ignores stays ignored. What a script's background jobs ignore does not: SIGINT.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: events.put((None, -number)))
    for restarts_left in reversed(range(options.max_restarts + 1)):
        try:  # each time anew, as the coordinator needs a free port
            variables = environments(options.processes, options.devices_per_process, os.environ)
        except ValueError as error:
            print(f"launch.local: {error}", file=sys.stderr)
            return 2
        processes = Processes(command, variables, events)
        try:
            code, has_failed = run(processes, options.grace_s)
        finally:
            processes.stop(options.grace_s)
        if not has_failed or not restarts_left:
            break
        print(f"launch.local: starting again ({restarts_left} left)", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
