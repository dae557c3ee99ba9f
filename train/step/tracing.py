"""Sets the devices and the attention setting that a model's functions are traced for."""

import contextlib
from collections.abc import Iterator

from models.layers.attention import use as use_attention
from sharding.hardware import Hardware
from sharding.hardware import use as use_hardware


@contextlib.contextmanager
def traced_for(hardware: Hardware, attention: str) -> Iterator[None]:
    """Set the devices and the attention setting for tracing within the block.

    Args:
        hardware: devices to trace for.
        attention: setting `model.attention`, one of models.layers.attention.SETTINGS.
    """
    with use_hardware(hardware), use_attention(attention):
        yield
