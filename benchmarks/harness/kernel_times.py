"""Reads the times of a real GPU's kernels from jax's profiler.

    with profiled(directory) as read:
        for _ in range(num_steps):
            step()
    kernels = read(num_steps)

Most kernels run in CUDA graphs, where the profiler names the graph instead of an instruction.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All executions of one instruction of the compiled step by one kernel.

    Attributes:
        kernel: name of the kernel.
        instruction: name of the instruction; empty if the profiler does not know it.
        count: executions per step.
        seconds: their total time per step.
    """

    kernel: str
    instruction: str
    count: float
    seconds: float


@contextlib.contextmanager
def profiled(directory: Path) -> Iterator[Callable[[int], list[KernelTime]]]:
    """Profile a block of steps, and return a function that reads its kernels.

    Args:
        directory: profiler's files are written here.

    Yields:
        A function: number of steps in the block -> kernels of the first GPU, the longest first.
        Call it after the block.
    """

    def read(num_steps: int) -> list[KernelTime]:
        files = sorted(directory.glob("**/*.xplane.pb"))
        return _kernels(jax.profiler.ProfileData.from_file(str(files[-1])), num_steps)

    with jax.profiler.trace(str(directory)):
        yield read


def _kernels(profile: Any, num_steps: int) -> list[KernelTime]:
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    counts: dict[tuple[str, str], int] = collections.defaultdict(int)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # other lines show the same kernels again
                continue
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                key = (event.name, str(stats.get("hlo_op", "")))
                seconds[key] += event.duration_ns / 1e9
                counts[key] += 1
    kernel_times = [
        KernelTime(
            kernel=kernel,
            instruction=instruction,
            count=counts[kernel, instruction] / num_steps,
            seconds=total / num_steps,
        )
        for (kernel, instruction), total in seconds.items()
    ]
    return sorted(kernel_times, key=lambda kernel: -kernel.seconds)
