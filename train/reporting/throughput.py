"""Throughput of a run: step time, tokens or images per second, model FLOPs utilization (MFU)."""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Pattern of device_kind -> peak dense TFLOP/s in (bfloat16, float16, float32, float8); None if the
# vendor states none. The first pattern that matches counts, so variants of a chip come before the
# chip.
_PEAK_TFLOPS_PER_S: dict[str, tuple[float | None, ...]] = {
    r"\bMIG\b": (None, None, None, None),  # a slice of a chip
    r"\bV100-PCIE\b": (None, 112.0, 14.0, None),
    r"\bV100\b": (None, 125.0, 15.7, None),
    r"\bA100\b": (312.0, 312.0, 156.0, None),
    r"\bH100 PCIe\b": (756.0, 756.0, 378.0, 1513.0),
    r"\bH[12]00 NVL\b": (835.5, 835.5, 417.5, 1671.0),
    r"\bG?H[12]00\b": (989.5, 989.5, 494.5, 1979.0),
    r"\bB200\b": (2250.0, 2250.0, 1125.0, 4500.0),
    r"\bL4\b": (121.0, 121.0, 60.5, 242.5),
    r"\bL40S\b": (362.0, 362.0, 183.0, 733.0),
    r"\bRTX 4090$": (165.2, 165.2, 82.6, 330.3),
    r"\bMI300X\b": (1307.4, 1307.4, 653.7, 2614.9),
    r"^TPU v4$": (275.0, None, None, None),
    r"^TPU v5 ?(lite|e)$": (197.0, None, None, None),
    r"^TPU v5p?$": (459.0, None, None, None),
    r"^TPU v6 ?(lite|e)$": (918.0, None, None, None),
}


def peak_flops_per_s(device_kind: str, dtype: Any) -> float | None:
    """Return the peak FLOP/s that the vendor states for a device; None if unknown (CPUs).

    The figures are for dense matrix products, never the doubled figures for sparse ones. float32
    means TF32 if the chip has it, because XLA uses TF32 there by default. The figures of the RTX
    4090 are with float32 accumulation.

    Args:
        device_kind: as in jax.Device.device_kind.
        dtype: dtype of the matrix products' operands: bfloat16, float16, float32, float8_e4m3fn or
            float8_e5m2.

    Source: NVIDIA's datasheets of V100, A100, H100, H200, L4 and L40S (sparse figures halved), of
        HGX B200 (per GPU), and the Ada architecture whitepaper, appendix A (RTX 4090); AMD's
        MI300X datasheet; Google Cloud's TPU system architecture pages (per chip, bfloat16 only).
    """
    names = ("bfloat16", "float16", "float32", "float8")
    name = jnp.dtype(dtype).name.partition("_")[0]
    for pattern, tflops_per_s in _PEAK_TFLOPS_PER_S.items():
        if name in names and re.search(pattern, device_kind):
            peak = tflops_per_s[names.index(name)]
            return None if peak is None else peak * 1e12
    return None


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
    """

    def __init__(self, units_per_step: int, unit: str = "token"):
        self._units_per_step = units_per_step
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
        step_time_s = (time.perf_counter() - self._start_s - self._paused_s) / self._num_steps
        data_wait_s = self._waited_s / self._num_steps
        self._start_lap()
        return {
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
            self._name: self._units_per_step / step_time_s,
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
        self._paused_s = self._waited_s = 0.0
        self._start_s = time.perf_counter()
