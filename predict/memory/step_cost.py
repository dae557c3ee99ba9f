"""The work of a step on one device: matrix products, host copies and collectives."""

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp

from predict.machines.machine import Machine

#: Share of the peak that matrix products of large models reach; see docs/benchmarks.md.
_REACHED = 0.5


@dataclasses.dataclass
class StepCost:
    """Work of one device in a step.

    Attributes:
        products: (FLOPs, bytes read and written) of a matrix product -> number of executions.
        host_bytes: bytes copied to or from host memory.
        network_bytes: bytes received through explicit collectives, which a `shard_map` contains.
    """

    products: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    host_bytes: int = 0
    network_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of all matrix products."""
        return sum(flops * times for (flops, _), times in self.products.items())

    def time_s(self, machine: Machine, dtype: Any) -> float:
        """Return the time of the work in seconds, without any overlap.

        A matrix product takes as long as its FLOPs or its memory traffic, whichever is longer.
        Element-wise operations and collectives that the compiler inserts are not counted. This is
        good enough to rank settings of a run before it is compiled, not to forecast.

        Args:
            dtype: dtype of the matrix products; types that the machine does not list count as
                float32.
        """
        name = {"bfloat16": "bf16", "float16": "f16"}.get(jnp.dtype(dtype).name, "f32")
        flops_per_s = _REACHED * machine.peak_flops_per_s(name)
        products_s = sum(
            times * max(flops / flops_per_s, num_bytes / machine.memory_bytes_per_s)
            for (flops, num_bytes), times in self.products.items()
        )
        moved_s = self.host_bytes / machine.host_bytes_per_s
        return products_s + moved_s + self.network_bytes / machine.link_bytes_per_s

    def add(self, other: "StepCost", times: int = 1) -> None:
        """Add `times` times the work of `other`."""
        for product, count in other.products.items():
            self.products[product] += count * times
        self.host_bytes += times * other.host_bytes
        self.network_bytes += times * other.network_bytes
