"""Messages between processes, with threads for processes and a dict for jax's key-value service."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from distributed.messages import Exchange


class Service:
    """The part of jax's key-value service that an exchange uses."""

    def __init__(self):
        self.words = {}
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            self.words[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key):
        self.words.pop(key, None)

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.words, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.words[key]


def converse(service, num_processes, talk, timeout_s=20.0):
    """Return the result or the exception of `talk(exchange, process)` for every process."""

    class Of(Exchange):
        _client = service

        def __init__(self, process):
            super().__init__(timeout_s)
            self._process = process
            self._num_processes = num_processes
            self._name = "test"

    def answer(process):
        try:
            return talk(Of(process), process)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(answer, range(num_processes)))


def test_all_processes_receive_the_first_ones_message_and_every_error():
    def talk(exchange, process):
        first = exchange.on_first(lambda: {"step": 7, "by": process})
        return first, exchange.agree(f"no {process}" if process else None), exchange.agree(None)

    wrong = "process 1: no 1; process 2: no 2"
    assert converse(Service(), 3, talk) == [({"step": 7, "by": 0}, wrong, None)] * 3


@pytest.mark.thorough
def test_a_process_that_does_not_answer_is_no_answer_of_its_own():
    """All processes fail with a timeout, which says nothing about data and may not recur."""

    def talk(exchange, process):
        if process == 1:
            time.sleep(3)
        return exchange.agree(None)

    answers = converse(Service(), 3, talk, timeout_s=1.0)
    for error in (answers[0], answers[2]):
        assert isinstance(error, OSError)
        assert "process(es) 1 did not answer in 1 s" in str(error)


@pytest.mark.parametrize(
    ("raised", "others"), [(FileNotFoundError, ValueError), (TimeoutError, OSError)]
)
def test_all_processes_raise_the_error_of_one(raised, others):
    def talk(exchange, process):
        def action():
            if process == 1:
                raise raised("no text")
            return process

        return exchange.on_all(lambda: process), exchange.on_all(action)

    answers = converse(Service(), 3, talk)
    assert [type(answer) for answer in answers] == [others, raised, others]
    assert str(answers[0]) == str(answers[2]) == "process 1: no text"


def test_an_error_of_the_first_is_one_of_all():
    def talk(exchange, process):
        def action():
            raise PermissionError("read-only")

        exchange.on_first(action)

    answers = converse(Service(), 2, talk)
    assert all(isinstance(a, OSError) and "read-only" in str(a) for a in answers)


def test_little_is_left_behind():
    """Process 0 deletes messages that all have read, so a long run does not fill the service."""
    service = Service()

    def talk(exchange, process):
        for _ in range(50):
            exchange.agree(None)

    converse(service, 3, talk)
    assert len(service.words) <= 3
