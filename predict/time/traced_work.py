"""The time of a step that is only traced, from the work that its trace shows.

This ranks settings of a run before anything is compiled. prediction.py has the time of a compiled
step, with all of its kernels and collectives and what overlaps.
"""

from typing import Any

import jax.numpy as jnp

from predict.machines.machine import Machine
from predict.memory.step_cost import StepCost
from predict.time.transfer import LINK_EFFICIENCY


def traced_work_s(work: StepCost, machine: Machine, dtype: Any) -> float:
    """Return the time of the work in seconds, without any overlap.

    Element-wise operations and collectives that the compiler inserts are not counted. This is good
    enough to rank settings of a run, not to forecast.

    Args:
        work: work of one device.
        machine: its rates.
        dtype: dtype of the matrix products; types that the machine does not list count as float32.
    """
    name = {"bfloat16": "bf16", "float16": "f16"}.get(jnp.dtype(dtype).name, "f32")
    products_s = sum(
        times * machine.product_s(name, flops, num_bytes)
        for (flops, num_bytes), times in work.products.items()
    )
    links_s = work.network_bytes / (LINK_EFFICIENCY * machine.link_bytes_per_s)
    return products_s + machine.host_copy_s(work.host_bytes) + links_s
