"""Finds which permutations and matrix products of a pipeline's loop can run at the same time."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import jax

from predict.program import asynchrony, device_groups
from predict.program.instruction import Instruction, body_of, repeats
from predict.program.instruction_work import product_flops
from predict.program.module import Module
from predict.program.parse import parse_modules, text_of

_AFTER = re.compile(r"\bcontrol-predecessors=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A permutation, or an instruction with matrix products, in one iteration of a loop.

    Attributes:
        name: its name in the compiled program.
        pairs: (source, target) devices of every transfer of a permutation; () for other tasks.
        needs: names of the tasks of the same iteration that must finish before this one can begin,
            because it uses their results directly or through other instructions.
    """

    name: str
    pairs: tuple[tuple[int, ...], ...]
    needs: frozenset[str]


def tasks_of_loop(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, axis: str = "pipeline"
) -> list[Task]:
    """Return the permutations over a mesh axis in a loop, and the matrix products around them.

    Two tasks can run at the same time if neither needs the other. A task is one instruction of the
    loop's body; it may be a conditional or an inner loop, including everything inside.

    Args:
        compiled: compiled step in which exactly one loop permutes over the axis.
        mesh: mesh that it was compiled for.
        axis: name of the mesh axis.

    Returns:
        The tasks of one iteration, in program order.

    Raises:
        ValueError: if no loop or more than one loop permutes over the axis.
    """
    return tasks_of_loop_in_text(text_of(compiled), mesh.shape, axis)


def tasks_of_loop_in_text(
    text: str, mesh_shape: Mapping[str, int], axis: str = "pipeline"
) -> list[Task]:
    """Like `tasks_of_loop`, from a program's text and the sizes of the mesh axes in mesh order."""
    num_devices = math.prod(mesh_shape.values())

    def pairs(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
        if asynchrony.collective_kind(instruction) != "collective-permute":
            return ()
        groups = device_groups.parse(instruction.attributes, num_devices)
        return tuple(groups) if axis in device_groups.axes_of(groups, mesh_shape) else ()

    bodies = [
        (module, body)
        for module in parse_modules(text)
        for body in _loop_bodies(module)
        if any(map(pairs, body))
    ]
    if len(bodies) != 1:
        raise ValueError(
            f"{len(bodies)} loops of the program permute over mesh axis {axis!r}, but it must be"
            " one; pass the compiled step of a pipeline"
        )
    module, body = bodies[0]
    tasks = []
    needs = _dependencies(body)
    for instruction in body:
        moved = pairs(instruction)
        if moved or _has_product(module, instruction):
            tasks.append(Task(name=instruction.name, pairs=moved, needs=needs[instruction.name]))
    names = {task.name for task in tasks}
    return [dataclasses.replace(task, needs=task.needs & names) for task in tasks]


def _loop_bodies(module: Module) -> list[list[Instruction]]:
    """Return the instructions of the body of each loop that repeats."""
    loops = [i for body in module.computations.values() for i in body if repeats(i)]
    names = dict.fromkeys(map(body_of, loops))
    return [module.computations[name] for name in names if name in module.computations]


def _has_product(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction, or any instruction that it calls, is a matrix product."""
    return product_flops(instruction) is not None or any(
        _has_product(module, inner)
        for called in instruction.called
        for inner in module.computations.get(called, [])
    )


def _dependencies(body: Sequence[Instruction]) -> dict[str, frozenset[str]]:
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
