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

from pipeline.runtime.layers import Layers, Residuals
from pipeline.runtime.packed_activations import PackedActivations
from pipeline.runtime.tick_plan import Slots
from pipeline.runtime.trees import Flag, add, read, write, zeros
from sharding.labels import counted_as
from sharding.logical import on_whole_tokens, runs_alone

Tree = Any
#: Named scope of a stack's `before` function, by which predict/time/ finds it.
BEFORE = "before"
#: Stack -> its buffers.
ChunkResiduals = dict[str, Residuals]


def scope_of_stack(name: str) -> str:
    """Return the named scope of the layers of a stack, by which predict/time/ finds them."""
    return f"stack_{name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPart:
    """One stack, as seen by one device: its layers of every chunk of the device.

    The methods take and return packed activations.

    Attributes:
        layers: stack's layers on this device.
        before: `before(non_stack_params, x, microbatch) -> x`, runs ahead of the stack's first
            layer; may be None.
        input_type: type of the input of `before`, a tree of ShapeDtypeStructs.
        block_type: type of the input of the stack's blocks, a tree of ShapeDtypeStructs.
        contains_layers: for each chunk of this device, whether it contains layers of the stack.
        contains_first: for each chunk, whether it contains the stack's first layer.
        has_backward: whether backwards run through the stack; False if no parameter is trained in
            it or below it. Its backward then returns its arguments unchanged, and nothing is saved.
        packed: packs activations for sending, and unpacks them.
        non_stack_params: non-stack parameters, which `before` may read.
    """

    layers: Layers
    before: Callable[[Tree, Tree, Tree], Tree] | None
    input_type: Tree
    block_type: Tree
    contains_layers: Flag
    contains_first: Flag
    has_backward: bool
    packed: PackedActivations
    non_stack_params: Tree

    def residuals(self, num_slots: Mapping[str, int]) -> Residuals:
        """Return empty buffers; see `Chunks.residuals`."""
        if not self.has_backward:
            return Residuals()
        residuals = self.layers.residuals(num_slots)
        if self.before is None or "saved" not in num_slots:
            return residuals
        before_inputs = zeros(self.input_type, num_slots["saved"])
        return dataclasses.replace(residuals, before_inputs=before_inputs)

    def forward(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Return x after the chunk's layers of this stack."""

        def run(x: Tree) -> Tree:
            block_input = self._block_input(chunk, x, microbatch)
            return self.packed.pack(self.layers.forward(chunk, block_input, microbatch))

        return self._if_present(chunk, run, x)

    def forward_saving_residuals(
        self, chunk: jax.Array, x: Tree, microbatch: Tree, residuals: Residuals, slots: Slots
    ) -> tuple[Tree, Residuals]:
        """Return x after the chunk's layers of this stack, and the buffers with its residuals."""
        if not self.has_backward:
            return self.forward(chunk, x, microbatch), residuals

        def run(state: tuple[Tree, Residuals]) -> tuple[Tree, Residuals]:
            x, buffers = state
            if self.before is not None:
                before_input = self.packed.unpack(x, self.input_type)
                before_inputs = write(buffers.before_inputs, slots.saved, before_input)
                buffers = dataclasses.replace(buffers, before_inputs=before_inputs)
            block_input = self._block_input(chunk, x, microbatch)
            y, buffers = self.layers.forward_saving_residuals(
                chunk, block_input, microbatch, buffers, slots
            )
            return self.packed.pack(y), buffers

        return self._if_present(chunk, run, (x, residuals))

    def backward(
        self,
        chunk: jax.Array,
        dy: Tree,
        microbatch: Tree,
        residuals: Residuals,
        slots: Slots,
        non_stack_grads: Tree,
        stack_grads: Tree,
    ) -> tuple[Tree, Tree, Tree, Residuals]:
        """Run the backward of the chunk's layers of this stack, or its first half.

        Args:
            chunk: chunk's number on this device.
            dy: gradient of the output.
            residuals: buffers of this stack.
            slots: slots of the buffers.
            non_stack_grads: gradients of the non-stack parameters so far.
            stack_grads: gradients of the stack's parameters so far.

        Returns:
            (gradient of the input, both gradients with new ones added, buffers).
        """
        if not self.has_backward:
            return dy, non_stack_grads, stack_grads, residuals

        def run(state: tuple[Tree, Tree, Tree, Residuals]) -> tuple[Tree, Tree, Tree, Residuals]:
            dy, non_stack_grads, stack_grads, buffers = state
            block_dy = self.packed.unpack(dy, self.block_type)
            if self.layers.splits:
                block_dx, stack_grads, handed = self.layers.input_gradient(
                    chunk, block_dy, microbatch, buffers, slots, stack_grads
                )
                buffers = dataclasses.replace(buffers, handed=handed)
            else:
                block_dx, stack_grads = self.layers.backward(
                    chunk, block_dy, microbatch, buffers, slots, stack_grads
                )
            dx, non_stack_grads = self._through_before(
                chunk, block_dx, microbatch, buffers, slots, non_stack_grads
            )
            return dx, non_stack_grads, stack_grads, buffers

        return self._if_present(chunk, run, (dy, non_stack_grads, stack_grads, residuals))

    def _if_present(self, chunk: jax.Array, run: Callable[[Tree], Tree], state: Tree) -> Tree:
        """Return run(state) if the chunk contains layers of the stack, else `state`.

        If all activations have the same type, `run` is called unconditionally: it skips absent
        layers itself and then returns `state`.
        """
        if self.packed.are_alike:
            return run(state)
        return self.contains_layers.if_set(chunk, run, state)

    def _block_input(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Return the input of the stack's blocks, after `before` if the stack begins here."""
        unpack = self.packed.unpack
        before = self.before
        if before is None:
            return unpack(x, self.block_type)
        with jax.named_scope(BEFORE):
            return self.contains_first.if_set(
                chunk,
                lambda _: before(self.non_stack_params, unpack(x, self.input_type), microbatch),
                unpack(x, self.block_type),
            )

    def _through_before(
        self,
        chunk: jax.Array,
        block_dx: Tree,
        microbatch: Tree,
        residuals: Residuals,
        slots: Slots,
        non_stack_grads: Tree,
    ) -> tuple[Tree, Tree]:
        """Return the gradient of `before`'s input, and the gradients with its own added."""
        pack = self.packed.pack
        before = self.before
        if before is None:
            return pack(block_dx), non_stack_grads
        x = read(residuals.before_inputs, slots.saved)

        def through(state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            _, non_stack_grads = state

            def run(non_stack_params, x):
                return before(non_stack_params, x, microbatch)

            _, vjp = jax.vjp(run, self.non_stack_params, x)
            grads, dx = vjp(block_dx)
            return pack(dx), add(non_stack_grads, grads)

        with jax.named_scope(BEFORE):
            return self.contains_first.if_set(chunk, through, (pack(block_dx), non_stack_grads))


class Chunks:
    """All chunks of one device: the part of the model between embedding and head.

    Args:
        parts: stack -> its part on this device, in the order in which the stacks run.
    """

    def __init__(self, parts: dict[str, StackPart]):
        self._parts = parts

    @property
    def has_backward(self) -> bool:
        """Whether backwards run through any stack, so that stages exchange cotangents."""
        return any(part.has_backward for part in self._parts.values())

    def no_gradients(self) -> dict[str, Tree]:
        """Return, for each stack, zero gradients of its layers on this device."""
        return {name: part.layers.no_gradients() for name, part in self._parts.items()}

    def residuals(self, num_slots: Mapping[str, int]) -> ChunkResiduals:
        """Return empty buffers for everything that backwards read.

        Args:
            num_slots: buffer -> number of slots. Buffers that it does not name are left out.
        """
        residuals = {name: part.residuals(num_slots) for name, part in self._parts.items()}
        return counted_as("activations", residuals)

    def forward(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Return x after the chunk, without saving anything for a backward.

        Evaluations run this, and so does training if backwards recompute their chunk's forward
        (`pipeline.remat=full`): those call `forward_saving_residuals`.
        """
        for name, part in self._parts.items():
            with jax.named_scope(scope_of_stack(name)):
                x = part.forward(chunk, x, microbatch)
        return x

    def forward_saving_residuals(
        self, chunk: jax.Array, x: Tree, microbatch: Tree, residuals: ChunkResiduals, slots: Slots
    ) -> tuple[Tree, ChunkResiduals]:
        """Return x after the chunk, and the buffers with the residuals for its backward."""
        residuals = dict(residuals)
        for name, part in self._parts.items():
            with jax.named_scope(scope_of_stack(name)):
                x, residuals[name] = part.forward_saving_residuals(
                    chunk, x, microbatch, residuals[name], slots
                )
        return x, residuals

    def backward(
        self,
        chunk: jax.Array,
        dy: Tree,
        microbatch: Tree,
        residuals: ChunkResiduals,
        slots: Slots,
        non_stack_grads: Tree,
        stacks_grads: dict[str, Tree],
    ) -> tuple[Tree, Tree, dict[str, Tree], ChunkResiduals]:
        """Run the backward of a chunk, or its first half if backwards are split.

        Returns:
            (gradient of the chunk's input, both gradients with new ones added, buffers). If
            backwards are split, the buffers contain the values handed over to `weight_gradient`.
        """
        residuals = dict(residuals)
        stacks_grads = dict(stacks_grads)
        for name, part in reversed(self._parts.items()):
            # The gradient of a part's input is the output gradient of the part before it.
            grads = stacks_grads[name]
            with jax.named_scope(scope_of_stack(name)):
                dy, non_stack_grads, stacks_grads[name], residuals[name] = part.backward(
                    chunk, dy, microbatch, residuals[name], slots, non_stack_grads, grads
                )
        return dy, non_stack_grads, stacks_grads, residuals

    def weight_gradient(
        self,
        chunk: jax.Array,
        microbatch: Tree,
        residuals: ChunkResiduals,
        slots: Slots,
        stacks_grads: dict[str, Tree],
    ) -> dict[str, Tree]:
        """Return `stacks_grads` plus the gradients that the first half of the backward left out."""
        stacks_grads = dict(stacks_grads)
        for name, part in self._parts.items():
            if not part.has_backward:
                continue
            with jax.named_scope(scope_of_stack(name)):
                stacks_grads[name] = part.layers.weight_gradient(
                    chunk, microbatch, residuals[name], slots, stacks_grads[name]
                )
        return stacks_grads


def running_alone(
    stack: str, before: Callable[[Tree, Tree, Tree], Tree] | None
) -> Callable[[Tree, Tree, Tree], Tree] | None:
    """Return `before` with whole tokens, and with an error if it uses an axis split over stages.

    Only one stage runs it.
    """
    if before is None:
        return None

    def run(non_stack_params: Tree, x: Tree, microbatch: Tree) -> Tree:
        with runs_alone(f"before_{stack}"):
            return on_whole_tokens(lambda x: before(non_stack_params, x, microbatch), x)

    return run
