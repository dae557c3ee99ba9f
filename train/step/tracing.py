"""Which devices, and which attention kernel, a model's functions are traced for."""

import contextlib
from collections.abc import Iterator

from models.layers import attention
from sharding import hardware
from sharding.hardware import Hardware


@contextlib.contextmanager
def traced_for(device: Hardware, kernel: str) -> Iterator[None]:
    """Traces a model's functions within the block for devices of one kind.

    Args:
        kernel: `model.attention` of the config, one of models.layers.attention.CHOICES.
    """
    with hardware.use(device), attention.use(kernel):
        yield
