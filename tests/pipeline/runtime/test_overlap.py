"""Overlap within an iteration of the loop over ticks: each send hides behind work."""

import pytest

from tests.pipeline.runtime.test_executor import compiled
from tests.predict.program.loop_tasks import Task, tasks_of_loop


def tasks_of(schedule: str, remat: str) -> tuple[Task, Task, dict[str, Task]]:
    """Return (the send of outputs, the send of cotangents, name -> other tasks)."""
    step, mesh = compiled(schedule, 8, {"pipeline": 4}, remat)
    tasks = tasks_of_loop(step, mesh)
    sends = {task.pairs: task for task in tasks if task.pairs}
    works = {task.name: task for task in tasks if not task.pairs}
    assert len(sends) == 2
    return sends[(0, 1), (1, 2), (2, 3)], sends[(1, 0), (2, 1), (3, 2)], works


@pytest.mark.thorough(but=["none"])
@pytest.mark.parametrize("remat", ["stage", "none"])
def test_sends_hide_behind_the_backward_and_the_next_forward(remat):
    y_send, dx_send, works = tasks_of("1f1b", remat)
    # The output of the last forward is sent at once. B does not wait for it, the next F does.
    assert not y_send.needs
    (backward,) = dx_send.needs
    assert not works[backward].needs
    (forward,) = works.keys() - {backward}
    assert y_send.name in works[forward].needs
    # The cotangent is sent after B, and F does not wait for it.
    assert dx_send.name not in works[forward].needs


@pytest.mark.thorough(but=["none"])
@pytest.mark.parametrize("remat", ["stage", "none"])
def test_sends_of_split_backwards_hide_behind_the_work_of_their_tick(remat):
    y_send, dx_send, works = tasks_of("zero_bubble", remat)
    sent = {y_send.name, dx_send.name}
    assert len(works) == 3  # F, I and W
    # No operation of the tick waits for its arrivals, and neither send waits for the other.
    assert not any(task.needs & sent for task in (y_send, dx_send, *works.values()))
    # The output's send waits only for F, so I and W can hide it.
    (forward,) = y_send.needs
    # Without recomputation, I may belong to the microbatch that has just run forward.
    (backward,) = dx_send.needs - {forward}
    assert works[backward].needs <= {forward}
    assert (forward in dx_send.needs) == (remat == "none")
    # W runs last, and neither send waits for it, so it can hide both.
    (last,) = works.keys() - {forward, backward}
    assert backward in works[last].needs
