"""Throughput of a run: times of steps and hosts, tokens or images per second, and MFU."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def mfu(flops_per_s: float, num_devices: int, peak_flops_per_s: float | None) -> float | None:
    """Return the model FLOPs utilization, from 0 to 1; None if the peak is unknown.

    Args:
        flops_per_s: model's FLOP/s over all devices, without recomputation.

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    return None if peak_flops_per_s is None else flops_per_s / (num_devices * peak_flops_per_s)


class ThroughputMeter:
    """Measures step time and tokens or images per second between logged steps.

    The first step, which includes warm-up, and time within `paused()` are excluded from all rates.

    Args:
        units_per_step: tokens or images per global batch.
        unit: "token" or "image".

    Attributes:
        units_per_step: tokens or images of the steps that are counted from now on.
    """

    def __init__(self, units_per_step: int, unit: str = "token"):
        self.units_per_step = units_per_step
        self._name = f"{unit}s_per_s"
        self._result: Any = None
        self._first_step_time_s: float | None = None
        self._start_lap()

    def step(self, result: Any) -> None:
        """Count a step.

        Args:
            result: array that the step computes. After the first step, this waits for it.
        """
        self._result = result
        if self._first_step_time_s is None:
            jax.block_until_ready(result)
            self._first_step_time_s = time.perf_counter() - self._start_s - self._paused_s
            self._start_lap()
        else:
            self._num_steps += 1
            self._num_units += self.units_per_step

    def lap(self) -> dict[str, float | None]:
        """Wait for the steps so far and return the rates since the previous lap.

        Returns:
            `step_time_s`, `data_wait_s` (the part of `step_time_s` spent in `waiting()`), and
            `tokens_per_s` or `images_per_s`. If the lap contains only the first step, `step_time_s`
            is its time with warm-up, and the others are None.
        """
        jax.block_until_ready(self._result)
        if self._num_steps == 0:
            return {
                "step_time_s": self._first_step_time_s,
                "data_wait_s": None,
                self._name: None,
            }
        lap_s = time.perf_counter() - self._start_s - self._paused_s
        step_time_s = lap_s / self._num_steps
        units_per_s = self._num_units / lap_s
        data_wait_s = self._waited_s / self._num_steps
        self._start_lap()
        return {
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
            self._name: units_per_s,
        }

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block, such as an evaluation or a save, from the lap."""
        jax.block_until_ready(self._result)
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start_s

    def _start_lap(self) -> None:
        self._num_steps = 0
        self._num_units = 0
        self._paused_s = self._waited_s = 0.0
        self._start_s = time.perf_counter()


class HostTimes:
    """Compares how long the processes themselves need for a step, to find the slowest.

    The step time is the same on all processes, because they wait for each other in every step. The
    host time is the part before that: reading and placing the batch, and starting the step.

    Attributes:
        microseconds: host time of the step that was timed last; 0 once it was exchanged.
    """

    def __init__(self):
        self._start_s = 0.0
        self.microseconds = 0
        self._rows: list[np.ndarray] = []

    def begin_step(self) -> None:
        """Start the time of a step."""
        self._start_s = time.perf_counter()

    def end_step(self) -> None:
        """Stop the time of a step, before this process waits for others."""
        self.microseconds = min(round(1e6 * (time.perf_counter() - self._start_s)), 2**31 - 1)

    def add(self, times_us: np.ndarray) -> None:
        """Add the host times of all processes, int32[processes]; ignores those without a step."""
        self.microseconds = 0
        if len(times_us) > 1 and times_us.any():
            self._rows.append(times_us)

    def lap(self) -> dict[str, float]:
        """Return the host times per step since the previous lap; empty with a single process.

        Returns:
            `host_time_max_s` and `host_time_mean_s`, over processes, and `slowest_process`. They
            lag behind by a step, because no process waits for the others' times.
        """
        if not self._rows:
            return {}
        times_s = np.mean(self._rows, axis=0) / 1e6
        self._rows = []
        return {
            "host_time_max_s": float(times_s.max()),
            "host_time_mean_s": float(times_s.mean()),
            "slowest_process": int(times_s.argmax()),
        }
