"""A parsed program: computations that call each other, and searches through them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

from predict.program.instruction import Instruction, body_of, repeats

_AFTER = re.compile(r"\bcontrol-predecessors=\{([^}]*)\}")


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

    def loop_bodies(self) -> list[list[Instruction]]:
        """Return the instructions of the body of each loop that repeats."""
        loops = [i for body in self.computations.values() for i in body if repeats(i)]
        names = dict.fromkeys(map(body_of, loops))
        return [self.computations[name] for name in names if name in self.computations]

    def reaches(self, instruction: Instruction, is_wanted: Callable[[Instruction], bool]) -> bool:
        """Return whether an instruction, or any instruction that it calls, is selected."""
        return is_wanted(instruction) or any(
            self.reaches(inner, is_wanted)
            for called in instruction.called
            for inner in self.computations.get(called, [])
        )


def dependencies(body: Sequence[Instruction]) -> dict[str, frozenset[str]]:
    """Return the names of all instructions that must finish before each one can begin.

    Args:
        body: instructions of one computation, in program order.

    Returns:
        Instruction name -> its direct and indirect predecessors, by data and control dependency.
    """
    predecessors: dict[str, frozenset[str]] = {}
    for instruction in body:
        after = _AFTER.search(instruction.attributes)
        names = re.findall(r"[\w.\-]+", after[1]) if after else []
        direct = [name for name in (*instruction.operands, *names) if name in predecessors]
        predecessors[instruction.name] = frozenset(direct).union(
            *(predecessors[name] for name in direct)
        )
    return predecessors
