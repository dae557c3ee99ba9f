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
from sharding.pipeline.runtime.tick_plan import Slots
from sharding.pipeline.runtime.trees import Flag, add, read, write, zeros

Tree = Any
#: Stack -> its buffers.
ChunkResiduals = dict[str, Residuals]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPart:
    """One stack, as seen by one device.

    Attributes:
        layers: the stack's layers on this device.
        before: `before(non_stack_params, x, microbatch) -> x`, runs ahead of the stack's first
            layer; may be None.
        input_type: type of the input of `before`, a tree of ShapeDtypeStructs.
        block_type: type of the input of the stack's blocks, a tree of ShapeDtypeStructs.
        contains_layers: for each chunk of this device, whether it contains layers of the stack.
        contains_first: for each chunk, whether it contains the stack's first layer.
    """

    layers: Layers
    before: Callable[[Tree, Tree, Tree], Tree] | None
    input_type: Tree
    block_type: Tree
    contains_layers: Flag
    contains_first: Flag


class Chunks:
    """All chunks of one device: the part of the model between embedding and head.

    Args:
        parts: stack -> its part on this device, in the order in which the stacks run.
        packed: packs activations for sending, and unpacks them.
        non_stack_params: the non-stack parameters, which `before` functions may read.
        splits: whether backwards run as input gradient and weight gradient.
    """

    def __init__(
        self,
        parts: Mapping[str, StackPart],
        packed: PackedActivations,
        non_stack_params: Tree,
        *,
        splits: bool,
    ):
        self._parts = {
            name: dataclasses.replace(part, before=_alone(name, part.before))
            for name, part in parts.items()
        }
        self._packed = packed
        self._non_stack_params = non_stack_params
        self._splits = splits

    def no_gradients(self) -> dict[str, Tree]:
        """Return, for each stack, zero gradients of its layers on this device."""
        return {name: part.layers.no_gradients() for name, part in self._parts.items()}

    def residuals(self, num_slots: Mapping[str, int]) -> ChunkResiduals:
        """Return empty buffers for everything that backwards read.

        Args:
            num_slots: buffer -> number of slots. Buffers that it does not name are left out.
        """
        residuals = {}
        for name, part in self._parts.items():
            residuals[name] = part.layers.residuals(num_slots)
            if part.before is not None and "saved" in num_slots:
                before_inputs = zeros(part.input_type, num_slots["saved"])
                residuals[name] = dataclasses.replace(residuals[name], before_inputs=before_inputs)
        return counted_as("activations", residuals)

    def forward(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Return x after the chunk, without saving anything for a backward.

        Evaluations run this, and so does training if backwards recompute their chunk's forward
        (`pipeline.remat=full`): those call `forward_saving_residuals`.
        """
        for part in self._parts.values():

            def run(x: Tree, part=part) -> Tree:
                x = self._made_ready(part, chunk, x, microbatch)
                return self._packed.pack(part.layers.forward(chunk, x, microbatch))

            x = self._if_present(part, chunk, run, x)
        return x

    def forward_saving_residuals(
        self, chunk, x: Tree, microbatch: Tree, residuals: ChunkResiduals, slots: Slots
    ) -> tuple[Tree, ChunkResiduals]:
        """Return x after the chunk, and the buffers with the residuals for its backward."""
        residuals = dict(residuals)
        for name, part in self._parts.items():

            def run(state, part=part):
                x, stack_residuals = state
                if part.before is not None:
                    before_input = self._packed.unpack(x, part.input_type)
                    before_inputs = write(stack_residuals.before_inputs, slots.saved, before_input)
                    stack_residuals = dataclasses.replace(
                        stack_residuals, before_inputs=before_inputs
                    )
                x = self._made_ready(part, chunk, x, microbatch)
                x, stack_residuals = part.layers.forward_saving_residuals(
                    chunk, x, microbatch, stack_residuals, slots
                )
                return self._packed.pack(x), stack_residuals

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
        non_stack_grads = grads["non_stack"]
        layer_grads = dict(grads["stacks"])
        for name, part in reversed(self._parts.items()):

            def run(state, part=part):
                dx, non_stack_grads, stack_grads, stack_residuals = state
                dx = self._packed.unpack(dx, part.block_type)
                args = (chunk, dx, microbatch, stack_residuals, slots, stack_grads)
                if self._splits:
                    dx, stack_grads, handed = part.layers.input_gradient(*args)
                    stack_residuals = dataclasses.replace(stack_residuals, handed=handed)
                else:
                    dx, stack_grads = part.layers.backward(*args)
                dx, non_stack_grads = self._through_before(
                    part, chunk, dx, microbatch, stack_residuals, slots, non_stack_grads
                )
                return dx, non_stack_grads, stack_grads, stack_residuals

            state = (dx, non_stack_grads, layer_grads[name], residuals[name])
            state = self._if_present(part, chunk, run, state)
            dx, non_stack_grads, layer_grads[name], residuals[name] = state
        return dx, {"non_stack": non_stack_grads, "stacks": layer_grads}, residuals

    def weight_gradient(
        self,
        chunk,
        microbatch: Tree,
        residuals: ChunkResiduals,
        slots: Slots,
        grads: dict[str, Tree],
    ) -> dict[str, Tree]:
        """Return `grads` with the gradients added that the first half of the backward left out."""
        layer_grads = dict(grads["stacks"])
        for name, part in self._parts.items():
            args = (chunk, microbatch, residuals[name], slots, layer_grads[name])
            layer_grads[name] = part.layers.weight_gradient(*args)
        return grads | {"stacks": layer_grads}

    def _if_present(self, part: StackPart, chunk, run: Callable[[Tree], Tree], state: Tree) -> Tree:
        """Return run(state) if the chunk contains layers of the stack, else state.

        If all activations have the same type, `run` is called unconditionally: it skips absent
        layers itself and then leaves the state unchanged.
        """
        if self._packed.are_alike:
            return run(state)
        return part.contains_layers.choose(chunk, lambda: run(state), lambda: state)

    def _made_ready(self, part: StackPart, chunk, x: Tree, microbatch: Tree) -> Tree:
        """Return the input of a stack's blocks, having run `before` if the stack begins here."""
        unpack = self._packed.unpack
        before = part.before
        if before is None:
            return unpack(x, part.block_type)
        return part.contains_first.choose(
            chunk,
            lambda: before(self._non_stack_params, unpack(x, part.input_type), microbatch),
            lambda: unpack(x, part.block_type),
        )

    def _through_before(
        self,
        part: StackPart,
        chunk,
        dx: Tree,
        microbatch: Tree,
        residuals: Residuals,
        slots: Slots,
        non_stack_grads: Tree,
    ) -> tuple[Tree, Tree]:
        """Return the gradient of `before`'s input, and the gradients with its own added."""
        pack = self._packed.pack
        before = part.before
        if before is None:
            return pack(dx), non_stack_grads
        x = read(residuals.before_inputs, slots.saved)

        def through():
            def run(non_stack_params, x):
                return before(non_stack_params, x, microbatch)

            _, vjp = jax.vjp(run, self._non_stack_params, x)
            grads, dx_before = vjp(dx)
            return pack(dx_before), add(non_stack_grads, grads)

        return part.contains_first.choose(chunk, through, lambda: (pack(dx), non_stack_grads))


def _alone(stack: str, before: Callable[[Tree, Tree, Tree], Tree] | None) -> Callable | None:
    """Make `before` fail if it uses an axis split over stages, because only one stage runs it."""
    if before is None:
        return None

    def run(non_stack_params: Tree, x: Tree, microbatch: Tree) -> Tree:
        with runs_alone(f"before_{stack}"):
            return before(non_stack_params, x, microbatch)

    return run
