"""The batch size of each step, which may grow at the start of a run.

A run with a ramp-up begins with small batches and ends with batches of `data.global_batch_size`.
The size depends only on the number of examples that earlier steps have used, so a run that resumes
needs to know nothing but its step. With `global_batch_size=8` and `rampup_batch_size=(2, 2, 12)`,
the size grows by 2 after every 12 / 3 = 4 examples:

    step            0    1    2        3        4            5
    batch size      2    2    4        6        8            8
    first element   0    2    4        8        14           22

Step 3 goes beyond element 12, so the batch is full from step 4 on.
"""

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from data.checks import require

_MOST_INCREMENTS = 1000


@dataclass(frozen=True, kw_only=True)
class BatchPhase:
    """Consecutive steps with the same batch size.

    Attributes:
        first_step: number of the first step, from 0.
        first_element: number of its first element, which is how many earlier steps have used.
        size: global batch size.
    """

    first_step: int
    first_element: int
    size: int


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The global batch sizes of all steps, as phases; the last phase has no end."""

    phases: tuple[BatchPhase, ...]

    @classmethod
    def of(cls, global_batch_size: int, rampup: tuple[int, ...] = ()) -> Self:
        """Return the sizes of a run.

        Args:
            global_batch_size: size after the ramp-up.
            rampup: first size, increment, and number of examples until the size is
                `global_batch_size`; empty: the size is always the same.
        """
        if not rampup:
            return cls(phases=(BatchPhase(first_step=0, first_element=0, size=global_batch_size),))
        start, increment, num_examples = rampup
        num_increments = (global_batch_size - start) // increment
        phases: list[BatchPhase] = []
        step = element = grown = 0
        while grown < num_increments:
            size = start + grown * increment
            phases.append(BatchPhase(first_step=step, first_element=element, size=size))
            # The first element with the next size; a batch that contains it is not cut.
            end = math.ceil(Fraction(num_examples * (grown + 1), num_increments))
            num_steps = -(-(end - element) // size)
            step += num_steps
            element += num_steps * size
            grown = min(num_increments, element * num_increments // num_examples)
        phases.append(BatchPhase(first_step=step, first_element=element, size=global_batch_size))
        return cls(phases=tuple(phases))

    @property
    def full(self) -> BatchPhase:
        """The last phase, which has the largest batches."""
        return self.phases[-1]

    def of_step(self, step: int) -> int:
        """Return the batch size of a step, counted from 0."""
        return self._phase_of_step(step).size

    def of_element(self, element: int) -> int:
        """Return the size of the batch whose first element this is."""
        return self._phase_of_element(element).size

    def first_element(self, step: int) -> int:
        """Return the number of the first element of a step, counted from 0."""
        phase = self._phase_of_step(step)
        return phase.first_element + (step - phase.first_step) * phase.size

    def num_steps(self, num_elements: Fraction) -> Fraction:
        """Return after how many steps, maybe a fraction, this many elements have been used."""
        phase = self._phase_of_element(num_elements)
        return phase.first_step + (num_elements - phase.first_element) / phase.size

    def num_microbatches(self, size: int, most: int) -> int:
        """Return into how many microbatches a batch of this size is split.

        There are as few as possible; none is larger than a microbatch of a full batch.

        Args:
            size: global batch size.
            most: number of microbatches of a full batch.
        """
        return -(-size * most // self.full.size)

    def undivided_size(self, most: int, num_replicas: int) -> int | None:
        """Return the first batch size whose microbatches the replicas do not divide; else None.

        Args:
            most: number of microbatches of a full batch.
            num_replicas: number of replicas.
        """
        for phase in self.phases:
            if phase.size % (self.num_microbatches(phase.size, most) * num_replicas):
                return phase.size
        return None

    def _phase_of_step(self, step: int) -> BatchPhase:
        firsts = [phase.first_step for phase in self.phases]
        return self.phases[bisect.bisect_right(firsts, step) - 1]

    def _phase_of_element(self, element: int | Fraction) -> BatchPhase:
        firsts = [phase.first_element for phase in self.phases]
        return self.phases[bisect.bisect_right(firsts, element) - 1]


def check_rampup(global_batch_size: int, rampup: tuple[int, ...]) -> None:
    """Check the value of `data.rampup_batch_size`.

    Raises:
        ValueError: the increments do not lead from the first size to the global batch size.
    """
    if not rampup:
        return
    key = f"data.rampup_batch_size={rampup!r}"
    require(
        all(type(number) is int for number in rampup),
        f"{key} must be three whole numbers, START, INCREMENT and EXAMPLES, such as 16,16,100000",
    )
    start, increment, _ = rampup
    require(
        start < global_batch_size,
        f"{key}: the first size must be less than data.global_batch_size={global_batch_size}; "
        "choose a smaller one, or () for batches of the same size",
    )
    missing = global_batch_size - start
    counts = [n for n in range(1, min(missing, _MOST_INCREMENTS) + 1) if missing % n == 0]
    increments = [missing // count for count in counts]
    require(
        increment in increments,
        f"{key}: the increment must divide data.global_batch_size - START = {missing} into at most "
        f"{_MOST_INCREMENTS} parts, because each size has a compiled step; the nearest that does "
        f"is {min(increments, key=lambda n: abs(n - increment))}",
    )


def rows_of_size(rows: tuple[int, ...], global_batch_size: int, size: int) -> tuple[int, ...]:
    """Return the rows of a smaller batch that the process with these rows supplies.

    Replicas hold consecutive rows, and as many of each batch. So row r of the smaller batch is on
    the replica, and on the process, of row floor(r × global_batch_size / size) of a full batch.

    Args:
        rows: rows of a full batch that the process supplies.
        global_batch_size: size of a full batch.
        size: size of the smaller batch, which the number of replicas divides.
    """
    if size == global_batch_size:
        return rows
    smaller: dict[int, int] = {row * global_batch_size // size: row for row in range(size)}
    return tuple(smaller[row] for row in rows if row in smaller)
