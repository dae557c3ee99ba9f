"""How fast a run is: step time, tokens or images a second, share of the chips' peak (MFU)."""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

# A pattern of device_kind -> dense TFLOP/s in (bfloat16, float16, float32); None where the vendor
# states none. The first that matches counts, so the variants of a chip stand before the chip.
_PEAK_TFLOPS_PER_S: dict[str, tuple[float | None, float | None, float | None]] = {
    r"\bMIG\b": (None, None, None),  # a slice of a chip
    r"\bV100-PCIE\b": (None, 112.0, 14.0),
    r"\bV100\b": (None, 125.0, 15.7),
    r"\bA100\b": (312.0, 312.0, 156.0),
    r"\bH100 PCIe\b": (756.0, 756.0, 378.0),
    r"\bH[12]00 NVL\b": (835.5, 835.5, 417.5),
    r"\bG?H[12]00\b": (989.5, 989.5, 494.5),
    r"\bB200\b": (2250.0, 2250.0, 1125.0),
    r"\bL4\b": (121.0, 121.0, 60.5),
    r"\bL40S\b": (362.0, 362.0, 183.0),
    r"\bRTX 4090$": (165.2, 165.2, 82.6),
    r"\bMI300X\b": (1307.4, 1307.4, 653.7),
    r"^TPU v4$": (275.0, None, None),
    r"^TPU v5 ?(lite|e)$": (197.0, None, None),
    r"^TPU v5p?$": (459.0, None, None),
    r"^TPU v6 ?(lite|e)$": (918.0, None, None),
}


def peak_flops_per_s(device_kind: str, dtype: Any) -> float | None:
    """Returns the most FLOP/s that the vendor states for one device, None if unknown (a CPU).

    Dense matrix products, never the doubled figures for sparse ones. float32 means TF32 where the
    chip has it, since that is what XLA uses there by default. RTX 4090 accumulates in float32.

    Args:
        device_kind: of a jax.Device.
        dtype: what the matrix products are computed in: bfloat16, float16 or float32.

    Source: NVIDIA's datasheets of V100, A100, H100, H200, L4 and L40S (sparse figures halved), of
        HGX B200 (per GPU), and the Ada architecture whitepaper, appendix A (RTX 4090); AMD's
        MI300X datasheet; Google Cloud's TPU system architecture pages (per chip, bfloat16 only).
    """
    names = ("bfloat16", "float16", "float32")
    name = jnp.dtype(dtype).name
    for pattern, tflops_per_s in _PEAK_TFLOPS_PER_S.items():
        if name in names and re.search(pattern, device_kind):
            peak = tflops_per_s[names.index(name)]
            return None if peak is None else peak * 1e12
    return None


def mfu(flops_per_s: float, num_devices: int, peak_flops_per_s: float | None) -> float | None:
    """Returns the model FLOPs utilisation, from 0 to 1; None where the peak is unknown.

    Args:
        flops_per_s: the model's own FLOP/s over all devices, recomputation not counted.
        num_devices: over which they are spread.
        peak_flops_per_s: of one device.

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    return None if peak_flops_per_s is None else flops_per_s / (num_devices * peak_flops_per_s)


class ThroughputMeter:
    """Measures step time and tokens or images a second between logged steps.

    The first step, which also warms up, counts in no rate; nor does time inside `paused()`.

    Args:
        units_per_step: of a global batch.
        unit: what they are: "token" or "image".
    """

    def __init__(self, units_per_step: int, unit: str = "token"):
        self._units_per_step, self._name = units_per_step, f"{unit}s_per_s"
        self._result: Any = None
        self._first_step_time_s: float | None = None
        self._start_lap()

    def step(self, result: Any) -> None:
        """Counts a step. `result`: an array it computes; the first step's is waited for."""
        self._result = result
        if self._first_step_time_s is None:
            jax.block_until_ready(result)
            self._first_step_time_s = time.perf_counter() - self._start_s - self._paused_s
            self._start_lap()
        else:
            self._num_steps += 1

    def lap(self) -> dict[str, float | None]:
        """Returns `step_time_s`, `data_wait_s`, `tokens_per_s` since the last lap, its steps done.

        Of images, the last is `images_per_s`. `data_wait_s` is the part of `step_time_s` spent in
        `waiting()`. With no step but the first in the lap, `step_time_s` is the first's, warming up
        included, and the others are None.
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
        """Counts the time of the block, which gets a step's batch, as waited for data."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the time of the block, an evaluation or a save, out of the lap."""
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
