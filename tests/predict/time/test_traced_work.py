"""The time of the work that a trace shows."""

import pytest

from predict.machines.datasheets import datasheet_machine
from predict.memory.step_cost import StepCost
from predict.time.traced_work import traced_work_s


def test_step_time_adds_transfers_to_the_slower_of_compute_and_memory():
    machine = datasheet_machine("NVIDIA H100 80GB HBM3", 8)
    work = StepCost(host_bytes=int(0.8 * 63e9), network_bytes=int(0.75 * 450e6))
    assert traced_work_s(work, machine, "bfloat16") == pytest.approx(1 + 1e-3)
    work.products[int(0.7 * 989.5e12), 1] = 2
    work.products[1, int(0.9 * 3.35e12)] = 3
    assert traced_work_s(work, machine, "bfloat16") == pytest.approx(6 + 1e-3)
