"""Messages between the processes of a run that do not use the devices.

They are sent through the key-value service that `jax.distributed` started, so a thread can exchange
them while the devices compute. A device collective in such a thread would mix with the collectives
of the training step, in a different order on every process.

`jax.experimental.multihost_utils` is not used here, because `broadcast_one_to_all`,
`process_allgather` and `sync_global_devices` are such collectives. They exchange arrays of equal
shapes, not error messages, and do not report which process failed to answer.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed

from untrusted.messages import LASTING, LastingError, sentence_of

#: Seconds without an answer after which a process counts as failed.
TIMEOUT_S = 1200.0

#: The same during the start of a run. Hosts may take very different times to tokenize, compile and
#: read. jax detects lost hosts.
LONGEST_START_S = 24 * 3600.0

_NO_ANSWER = "no answer"

T = TypeVar("T")

_numbers = itertools.count()


def may_pass(error: Exception | None) -> bool:
    """Return whether a restart may help: a file system, a network or another process failed."""
    lasting = (FileNotFoundError, LastingError)
    return (
        isinstance(error, OSError) and not isinstance(error, lasting) and error.errno not in LASTING
    )


#: Kind of an error in a message -> type.
_ERRORS = {"value": ValueError, "os": OSError, "lasting": LastingError}


class Exchange:
    """A series of exchanges between all processes.

    All processes create it and call the same methods in the same order, from one thread at a time
    per process. With a single process nothing is sent.

        process 0: ex.on_first(save)          process 1: ex.on_first(save)     # gets 0's result
        process 0: ex.agree(None)             process 1: ex.agree("disk full")
        both return "process 1: disk full"
    """

    def __init__(self, timeout_s: float = TIMEOUT_S):
        """Create an exchange.

        Args:
            timeout_s: seconds that one process may keep the others waiting.
        """
        # jax.process_index() would create the devices, whose number may not be set yet.
        self._process = distributed.global_state.process_id
        self._num_processes = distributed.global_state.num_processes
        self._timeout_s = timeout_s
        self._name = f"taibai/exchange/{next(_numbers)}"
        self._round = 0
        self._told: list[str] = []  # keys that process 0 may delete once all have read them

    def gather(self, problem: str | None) -> str | None:
        """Return on process 0 the problems of all processes as one string; None if there are none.

        Args:
            problem: this process's problem in a few words, or None.

        Raises:
            TimeoutError: on process 0; names the processes that did not answer.
        """
        return self._problems(self._gather(problem))

    def on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on process 0 only, and return its result on all processes.

        Args:
            action: its result must be serializable as JSON.

        Raises:
            ValueError: on all processes, if `action` raised one.
            OSError: on all processes, if `action` raised one, or process 0 does not answer.
        """
        self._round += 1
        if self._process > 0:
            answer = json.loads(self._get(self._key(0), 2 * self._timeout_s, 0))
            if "problem" in answer:
                raise _ERRORS[answer["kind"]](answer["problem"])
            return answer["result"]
        # Sent if `action` raises anything other than an OSError or ValueError.
        answer: dict[str, Any] = {
            "problem": "process 0 failed (see its log)",
            "kind": "os",
        }
        try:
            result = action()
            answer = {"result": result}
            return result
        except (OSError, ValueError) as error:
            lasting = "value" if isinstance(error, ValueError) else "lasting"
            answer = {"problem": str(error), "kind": "os" if may_pass(error) else lasting}
            raise
        finally:
            if self._num_processes > 1:
                self._client.key_value_set(self._key(0), json.dumps(answer))
                self._told.append(self._key(0))

    def words(self, word: str | None) -> list[str | None]:
        """Return, on all processes, the words of all processes, in the order of their ids.

        Raises:
            OSError: on all processes, if one does not answer.
        """
        late = None
        words = []
        try:
            words = self._gather(word)
        except TimeoutError as error:
            late = error

        def tell() -> list[str | None]:
            if late is not None:
                raise late
            return words

        return self.on_first(tell)

    def agree(self, problem: str | None) -> str | None:
        """Return the problems of all processes on every process, or None if there are none.

        Raises:
            OSError: on all processes, if one does not answer.
        """
        return self._problems(self.words(problem))

    def on_all(self, action: Callable[[], T]) -> T:
        """Call `action` on every process, and return its result once all have succeeded.

        Raises:
            ValueError: `action` failed with a ValueError here, or failed elsewhere with errors for
                which a restart does not help; then the message names those processes.
            OSError: `action` failed with an OSError here, or failed elsewhere with an error that a
                restart may resolve.
        """
        try:
            result = action()
            failed = None
        except (ValueError, OSError) as error:
            result = None
            failed = error
        problem = self.agree(None if failed is None else sentence_of(failed))
        if problem is None:
            return cast(T, result)
        is_passing = self.agree("it may" if may_pass(failed) else None) is not None
        raise failed or (OSError if is_passing else ValueError)(problem)

    def _problems(self, words: list[str | None]) -> str | None:
        if self._num_processes == 1:
            return words[0]
        return "; ".join(f"process {i}: {text}" for i, text in enumerate(words) if text) or None

    def _gather(self, word: str | None) -> list[str | None]:
        """Return the words of all processes on process 0, and an empty list on the others."""
        self._round += 1
        if self._num_processes == 1:
            return [word]
        if self._process > 0:
            self._client.key_value_set(self._key(self._process), json.dumps(word))
            return []
        deadline = time.monotonic() + self._timeout_s
        answers = [self._answer(i, deadline) for i in range(1, self._num_processes)]
        for key in self._told:
            self._client.key_value_delete(key)
        self._told = []
        silent = [str(i) for i, answer in enumerate(answers, 1) if answer is _NO_ANSWER]
        if silent:
            raise TimeoutError(
                f"process(es) {', '.join(silent[:20])} did not answer in {self._timeout_s:.0f} s"
            )
        return [word, *answers]

    @property
    def _client(self) -> Any:
        return distributed.global_state.client

    def _key(self, process: int) -> str:
        return f"{self._name}/{self._round}/{process}"

    def _answer(self, process: int, deadline: float) -> str | None:
        key = self._key(process)
        try:
            answer = json.loads(self._get(key, max(deadline - time.monotonic(), 1), process))
        except TimeoutError:
            return _NO_ANSWER
        self._client.key_value_delete(key)
        return answer

    def _get(self, key: str, timeout_s: float, process: int) -> str:
        try:
            return self._client.blocking_key_value_get(key, int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"process {process} did not answer in time") from error
