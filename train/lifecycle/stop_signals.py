"""Signals that ask a run to stop, and their effects on its process.

This module imports only the standard library, so that a command can watch for signals before it
loads jax, which takes seconds.

    until `defer`   there is nothing to save: a signal ends the process immediately
    from `defer` on the first signal is recorded, and the training loop stops after its step;
                    further ones change nothing, except for a second Ctrl-C, which ends the process
"""

import contextlib
import logging
import os
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from train.lifecycle.exit_codes import STOPPED

#: Sent by SLURM and Kubernetes; often chosen with sbatch's --signal; Ctrl-C; a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it

_log = logging.getLogger(__name__)


def heeded_signals() -> list[signal.Signals]:
    """Return the subset of SIGNALS that this process reacts to.

    Under nohup SIGHUP is ignored, and must stay so. SIGINT is handled even if it is ignored, as it
    is in the background jobs of a shell script.
    """
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [name for name in SIGNALS if not (is_nohup and name == signal.SIGHUP)]


def is_stopped(code: int) -> bool:
    """Return whether a signal asked a process to stop, according to its exit code.

    A process that cannot handle signals yet, or stops without saving, has the signal as its code.

    Args:
        code: STOPPED, the negative number of a signal, 128 + the number, or any other code.
    """
    return code == STOPPED or -code in SIGNALS or code - 128 in SIGNALS


class StopSignals:
    """A context manager that records signals that ask this process to stop, after `defer`.

    Attributes:
        received: first signal that was received, or None.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._is_deferred = False
        self._is_watched = False
        self._num_interrupts = 0
        self._scratch: Path | None = None

    def remove_at_exit(self, directory: Path) -> None:
        """Remove a temporary directory if a signal ends the process before `defer`."""
        self._scratch = directory

    def watch(self) -> None:
        """End the process immediately on a signal until `defer`, and afterwards on a second Ctrl-C.

        Python runs signal handlers only between two instructions of the main thread, which may be
        compiling, or waiting for another process, for minutes. So a thread waits for the signals.
        """
        self._is_watched = True
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, args=(receiving,), daemon=True, name="signals").start()
        # The same handlers before and after `defer`, so that no signal is lost in between.
        self._set_handlers()

    def __enter__(self) -> "StopSignals":
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    @property
    def has_received(self) -> bool:
        """Whether a signal was received."""
        return self.received is not None

    def defer(self) -> None:
        """Record signals from now on, instead of ending the process."""
        self._is_deferred = True
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            # Even if they are set: a library may have replaced them since.
            self._set_handlers()

    def _set_handlers(self) -> None:
        for name in heeded_signals():
            self._before.setdefault(name, signal.signal(name, self._on_signal))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if self.received is None:
            self.received = name
            if self._is_deferred:  # otherwise, the watching thread is ending the process
                _log.warning("%s: finishing this step, saving, and stopping", name.name)
        if not self._is_watched:
            self._num_interrupts += name == signal.SIGINT
            if self._num_interrupts > 1:
                raise KeyboardInterrupt

    def _wait(self, receiving: int) -> None:
        while number := os.read(receiving, 1):
            if number[0] not in SIGNALS:
                continue
            name = signal.Signals(number[0])
            if not self._is_deferred:
                if self._scratch is not None:
                    shutil.rmtree(self._scratch, ignore_errors=True)
                _end_process(f"{name.name}: stopping now, as there is nothing to save yet", STOPPED)
            self._num_interrupts += name == signal.SIGINT
            if self._num_interrupts > 1:
                _end_process("SIGINT again: stopping now, without saving", 128 + name)


def _end_process(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"{message}\n".encode())
    os._exit(code)
