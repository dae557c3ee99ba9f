"""The time of a step that is only traced, from the work that its trace shows.

This ranks settings of a run before anything is compiled. prediction.py has the time of a compiled
step, with all of its kernels and collectives and what overlaps.
"""

from typing import Any

import jax.numpy as jnp

from predict.machines.machine import Machine
from predict.memory.step_cost import StepCost

#: Share of the peak that matrix products of large models reach; see docs/benchmarks.md.
_REACHED = 0.5


def traced_work_s(work: StepCost, machine: Machine, dtype: Any) -> float:
    """Return the time of the work in seconds, without any overlap.

    A matrix product takes as long as its FLOPs or its memory traffic, whichever is longer.
    Element-wise operations and collectives that the compiler inserts are not counted. This is good
    enough to rank settings of a run, not to forecast.

    Args:
        work: work of one device.
        machine: its rates.
        dtype: dtype of the matrix products; types that the machine does not list count as float32.
    """
    name = {"bfloat16": "bf16", "float16": "f16"}.get(jnp.dtype(dtype).name, "f32")
    flops_per_s = _REACHED * machine.peak_flops_per_s(name)
    products_s = sum(
        times * max(flops / flops_per_s, num_bytes / machine.memory_bytes_per_s)
        for (flops, num_bytes), times in work.products.items()
    )
    moved_s = work.host_bytes / machine.host_bytes_per_s
    return products_s + moved_s + work.network_bytes / machine.link_bytes_per_s
