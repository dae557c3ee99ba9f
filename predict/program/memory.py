"""Reads the memory of a compiled step, which depends on the arrays that XLA decides to keep."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a compiled step in bytes per device; None if the backend does not report it.

    Attributes:
        argument_bytes: state and batch, which the step reads.
        output_bytes: results, including those that reuse the memory of donated arguments.
        alias_bytes: part of output_bytes that reuses donated arguments.
        temp_bytes: all buffers allocated during the step.
        host_bytes: host memory for this device's arguments, results and temporary buffers.
    """

    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    host_bytes: int | None = None

    @property
    def in_all(self) -> int | None:
        """Total device memory, with reused arguments counted once."""
        added = (self.argument_bytes, self.output_bytes, self.temp_bytes)
        reused = self.alias_bytes
        known = [num_bytes for num_bytes in added if num_bytes is not None]
        return sum(known) - reused if len(known) == 3 and reused is not None else None


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the memory that the compiler planned for a step on one device."""
    stats = compiled.memory_analysis()

    def read(part: str) -> int | None:
        return getattr(stats, f"{part}_size_in_bytes", None)

    host = [read(f"host_{part}") for part in ("argument", "output", "temp", "alias")]
    known = [num_bytes for num_bytes in host if num_bytes is not None]
    return Memory(
        host_bytes=sum(known[:3]) - known[3] if len(known) == len(host) else None,
        argument_bytes=read("argument"),
        output_bytes=read("output"),
        alias_bytes=read("alias"),
        temp_bytes=read("temp"),
    )
