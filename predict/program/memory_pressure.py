"""Detects whether XLA had to recompute values to fit a step into a GPU, and whether that sufficed.

If a step needs more than XLA's memory limit, its rematerialization pass recomputes values instead
of keeping them. If that does not suffice, XLA only logs a warning ("Can't reduce memory use below
…") and continues. The compiled step shows both: recomputed instructions have `.remat` in their
name, and the limit can be computed.

Source: XLA, gpu_hlo_schedule.cc (GetSchedulerMemoryLimit) and hlo_rematerialization.cc.
"""

import dataclasses
import re

import jax

from predict.program.memory import memory

#: Share of a GPU's memory that XLA plans with if no allocator reports how much memory there is.
DEVICE_SHARE = 0.8
#: Share of the memory left by arguments and results that XLA plans with. The rest is for its
#: scheduler.
SLOP = 0.95

_RECOMPUTED = re.compile(r"^\s*(?:ROOT )?%?\S+\.remat\d*\S* = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPressure:
    """Memory of a compiled step, compared with the limit that XLA planned it for.

    Attributes:
        compiled_bytes: memory that the step needs on one device.
        limit_bytes: memory limit that XLA tried to keep to.
        num_recomputed: number of instructions that XLA added to recompute values.
    """

    compiled_bytes: int
    limit_bytes: int
    num_recomputed: int

    @property
    def is_over(self) -> bool:
        """Whether XLA exceeded its limit. The step may still just fit into the GPU."""
        return self.compiled_bytes > self.limit_bytes

    def __str__(self) -> str:
        """Return a warning, or "" if there is nothing to warn about."""
        words = []
        if self.num_recomputed:
            words.append(
                f"XLA recomputes {self.num_recomputed} instructions to save memory, which makes "
                "the step slower"
            )
        if self.is_over:
            taken = self.compiled_bytes / 2**30
            limit = self.limit_bytes / 2**30
            words.append(
                f"the compiled step takes {taken:.1f} GiB of each device, more than the "
                f"{limit:.1f} GiB that XLA tried to keep to"
            )
        return "; ".join(words)


def memory_pressure(
    compiled: jax.stages.Compiled, *, device_bytes: int, is_described: bool = True
) -> MemoryPressure | None:
    """Compare the memory of a step that was compiled for GPUs with XLA's limit.

    Args:
        compiled: step.
        device_bytes: memory of one GPU. For a described GPU, this is `Target.memory_bytes`; for a
            real one, the memory of its allocator (`memory_stats()["bytes_limit"]`).
        is_described: whether the GPU is only described, as in `Target`.

    Returns:
        The comparison, or None if the compiler does not report the memory of the step.
    """
    stats = memory(compiled)
    text = compiled.as_text()
    if stats.in_all is None or text is None:
        return None
    fixed = stats.in_all - (stats.temp_bytes or 0)
    available = device_bytes * (DEVICE_SHARE if is_described else 1)
    return MemoryPressure(
        compiled_bytes=stats.in_all,
        limit_bytes=fixed + int(SLOP * (available - fixed)),
        num_recomputed=len(_RECOMPUTED.findall(text)),
    )
