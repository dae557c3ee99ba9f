"""Sets the devices and the attention kernel that a model's functions are traced for."""

import contextlib
from collections.abc import Iterator

from models.layers import attention
from sharding.hardware import Hardware
from sharding.hardware import use as use_hardware


@contextlib.contextmanager
def traced_for(hardware: Hardware, kernel: str) -> Iterator[None]:
    """Set the devices and the attention kernel for tracing within the block.

    Args:
        hardware: the devices to trace for.
        kernel: `model.attention` of the config, one of models.layers.attention.CHOICES.
    """
    with use_hardware(hardware), attention.use(kernel):
        yield
