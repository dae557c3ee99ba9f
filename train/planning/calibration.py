"""Measures the rates of the devices that are present, for the plans of `mesh.auto`.

    python -m train.plan --calibrate

The rates are stored in the cache directory, and used by later runs on as many devices of the same
kind. All devices are busy during every measurement, because simulated devices share their cores.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from predict.machines.machine import MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, Machine
from predict.time.transfer import LINK_EFFICIENCY
from untrusted.documents import read_json
from untrusted.files import make_private_directory, write_text
from untrusted.schema import check_fields

_FILE = "machine.json"
_REPEATS = 5
#: Sizes of the measured arrays on a device: width of a product, numbers that are streamed through
#: memory, numbers that are reduced.
_WIDTH = {"cpu": 512, "gpu": 8192}
_STREAMED = {"cpu": 2**23, "gpu": 2**27}
_REDUCED = {"cpu": 2**19, "gpu": 2**26}
_CHAIN = 50
#: Turns in which two chains are compared whose times differ by little.
_TURNS = 21
#: Numbers in an array that the C library does not keep when it is freed.
_ALLOCATED = 2**24
#: Width of the products between collectives whose latency is measured. Simulated devices take turns
#: on the cores, so that a collective waits longer if there is work before it.
_WIDTH_BEFORE = {"cpu": 256, "gpu": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured rates of one device while all are busy.

    Attributes:
        device_kind: as in jax.Device.device_kind.
        num_devices: number of devices.
        flops_per_s: FLOP/s of float32 products on one device.
        memory_bytes_per_s: bytes per second that a device reads and writes in large arrays.
        link_bytes_per_s: bytes per second that a device sends in an all-reduce of a large array.
        kernel_s: time of a small operation in a chain of such operations.
        collective_latency_s: time of an all-reduce of one number after a product.
        allocation_s_per_byte: seconds for each byte of a large array that is allocated; 0 on GPUs.
    """

    device_kind: str
    num_devices: int
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    kernel_s: float
    collective_latency_s: float
    allocation_s_per_byte: float

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name == "allocation_s_per_byte" else sys.float_info.min
            if isinstance(value, float | int) and not least <= value < math.inf:
                raise ValueError(f"{_FILE}: {name}={value} must be positive; calibrate again")

    def applied(self, machine: Machine) -> Machine:
        """Return a machine with these rates. Products of other types scale as float32's do."""
        factor = self.flops_per_s / MATMUL_EFFICIENCY / machine.peak_flops_per_s("f32")
        return dataclasses.replace(
            machine,
            flops_per_s={dtype: factor * rate for dtype, rate in machine.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s / MEMORY_EFFICIENCY,
            link_bytes_per_s=self.link_bytes_per_s / LINK_EFFICIENCY,
            kernel_s=self.kernel_s,
            collective_latency_s=self.collective_latency_s,
            allocation_s_per_byte=self.allocation_s_per_byte,
        )


def use_calibration(machine: Machine, devices: Sequence[Any], directory: Path) -> Machine:
    """Return a machine with the rates that were measured on its devices, if they were.

    Args:
        machine: rates otherwise.
        directory: cache directory.

    Raises:
        ValueError: the stored rates are damaged.
    """
    path = directory / _FILE
    if not path.exists():
        return machine
    values = read_json(path)
    kinds = {each.name: each.type for each in dataclasses.fields(Calibration)}
    check_fields(values, kinds, f"{path} (delete it, or calibrate again)")
    calibration = Calibration(**{name: values[name] for name in kinds})
    is_same = (calibration.device_kind, calibration.num_devices) == (
        devices[0].device_kind,
        len(devices),
    )
    return calibration.applied(machine) if is_same else machine


def calibrate(devices: Sequence[Any], directory: Path) -> Calibration:
    """Measure devices of this process, and store their rates in the cache directory.

    Args:
        directory: cache directory; it is created.
    """
    calibration = measure(devices)
    make_private_directory(directory)
    write_text(directory / _FILE, json.dumps(dataclasses.asdict(calibration), indent=2) + "\n")
    return calibration


def measure(devices: Sequence[Any]) -> Calibration:
    """Measure the rates of devices of this process, all of them at once."""
    mesh = Mesh(np.array(devices), ("all",))
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    width = _WIDTH[platform]
    streamed = _STREAMED[platform]
    reduced = _REDUCED[platform]
    product_s = _chain_s(mesh, _product, (width, width))
    stream_s = _chain_s(mesh, _stream, (streamed,))
    kernel_s = _chain_s(mesh, _product, (2, 2))
    latency_s = 0.0
    reduce_s = 0.0
    if len(devices) > 1:
        before = (_WIDTH_BEFORE[platform], _WIDTH_BEFORE[platform])
        latency_s = _added_s(mesh, _product_and_mean, _product, before)
        reduce_s = _chain_s(mesh, _mean_of_all, (reduced,)) - latency_s
    sent = 2 * (1 - 1 / len(devices)) * 4 * reduced
    memory_bytes_per_s = 8 * streamed / stream_s
    return Calibration(
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        flops_per_s=2 * width**3 / product_s,
        memory_bytes_per_s=memory_bytes_per_s,
        link_bytes_per_s=sent / reduce_s if reduce_s > 0 else memory_bytes_per_s,
        kernel_s=kernel_s,
        collective_latency_s=max(latency_s, kernel_s),
        allocation_s_per_byte=_allocation_s(mesh) / (4 * _ALLOCATED) if platform == "cpu" else 0.0,
    )


def _product(x: jax.Array) -> jax.Array:
    """Multiply a square matrix of ones by itself, and scale the result to ones again."""
    return x @ x / x.shape[0]


def _stream(x: jax.Array) -> jax.Array:
    """Read and write an array once; the barrier keeps XLA from merging repetitions."""
    return jax.lax.optimization_barrier(x * 0.999)


def _product_and_mean(x: jax.Array) -> jax.Array:
    """Multiply as `_product` does, and replace one element by its mean over all devices."""
    x = _product(x)
    return x.at[0, 0].set(jax.lax.pmean(x[0, 0], "all"))


def _mean_of_all(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, "all")


def _chain_s(mesh: Mesh, function: Callable, shape: tuple[int, ...]) -> float:
    """Return the least time of a function on an array of every device, called in a chain.

    Args:
        mesh: devices.
        function: maps a float32 array on one device to one of the same shape.
        shape: shape of the array on one device.
    """
    call = _chain(mesh, function, shape)
    return min(_seconds(call) for _ in range(_REPEATS)) / _CHAIN


def _added_s(mesh: Mesh, long: Callable, short: Callable, shape: tuple[int, ...]) -> float:
    """Return how much longer one function takes than another in a chain, as a median of turns."""
    calls = _chain(mesh, long, shape), _chain(mesh, short, shape)
    turns = [[_seconds(call) for call in calls] for _ in range(_TURNS)]
    return statistics.median(more - less for more, less in turns) / _CHAIN


def _chain(mesh: Mesh, function: Callable, shape: tuple[int, ...]) -> Callable[[], jax.Array]:
    """Compile a chain of calls, and return a function that runs it; arguments as in `_chain_s`."""
    spec = PartitionSpec("all")

    def repeated(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _CHAIN, lambda _, x: function(x), x[0])[None]

    program = jax.jit(
        jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    x = jax.device_put(jnp.ones((mesh.size, *shape), jnp.float32), NamedSharding(mesh, spec))
    call = functools.partial(program, x)
    jax.block_until_ready(call())
    return call


def _seconds(call: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _allocation_s(mesh: Mesh) -> float:
    """Return how much longer a function takes if it allocates a large array for its result.

    Otherwise the result takes the place of the argument. Large arrays go back to the system when
    they are freed, which clears the memory before it gives it out again.
    """
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    seconds = []
    for donated in ((0,), ()):
        program = jax.jit(_stream, donate_argnums=donated, out_shardings=sharding)
        x = jax.device_put(jnp.ones((mesh.size, _ALLOCATED), jnp.float32), sharding)
        times = []
        for _ in range(1 + _REPEATS):  # the first call compiles
            start = time.perf_counter()
            x = jax.block_until_ready(program(x))
            times.append(time.perf_counter() - start)
        seconds.append(min(times[1:]))
    return max(0.0, seconds[1] - seconds[0])
