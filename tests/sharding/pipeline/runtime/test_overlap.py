"""Overlap within a tick: sends hide behind the operations that follow them."""

import pytest

from sharding.analysis.loop_tasks import tasks_of_loop
from tests.sharding.pipeline.runtime.test_executor import compiled


@pytest.mark.thorough(but=["1f1b-2-none"])
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("schedule, num_works", [("1f1b", 2), ("zero_bubble", 3)])
def test_no_send_of_a_tick_waits_for_later_work_nor_later_work_for_a_send(
    schedule, num_works, remat
):
    step, mesh = compiled(schedule, 8, {"pipeline": 4}, remat)
    tasks = tasks_of_loop(step, mesh)
    sends = {task.pairs: task for task in tasks if task.pairs}
    works = {task.name: task for task in tasks if not task.pairs}
    forward = sends[(0, 1), (1, 2), (2, 3)]
    backward = sends[(1, 0), (2, 1), (3, 2)]
    assert len(sends) == 2 and len(works) == num_works  # F and B, or F, I and W
    sent = {forward.name, backward.name}

    # No operation of the tick waits for its arrivals, and neither send waits for the other.
    assert not any(task.needs & sent for task in tasks)
    # The forward's send waits only for the forward, so B (or I) and W can hide it.
    (own,) = forward.needs
    # Without recomputation, the backward may belong to the microbatch that has just run forward.
    (backward_work,) = backward.needs - {own}
    assert works[backward_work].needs <= {own}
    assert (own in backward.needs) == (remat == "none")
    # The weight gradient runs last, and neither send waits for it, so it can hide both.
    late = works.keys() - {own, backward_work}
    assert len(late) == num_works - 2
    assert all(backward_work in works[name].needs for name in late)
