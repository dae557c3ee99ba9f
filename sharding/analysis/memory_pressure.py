"""Whether XLA had to compute things twice for a step to fit a GPU, and whether that was enough.

Where a step takes more than XLA's limit, its rematerialization pass computes values again instead
of keeping them. If that does not suffice, XLA only writes a warning ("Can't reduce memory use below
…") and goes on. Both can be read off the compiled step: what is computed again has `.remat` in its
name, and the limit is known.

Source: XLA, gpu_hlo_schedule.cc (GetSchedulerMemoryLimit) and hlo_rematerialization.cc.
"""

import dataclasses
import re

import jax

from sharding.analysis.audit import memory

#: Of a GPU's memory, what XLA plans with where no allocator says how much there is.
DEVICE_SHARE = 0.8
#: Of what arguments and results leave, the part that XLA plans with; the rest is for its scheduler.
SLOP = 0.95

_RECOMPUTED = re.compile(r"^\s*(?:ROOT )?%?\S+\.remat\d*\S* = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPressure:
    """How a compiled step stands to the memory that XLA planned it for.

    Attributes:
      compiled_bytes: that the step takes.
      limit_bytes: that XLA tried to keep to.
      num_recomputed: instructions that XLA added to compute values again.
    """

    compiled_bytes: int
    limit_bytes: int
    num_recomputed: int

    @property
    def is_over(self) -> bool:
        """Whether XLA failed to keep to its limit; the step may still fit the GPU, barely."""
        return self.compiled_bytes > self.limit_bytes

    def __str__(self) -> str:
        """Returns a warning; "" where there is nothing to warn of."""
        words = []
        if self.num_recomputed:
            words.append(
                f"XLA recomputes {self.num_recomputed} instructions to save memory, which takes "
                "time that no setting asked for"
            )
        if self.is_over:
            taken, limit = self.compiled_bytes / 2**30, self.limit_bytes / 2**30
            words.append(
                f"the compiled step takes {taken:.1f} GiB of each device, more than the "
                f"{limit:.1f} GiB that XLA tried to keep to"
            )
        return "; ".join(words)


def memory_pressure(
    compiled: jax.stages.Compiled, *, device_bytes: int, is_described: bool = True
) -> MemoryPressure | None:
    """Returns how a step compiled for GPUs stands to their memory.

    Args:
      compiled: the step.
      device_bytes: memory of one GPU if it is only described (`Target.memory_bytes`); of a GPU that
        is there, what its allocator has (`memory_stats()["bytes_limit"]`).
      is_described: whether it is only described.

    Returns:
      None if the compiler does not tell what the step takes.
    """
    stats, text = memory(compiled), compiled.as_text()
    if stats.in_all is None or text is None:
        return None
    fixed = stats.in_all - (stats.temp_bytes or 0)
    available = device_bytes * (DEVICE_SHARE if is_described else 1)
    return MemoryPressure(
        compiled_bytes=stats.in_all,
        limit_bytes=fixed + int(SLOP * (available - fixed)),
        num_recomputed=len(_RECOMPUTED.findall(text)),
    )
