"""One device's chunks: stacks one after another, each made ready for where it begins.

A model has one stack or several, such as an encoder and a decoder. A chunk has layers of any of
them, in their order; a stack's `before` runs ahead of its first layer, wherever that lies, and may
change what activations look like. In and out of a chunk go parcels of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sharding.estimate.memory_estimate import counted_as
from sharding.logical import runs_alone
from sharding.pipeline.runtime.layers import Layers
from sharding.pipeline.runtime.packed_activations import PackedActivations
from sharding.pipeline.runtime.trees import Flag, add, read, write, zeros

Tree = Any
Kept = dict[str, dict]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPart:
    """One stack, as one device has it.

    Attributes:
      layers: its layers here.
      before: `before(ends, x, microbatch) -> x`, what it is made ready by, if by anything.
      given: type of what `before` takes.
      taken: type of what its blocks take: ShapeDtypeStructs, as of `given`.
      holds: which of this device's chunks have layers of it.
      begins: which of them has its first layer.
    """

    layers: Layers
    before: Callable[[Tree, Tree, Tree], Tree] | None
    given: Tree
    taken: Tree
    holds: Flag
    begins: Flag


class Chunks:
    """What runs between embedding and head.

    Args:
      parts: of every stack, in the order in which they run.
      parcels: the form in which x goes in and out.
      ends: parameters outside the stacks.
    """

    def __init__(
        self, parts: Mapping[str, StackPart], packed: PackedActivations, ends: Tree, *, splits: bool
    ):
        self._parts = {
            name: dataclasses.replace(part, before=_alone(name, part.before))
            for name, part in parts.items()
        }
        self._packed, self._ends, self._splits = packed, ends, splits

    def no_gradients(self) -> dict[str, Tree]:
        """Returns, per stack, zeros of its layers' gradients on this device."""
        return {name: part.layers.no_gradients() for name, part in self._parts.items()}

    def kept(self, depths: Mapping[str, int]) -> Kept:
        """Returns empty buffers of these depths for what the backward reads."""
        kept: Kept = {}
        for name, part in self._parts.items():
            kept[name] = dict(part.layers.buffers(depths))
            if part.before is not None and "saved" in depths:
                kept[name]["before"] = zeros(part.given, depths["saved"])
        return counted_as("activations", kept)

    def evaluate(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Returns x after the chunk; nothing is kept."""
        for part in self._parts.values():

            def run(x: Tree, part=part) -> Tree:
                x = self._made_ready(part, chunk, x, microbatch)
                return self._packed.pack(part.layers.evaluate(chunk, x, microbatch))

            x = self._if_held(part, chunk, run, x)
        return x

    def forward(self, chunk, x: Tree, microbatch: Tree, kept: Kept, slots) -> tuple[Tree, Kept]:
        """Returns x after the chunk, and the buffers with what its backward reads."""
        kept = dict(kept)
        for name, part in self._parts.items():

            def run(state, part=part):
                x, kept = state
                if part.before is not None:
                    given = self._packed.unpack(x, part.given)
                    kept = kept | {"before": write(kept["before"], slots["saved"], given)}
                x = self._made_ready(part, chunk, x, microbatch)
                x, buffers = part.layers.forward(chunk, x, microbatch, kept, slots)
                return self._packed.pack(x), kept | buffers

            x, kept[name] = self._if_held(part, chunk, run, (x, kept[name]))
        return x, kept

    def backward(
        self, chunk, dx: Tree, microbatch: Tree, kept: Kept, slots, grads: dict[str, Tree]
    ) -> tuple[Tree, dict[str, Tree], Kept]:
        """Returns the gradient of what went in, `grads` with those of the parameters added, kept.

        Where backwards are split, this is the first half, and what the second reads is in `kept`.
        """
        kept, ends, of_layers = dict(kept), grads["ends"], dict(grads["layers"])
        for name, part in reversed(self._parts.items()):

            def run(state, part=part):
                dx, ends, gradients, kept = state
                dx = self._packed.unpack(dx, part.taken)
                args = (chunk, dx, microbatch, kept, slots, gradients)
                if self._splits:
                    dx, gradients, handed = part.layers.input_gradient(*args)
                    kept = kept | {"handed": handed}
                else:
                    dx, gradients = part.layers.backward(*args)
                dx, ends = self._through_before(part, chunk, dx, microbatch, kept, slots, ends)
                return dx, ends, gradients, kept

            state = (dx, ends, of_layers[name], kept[name])
            dx, ends, of_layers[name], kept[name] = self._if_held(part, chunk, run, state)
        return dx, {"ends": ends, "layers": of_layers}, kept

    def weight_gradient(
        self, chunk, microbatch: Tree, kept: Kept, slots, grads: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Returns `grads` with what the first half of the backward left out added."""
        of_layers = dict(grads["layers"])
        for name, part in self._parts.items():
            args = (chunk, microbatch, kept[name], slots, of_layers[name])
            of_layers[name] = part.layers.weight_gradient(*args)
        return grads | {"layers": of_layers}

    def _if_held(self, part: StackPart, chunk, run: Callable[[Tree], Tree], state: Tree) -> Tree:
        """Returns run(state), or state where the chunk has no layer of the stack.

        Where all activations are of one type, `run` itself changes nothing then.
        """
        if self._packed.are_alike:
            return run(state)
        return part.holds.choose(chunk, lambda: run(state), lambda: state)

    def _made_ready(self, part: StackPart, chunk, x: Tree, microbatch: Tree) -> Tree:
        """Returns what the chunk's blocks of a stack take, of what comes before it."""
        unpack, before = self._packed.unpack, part.before
        if before is None:
            return unpack(x, part.taken)
        return part.begins.choose(
            chunk,
            lambda: before(self._ends, unpack(x, part.given), microbatch),
            lambda: unpack(x, part.taken),
        )

    def _through_before(
        self, part: StackPart, chunk, dx: Tree, microbatch: Tree, kept: dict, slots, ends: Tree
    ) -> tuple[Tree, Tree]:
        """Returns the gradient of what comes before a stack, and `ends` with gradients added."""
        pack, before = self._packed.pack, part.before
        if before is None:
            return pack(dx), ends
        x = read(kept["before"], slots["saved"])

        def through():
            _, vjp = jax.vjp(lambda ends, x: before(ends, x, microbatch), self._ends, x)
            gradient, dx_before = vjp(dx)
            return pack(dx_before), add(ends, gradient)

        return part.begins.choose(chunk, through, lambda: (pack(dx), ends))


def _alone(stack: str, before: Callable[[Tree, Tree, Tree], Tree] | None) -> Callable | None:
    """Returns `before`, which the stage runs where the stack begins, and no other."""
    if before is None:
        return None

    def run(ends: Tree, x: Tree, microbatch: Tree) -> Tree:
        with runs_alone(f"before_{stack}"):
            return before(ends, x, microbatch)

    return run
