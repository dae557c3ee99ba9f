"""Words between the processes of a run that do not go over the devices.

They go through the service that `jax.distributed` started, so a thread may exchange them while the
devices compute. A collective there would meet the training step's own, in an order that no two
processes agree on.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed

#: A process that says nothing for so long counts as failed.
TIMEOUT_S = 1200.0

_NO_ANSWER = "no answer"

T = TypeVar("T")

_numbers = itertools.count()


def may_pass(error: Exception | None) -> bool:
    """Returns whether another start may do better: a file system or another process failed."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


class Exchange:
    """A conversation of all processes.

    All of them open it, and call the same methods in the same order; of one process, one thread at
    a time. With one process nothing is sent.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S):
        """Opens it; `timeout_s` is how long one process may keep the others waiting."""
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        self._timeout_s = timeout_s
        self._name = f"taibai/exchange/{next(_numbers)}"
        self._round = 0
        self._told: list[str] = []  # what the first process may delete once all have read it

    def gather(self, problem: str | None) -> str | None:
        """Returns, on the first process, what is wrong on any of them, or None if nothing is.

        Args:
          problem: what is wrong here, in a few words, or None.

        Raises:
          TimeoutError: on the first process, which names those that did not answer.
        """
        return self._problems(self._gather(problem))

    def on_first(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns on the first process, which alone calls it.

        Args:
          action: what it returns must be known to JSON.

        Raises:
          OSError: on all of them, if `action` failed, or if the first process does not answer.
        """
        self._round += 1
        if self._process > 0:
            told = json.loads(self._get(self._key(0), 2 * self._timeout_s, 0))
            if "problem" in told:
                raise OSError(told["problem"])
            return told["result"]
        told: dict[str, Any] = {"problem": "process 0 failed (its log says how)"}
        try:
            result = action()
            told = {"result": result}
            return result
        except OSError as error:
            told = {"problem": str(error)}
            raise
        finally:
            if self._num_processes > 1:
                self._client.key_value_set(self._key(0), json.dumps(told))
                self._told.append(self._key(0))

    def words(self, word: str | None) -> list[str | None]:
        """Returns, on all processes, the words of all of them, in their order.

        Raises:
          OSError: on all of them, if one does not answer.
        """
        late, words = None, []
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
        """Returns, on all processes, what is wrong on any of them, or None if nothing is.

        Raises:
          OSError: on all of them, if one does not answer.
        """
        return self._problems(self.words(problem))

    def on_all(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns here, once every process has done its own.

        Raises:
          ValueError, OSError: where `action` failed with one; where it did not but elsewhere, one
            that names those processes and may pass if one of theirs may.
        """
        try:
            result, failed = action(), None
        except (ValueError, OSError) as error:
            result, failed = None, error
        problem = self.agree(None if failed is None else str(failed))
        if problem is None:
            return cast(T, result)
        is_passing = self.agree("it may" if may_pass(failed) else None) is not None
        raise failed or (OSError if is_passing else ValueError)(problem)

    def _problems(self, words: list[str | None]) -> str | None:
        if self._num_processes == 1:
            return words[0]
        return "; ".join(f"process {i}: {text}" for i, text in enumerate(words) if text) or None

    def _gather(self, word: str | None) -> list[str | None]:
        """Returns, on the first process, the words of all; on the others nothing."""
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
