"""Chooses how the sequences of a run are divided over the devices of the mesh axis `context`."""

import math

import jax
import numpy as np
from flax import nnx

from data.shapes import token_arrays
from models.functions import cannot_split_sequence
from models.layers.attention import AttentionCall
from predict.machines.datasheets import datasheet_machine
from sharding.ops.heads import heads_on_one_device
from sharding.ops.sequence import WHOLE, SequenceSplit
from sharding.rules import Rules
from train.config.schema import RunConfig
from train.run.model_traces import ModelTraces

#: Share of a GPU's peak in bfloat16 that attention reaches, about, with cuDNN's kernels.
_ATTENTION_EFFICIENCY = 0.5
_BFLOAT16_BYTES = 2


def choose_sequence_split(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    model: nnx.Module,
    traces: ModelTraces,
    rules: Rules,
) -> SequenceSplit:
    """Return how sequences are divided over `context`.

    Raises:
        ValueError: the model cannot split its sequences, their lengths or heads cannot be divided,
            or `mesh.ulysses` does not fit.
    """
    num_devices = mesh.shape["context"]
    if num_devices == 1:
        return WHOLE
    if name := cannot_split_sequence(model):
        raise ValueError(
            f"mesh.context={num_devices} splits sequences, but {name} does not declare that it "
            "works on a part of them (can_split_sequence = True; see models/stack.py); set "
            "mesh.context=1, and use mesh.data or mesh.fsdp for more devices"
        )
    calls = traces.attention_calls
    group_size = _group_size(config, mesh, calls, traces, rules)
    split = SequenceSplit(
        num_devices=num_devices,
        ring_size=num_devices // group_size,
        is_zigzag=any(call.is_causal for call in calls),
        arrays=token_arrays(config.data),
    )
    for length in sorted(traces.row_lengths):
        if length % split.num_parts:
            raise ValueError(_wrong_length(config, split, model, length))
    return split


def _group_size(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    calls: tuple[AttentionCall, ...],
    traces: ModelTraces,
    rules: Rules,
) -> int:
    """Return how many neighbouring devices exchange tokens for heads."""
    num_devices = mesh.shape["context"]
    axes = [axis for axis in rules["heads"] if mesh.shape[axis] > 1]
    kv_heads = [
        heads_on_one_device(call.num_heads, call.num_kv_heads, axes, mesh)[1] for call in calls
    ]
    common = math.gcd(num_devices, *kv_heads)
    possible = [size for size in range(1, common + 1) if common % size == 0]
    wanted = config.mesh.ulysses
    if wanted:
        if wanted not in possible:
            raise ValueError(
                f"mesh.ulysses={wanted} must divide mesh.context={num_devices} and the key-value "
                f"heads of a device ({', '.join(map(str, sorted(set(kv_heads))))}); choose "
                f"{' or '.join(map(str, possible))}, or 0 to let the program choose"
            )
        return wanted
    # The fewest devices for which the keys of a ring arrive in time: an exchange of heads sends
    # less, but nothing hides it.
    length = min(traces.row_lengths, default=1)
    shares = [call.num_kv_heads / call.num_heads for call in calls]
    needed = _hiding_tokens(mesh) * max(shares, default=1.0)
    for size in possible:
        if length * size // num_devices >= needed:
            return size
    return possible[-1]


def _hiding_tokens(mesh: jax.sharding.Mesh) -> float:
    """Return the fewest tokens of a device during whose attention the next keys arrive.

    With as many key-value heads as heads, a hop sends 2·N·H·t numbers for the t tokens of a device,
    and half of its products are behind the causal mask: 2·N·H·t² operations are left. A ring that
    spans hosts waits for their network. Devices without a datasheet count as an A100.
    """
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    hosts = np.moveaxis(hosts, mesh.axis_names.index("context"), 0)
    machine = datasheet_machine(mesh.devices.flat[0].device_kind, per_host=mesh.size)
    is_on_one_host = bool((hosts == hosts[0]).all())
    bytes_per_s = machine.link_bytes_per_s if is_on_one_host else machine.network_bytes_per_s
    flops_per_s = _ATTENTION_EFFICIENCY * machine.peak_flops_per_s("bf16")
    return _BFLOAT16_BYTES * flops_per_s / bytes_per_s


def _wrong_length(config: RunConfig, split: SequenceSplit, model: nnx.Module, length: int) -> str:
    """Return the error about a sequence that cannot be divided."""
    parts = split.num_parts
    chunks = f", two chunks for each of {split.ring_size} in a ring" if split.num_chunks > 1 else ""
    remedy = f"choose {' or '.join(map(str, _multiples_near(length, parts)))} tokens"
    if config.data.reads_images:
        model_config = getattr(model, "config", None)
        sizes = _image_sizes(
            config.images.size,
            getattr(model_config, "patch_size", 0),
            getattr(model_config, "num_first_tokens", 1),
            parts,
        )
        remedy = f"choose {' or '.join(sizes)}" if sizes else "no size of images has one"
    return (
        f"mesh.context={split.num_devices} splits sequences into {parts} equal parts{chunks}, but "
        f"{type(model).__name__} has one of {length} tokens; {remedy}, or set another mesh.context"
    )


def _multiples_near(number: int, factor: int) -> list[int]:
    """Return the largest multiple below a number, unless it is 0, and the smallest one above."""
    below = number // factor * factor
    return [n for n in (below, below + factor) if n]


def _image_sizes(size: int, patch_size: int, num_first: int, parts: int) -> list[str]:
    """Return the nearest sizes of images whose patches and first tokens can be divided."""
    if not patch_size:
        return []
    side = size // patch_size
    fitting = [n for n in range(1, side + 2 * parts) if (num_first + n * n) % parts == 0]
    nearest = [*[n for n in fitting if n < side][-1:], *[n for n in fitting if n > side][:1]]
    return [f"images.size={n * patch_size}" for n in nearest]
