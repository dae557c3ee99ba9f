"""The work of a step on one device: matrix products, host copies and collectives."""

import collections
import dataclasses


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

    def add(self, other: "StepCost", times: int = 1) -> None:
        """Add `times` times the work of `other`."""
        for product, count in other.products.items():
            self.products[product] += count * times
        self.host_bytes += times * other.host_bytes
        self.network_bytes += times * other.network_bytes
