"""The delayed maximum over processes, and the timer of saves."""

import time

import jax

from sharding.mesh import MeshConfig, make_mesh
from train.lifecycle.agreement import DelayedAllReduce, Timer


def test_delayed_all_reduce_returns_the_maximum_of_the_previous_call():
    all_reduce = DelayedAllReduce(make_mesh(MeshConfig(data=4, model=2), jax.devices()))
    assert all_reduce.max(1, 0) == (0, 0)
    assert all_reduce.max(False, 7) == (1, 0)
    assert all_reduce.answers.tolist() == [[1, 0]]  # of one process
    assert all_reduce.max(0, 0) == (0, 7)


def test_timer_is_due_after_its_minutes(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timer = Timer(0.5)
    now += 29
    assert not timer.is_due()
    now += 2
    assert timer.is_due()
    timer.restart()
    assert not timer.is_due() and not Timer(None).is_due()
