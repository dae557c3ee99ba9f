"""Runs a chunk: the layers of one or more stacks in sequence, on one device.

A model has one stack or several, such as an encoder and a decoder. A chunk may contain layers of
any of them, in order. The stack's `before` function runs ahead of its first layer, on whichever
chunk contains that layer, and may change the structure and shapes of the activations. Activations
enter and leave a chunk packed (packed_activations.py). With 3 encoder and 5 decoder layers on 4
stages:

    stage 0     stage 1                      stage 2     stage 3
    e0 e1       e2  before_decoder  d0       d1 d2       d3 d4
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sharding.estimate.labels import counted_as
from sharding.logical import runs_alone
from sharding.pipeline.runtime.layers import Layers, Residuals
from sharding.pipeline.runtime.packed_activations import PackedActivations
from sharding.pipeline.runtime.rows import Slots
from sharding.pipeline.runtime.trees import Flag, add, read, write, zeros

Tree = Any
#: Stack -> its buffers.
ChunkResiduals = dict[str, Residuals]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPart:
    """One stack, as seen by one device.

    Attributes:
        layers: the stack's layers on this device.
        before: `before(ends, x, microbatch) -> x`, runs ahead of the stack's first layer; may be
            None.
        given: type of the input of `before`, a tree of ShapeDtypeStructs.
        taken: type of the input of the stack's blocks, a tree of ShapeDtypeStructs.
        holds: which of this device's chunks contain layers of the stack.
        begins: which of them contains the stack's first layer.
    """

    layers: Layers
    before: Callable[[Tree, Tree, Tree], Tree] | None
    given: Tree
    taken: Tree
    holds: Flag
    begins: Flag


class Chunks:
    """All chunks of one device: the part of the model between embedding and head.

    Args:
        parts: stack -> its part on this device, in the order in which the stacks run.
        packed: converts activations to and from the form in which they are sent.
        ends: non-stack parameters, which `before` functions may read.
        splits: whether backwards run as input gradient and weight gradient.
    """

    def __init__(
        self, parts: Mapping[str, StackPart], packed: PackedActivations, ends: Tree, *, splits: bool
    ):
        self._parts = {
            name: dataclasses.replace(part, before=_alone(name, part.before))
            for name, part in parts.items()
        }
        self._packed = packed
        self._ends = ends
        self._splits = splits

    def no_gradients(self) -> dict[str, Tree]:
        """Return, for each stack, zero gradients of its layers on this device."""
        return {name: part.layers.no_gradients() for name, part in self._parts.items()}

    def residuals(self, depths: Mapping[str, int]) -> ChunkResiduals:
        """Return empty buffers of the given depths for everything that backwards read."""
        residuals = {}
        for name, part in self._parts.items():
            residuals[name] = part.layers.residuals(depths)
            if part.before is not None and "saved" in depths:
                before = zeros(part.given, depths["saved"])
                residuals[name] = dataclasses.replace(residuals[name], before=before)
        return counted_as("activations", residuals)

    def evaluate(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Return x after the chunk, and keep nothing."""
        for part in self._parts.values():

            def run(x: Tree, part=part) -> Tree:
                x = self._made_ready(part, chunk, x, microbatch)
                return self._packed.pack(part.layers.evaluate(chunk, x, microbatch))

            x = self._if_present(part, chunk, run, x)
        return x

    def forward(
        self, chunk, x: Tree, microbatch: Tree, residuals: ChunkResiduals, slots: Slots
    ) -> tuple[Tree, ChunkResiduals]:
        """Return x after the chunk, and the buffers with the residuals for its backward."""
        residuals = dict(residuals)
        for name, part in self._parts.items():

            def run(state, part=part):
                x, of_stack = state
                if part.before is not None:
                    given = self._packed.unpack(x, part.given)
                    before = write(of_stack.before, slots.saved, given)
                    of_stack = dataclasses.replace(of_stack, before=before)
                x = self._made_ready(part, chunk, x, microbatch)
                x, of_stack = part.layers.forward(chunk, x, microbatch, of_stack, slots)
                return self._packed.pack(x), of_stack

            x, residuals[name] = self._if_present(part, chunk, run, (x, residuals[name]))
        return x, residuals

    def backward(
        self,
        chunk,
        dx: Tree,
        microbatch: Tree,
        residuals: ChunkResiduals,
        slots: Slots,
        grads: dict[str, Tree],
    ) -> tuple[Tree, dict[str, Tree], ChunkResiduals]:
        """Run the backward of a chunk, or its first half if backwards are split.

        Returns:
            (gradient of the chunk's input, `grads` with the gradients of the parameters added,
            buffers). If backwards are split, the buffers contain the values handed over to
            `weight_gradient`.
        """
        residuals = dict(residuals)
        ends = grads["ends"]
        of_layers = dict(grads["layers"])
        for name, part in reversed(self._parts.items()):

            def run(state, part=part):
                dx, ends, gradients, of_stack = state
                dx = self._packed.unpack(dx, part.taken)
                args = (chunk, dx, microbatch, of_stack, slots, gradients)
                if self._splits:
                    dx, gradients, handed = part.layers.input_gradient(*args)
                    of_stack = dataclasses.replace(of_stack, handed=handed)
                else:
                    dx, gradients = part.layers.backward(*args)
                dx, ends = self._through_before(part, chunk, dx, microbatch, of_stack, slots, ends)
                return dx, ends, gradients, of_stack

            state = (dx, ends, of_layers[name], residuals[name])
            dx, ends, of_layers[name], residuals[name] = self._if_present(part, chunk, run, state)
        return dx, {"ends": ends, "layers": of_layers}, residuals

    def weight_gradient(
        self,
        chunk,
        microbatch: Tree,
        residuals: ChunkResiduals,
        slots: Slots,
        grads: dict[str, Tree],
    ) -> dict[str, Tree]:
        """Return `grads` with the gradients added that the first half of the backward left out."""
        of_layers = dict(grads["layers"])
        for name, part in self._parts.items():
            args = (chunk, microbatch, residuals[name], slots, of_layers[name])
            of_layers[name] = part.layers.weight_gradient(*args)
        return grads | {"layers": of_layers}

    def _if_present(self, part: StackPart, chunk, run: Callable[[Tree], Tree], state: Tree) -> Tree:
        """Return run(state) if the chunk contains layers of the stack, else state.

        If all activations have the same type, `run` is called unconditionally: it skips absent
        layers itself and then leaves the state unchanged.
        """
        if self._packed.are_alike:
            return run(state)
        return part.holds.choose(chunk, lambda: run(state), lambda: state)

    def _made_ready(self, part: StackPart, chunk, x: Tree, microbatch: Tree) -> Tree:
        """Return the input of a stack's blocks, having run `before` if the stack begins here."""
        unpack = self._packed.unpack
        before = part.before
        if before is None:
            return unpack(x, part.taken)
        return part.begins.choose(
            chunk,
            lambda: before(self._ends, unpack(x, part.given), microbatch),
            lambda: unpack(x, part.taken),
        )

    def _through_before(
        self,
        part: StackPart,
        chunk,
        dx: Tree,
        microbatch: Tree,
        residuals: Residuals,
        slots: Slots,
        ends: Tree,
    ) -> tuple[Tree, Tree]:
        """Return the gradient of the input of `before`, and `ends` with its gradients added."""
        pack = self._packed.pack
        before = part.before
        if before is None:
            return pack(dx), ends
        x = read(residuals.before, slots.saved)

        def through():
            _, vjp = jax.vjp(lambda ends, x: before(ends, x, microbatch), self._ends, x)
            gradient, dx_before = vjp(dx)
            return pack(dx_before), add(ends, gradient)

        return part.begins.choose(chunk, through, lambda: (pack(dx), ends))


def _alone(stack: str, before: Callable[[Tree, Tree, Tree], Tree] | None) -> Callable | None:
    """Make `before` fail if it uses an axis split over stages, because only one stage runs it."""
    if before is None:
        return None

    def run(ends: Tree, x: Tree, microbatch: Tree) -> Tree:
        with runs_alone(f"before_{stack}"):
            return before(ends, x, microbatch)

    return run
