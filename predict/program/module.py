"""A parsed program: computations that call each other, and searches through them."""

import dataclasses
import functools
from collections.abc import Callable

from predict.program.instruction import Instruction, repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed program.

    Attributes:
        entry: name of the computation that runs first.
        num_partitions: number of devices that one run of the program spans; 1 if the text does not
            say.
        computations: instructions of each computation, by the computation's name.
    """

    entry: str
    num_partitions: int
    computations: dict[str, list[Instruction]]

    def under_loops(
        self, is_wanted: Callable[[Instruction], bool]
    ) -> list[tuple[Instruction, tuple[Instruction, ...]]]:
        """Return the selected instructions that run, with the `while` instructions around them.

        A loop that runs at most once is not listed: it is a branch.

        Args:
            is_wanted: selects instructions. Computations that a selected instruction calls are not
                searched.

        Returns:
            (instruction, loops) pairs in program order, with the outermost loop first. If a
            computation is called twice, its instructions are listed twice.
        """

        @functools.cache
        def under(name: str) -> list[tuple[Instruction, tuple[Instruction, ...]]]:
            pairs: list[tuple[Instruction, tuple[Instruction, ...]]] = []
            for instruction in self.computations.get(name, []):
                if is_wanted(instruction):
                    pairs.append((instruction, ()))
                    continue
                loops = (instruction,) if repeats(instruction) else ()
                for called in instruction.called:
                    pairs += [(inner, loops + around) for inner, around in under(called)]
            return pairs

        return under(self.entry)
