"""Threads and processes that turn requests into tokens, so that slow ones hold up no others.

    completions ──> threads that asyncio shares ──────────> tokens
    chats ──> threads of their own ──> template, in one of ──> tokens
                                       two processes with limits

A chat template is a program of whoever made the model. A chat that makes it run for ever ends with
an error after a second of processor time, and other chats wait for it, but no completions.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from data.text.chat import rendering
from generate.serve.engine import Busy
from untrusted.limited import LimitedProcesses
from untrusted.limited_process import Limits

T = TypeVar("T")

_NUM_CHAT_THREADS = 8
#: Most requests that are being read or wait for it.
_MAX_UNREAD = 256
_TEMPLATE_LIMITS = Limits(cpu_s=1, memory_bytes=2**29, wall_s=30, reply_bytes=2**24)


def template_processes() -> LimitedProcesses:
    """Return the processes that run the chat template."""
    return LimitedProcesses(rendering.render, _TEMPLATE_LIMITS, num_processes=2)


class Readers:
    """The threads that read requests."""

    def __init__(self):
        self._of_chats = ThreadPoolExecutor(_NUM_CHAT_THREADS, "chats")
        self._num_unread = 0

    async def read(
        self,
        function: Callable[[dict[str, Any]], T],
        fields: dict[str, Any],
        *,
        is_chat: bool,
        deadline_s: float,
    ) -> T:
        """Call a function with the fields of a request in a thread.

        Args:
            deadline_s: time of the event loop until which the result is needed.

        Raises:
            TimeoutError: the deadline is over.
            BadRequest: as for the function.
            Busy: too many requests are waiting.
        """
        if self._num_unread >= _MAX_UNREAD:
            raise Busy(f"{self._num_unread} requests are waiting to be read; try again later")
        self._num_unread += 1
        threads = self._of_chats if is_chat else None
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.get_running_loop().run_in_executor(threads, function, fields)
        finally:
            self._num_unread -= 1
