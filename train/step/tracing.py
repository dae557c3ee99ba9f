"""Sets what a model's functions are traced for: devices, attention, the division of sequences."""

import contextlib
from collections.abc import Iterator

from models.layers.attention import use as use_attention
from sharding.hardware import Hardware
from sharding.hardware import use as use_hardware
from sharding.ops.sequence import WHOLE, SequenceSplit
from sharding.ops.sequence import use as use_sequence


@contextlib.contextmanager
def traced_for(
    hardware: Hardware, attention: str, sequence: SequenceSplit = WHOLE
) -> Iterator[None]:
    """Set what is traced for within the block.

    Args:
        hardware: devices to trace for.
        attention: setting `model.attention`, one of models.layers.attention.SETTINGS.
        sequence: how sequences are divided over the devices of `context`.
    """
    with use_hardware(hardware), use_attention(attention), use_sequence(sequence):
        yield
