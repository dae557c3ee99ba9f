"""One process with limits for many inputs: starting one for each would take most of the time."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from data import table_files
from data.text.tokenization import tokenizer_checks
from untrusted.limited import LimitedProcesses, run_limited
from untrusted.limited_process import Limits

#: Every this many calls are made in a process of their own, which takes about 0.5 s to start.
_OWN_PROCESS_EVERY = 200


@contextlib.contextmanager
def persistent_processes() -> Iterator[None]:
    """Keep the processes that check and convert files until the end of the block.

    A function keeps the limits of its first call, which is for the valid input; files may be as
    large as the largest input needs. Some of the inputs are given to a process of their own, with
    the limits that they have outside of these tests.
    """
    pools: dict[Callable[[Any], Any], LimitedProcesses] = {}
    num_calls = itertools.count(1)

    def run(function: Callable[[Any], Any], argument: Any, subject: str, limits: Limits) -> Any:
        if next(num_calls) % _OWN_PROCESS_EVERY == 0:
            return run_limited(function, argument, subject, limits)
        if function not in pools:
            limits = dataclasses.replace(limits, file_bytes=2**30)
            pools[function] = LimitedProcesses(function, limits)
        return pools[function].call(argument, subject)

    with contextlib.ExitStack() as stack:
        for module in (table_files, tokenizer_checks):
            stack.enter_context(mock.patch.object(module, "run_limited", run))
        try:
            yield
        finally:
            for pool in pools.values():
                pool.close()
