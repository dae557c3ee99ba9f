"""Sets the devices and the attention kernel that a model's functions are traced for."""

import contextlib
from collections.abc import Iterator

from models.layers import attention
from sharding import hardware
from sharding.hardware import Hardware


@contextlib.contextmanager
def traced_for(device: Hardware, kernel: str) -> Iterator[None]:
    """Set the devices and the attention kernel for tracing within the block.

    Args:
        device: the devices to trace for.
        kernel: `model.attention` of the config, one of models.layers.attention.CHOICES.
    """
    with hardware.use(device), attention.use(kernel):
        yield
