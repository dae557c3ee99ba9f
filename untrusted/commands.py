"""What all commands share: their names, how they report bad input, and how they end.

A command's main function is decorated with `refuses_bad_input`, and its module ends with

    if __name__ == "__main__":
        run_command(main)
"""

import argparse
import functools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec

from untrusted.messages import sentence_of
from untrusted.streams import EndingStream, SafeStream, flush_or_discard, open_missing_streams

#: Exit code of a command whose input is refused.
REFUSED = 2
#: Exit code of a command that Ctrl-C has ended: a shell's code of programs that SIGINT has ended.
INTERRUPTED = 128 + 2

_Arguments = ParamSpec("_Arguments")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {message}\n")


def command_parser(module: str, **options: Any) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments, which must not be abbreviated.

    Args:
        options: further arguments of argparse.ArgumentParser, such as the description.
    """
    # The user started it as `taibai train` or as `python -m train.main`.
    name = sys.argv[0] if sys.argv[0].startswith("taibai ") else f"python -m {module}"
    return _Parser(prog=name, allow_abbrev=False, **options)


def command_line(module: str, argv: Sequence[str] | None) -> str:
    """Return the command that makes a result, to store with it.

    Args:
        argv: its arguments; None: those of this process.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return shlex.join(["python", "-m", module, *arguments])


def wants_traceback() -> bool:
    """Return whether the user wants to see where errors are raised."""
    return bool(os.environ.get("TAIBAI_TRACEBACK"))


def print_error(error: Exception, *, with_hint: bool = False) -> None:
    """Print an error in one sentence, with a hint on how to see where it was raised."""
    hint = "\n(TAIBAI_TRACEBACK=1 shows where this was raised)" if with_hint else ""
    print(f"error: {sentence_of(error)}{hint}", file=sys.stderr)


def refuse_missing_package(error: ModuleNotFoundError, remedy: str) -> NoReturn:
    """End a command that needs a package which is not installed.

    Args:
        remedy: says what needs the package, and how to install it.
    """
    print(f"error: {error}; {remedy}", file=sys.stderr)
    sys.exit(REFUSED)


def refuses_bad_input(
    *others: type[Exception], with_hint: bool = False
) -> Callable[[Callable[_Arguments, int | None]], Callable[_Arguments, int]]:
    """Return a decorator of functions that return exit codes.

    A ValueError or OSError becomes one printed sentence and the exit code 2.

    Args:
        others: further exceptions to which this applies.
        with_hint: whether the message also says how to see where the error was raised.
    """

    def decorate(main: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
        @functools.wraps(main)
        def decorated(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
            try:
                return main(*args, **kwargs) or 0
            except (ValueError, OSError, *others) as error:
                if wants_traceback():
                    raise
                print_error(error, with_hint=with_hint)
                return REFUSED

        return decorated

    return decorate


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a command, and end the process.

    If standard output cannot be written, the command ends: without a message if its reader, such
    as `head`, has left, and otherwise with an error of one sentence. Ctrl-C ends it, too.

    Args:
        main: returns the exit code; None is 0.
    """
    open_missing_streams()
    sys.stdout = EndingStream(sys.stdout)
    sys.stderr = SafeStream(sys.stderr)
    try:
        code = code_of(main)
    finally:
        sys.stdout.flush()  # also after `--help`
    exit_process(code)


def code_of(main: Callable[[], int | None]) -> int:
    """Call the main function of a program, and return its exit code, also if Ctrl-C ends it."""
    # While the program was imported, Ctrl-C ended it at once. The name is compared, because
    # taibai.py may be the program itself, and not the module.
    if getattr(signal.getsignal(signal.SIGINT), "__name__", "") == "end_import":
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def exit_process(code: int) -> NoReturn:
    """End the process with an exit code, even if the rest of its output cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        flush_or_discard(stream)
    sys.exit(code)
