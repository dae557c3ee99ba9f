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
from functools import partial
from typing import Any

import jax

from pipeline.runtime.layers import Layers, Residuals, Work
from pipeline.runtime.packed_activations import PackedActivations
from pipeline.runtime.trees import Flag, add, read, write, zeros
from sharding.labels import counted_as
from sharding.logical import on_whole_tokens, runs_alone
from sharding.ops.update_if import update_if

Tree = Any
#: Named scope of a stack's `before` function, by which predict/time/ finds it.
BEFORE = "before"
#: Stack -> its buffers.
ChunkResiduals = dict[str, Residuals]


def scope_of_stack(name: str) -> str:
    """Return the named scope of the layers of a stack, by which predict/time/ finds them."""
    return f"stack_{name}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardState:
    """The state that the backward of a stack or a chunk reads and updates.

    Attributes:
        dy: gradient of the output; after the backward, of the input.
        non_stack_grads: gradients of the non-stack parameters so far.
        stack_grads: gradients of the stack's parameters so far; of a chunk, stack -> gradients.
        residuals: buffers of the stack; of a chunk, stack -> buffers.
    """

    dy: Tree
    non_stack_grads: Tree
    stack_grads: Tree
    residuals: Any


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
            it or below it. It then has no backward, and nothing is saved.
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

    def empty_stack_residuals(self, num_slots: Mapping[str, int]) -> Residuals:
        """Return empty buffers; see `Chunks.empty_chunk_residuals`."""
        if not self.has_backward:
            return Residuals()
        residuals = self.layers.empty_layer_residuals(num_slots)
        if self.before is None or "saved" not in num_slots:
            return residuals
        before_inputs = zeros(self.input_type, num_slots["saved"])
        return dataclasses.replace(residuals, before_inputs=before_inputs)

    def if_present(self, chunk: jax.Array, run: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
        """Return a function that runs `run` only if the chunk contains layers of the stack.

        If all activations have the same type, `run` itself is returned: it skips absent layers, and
        so returns its argument unchanged.
        """
        if self.packed.are_alike:
            return run
        return partial(update_if, self.contains_layers.at(chunk), run)

    def stack_forward(self, work: Work, x: Tree) -> Tree:
        """Return x after the chunk's layers of this stack."""
        layers = self.layers
        block_input = self._block_input(work, x)
        y = layers.run_layers(work.chunk, partial(layers.layer_forward, work), block_input)
        return self.packed.pack(y)

    def stack_forward_saving(
        self, work: Work, state: tuple[Tree, Residuals]
    ) -> tuple[Tree, Residuals]:
        """Return x after the chunk's layers of this stack, and the buffers with its residuals."""
        x, residuals = state
        if not self.has_backward:
            return self.stack_forward(work, x), residuals
        if self.before is not None:
            before_input = self.packed.unpack(x, self.input_type)
            before_inputs = write(residuals.before_inputs, work.slots.saved, before_input)
            residuals = dataclasses.replace(residuals, before_inputs=before_inputs)
        layers = self.layers
        carry = (self._block_input(work, x), residuals)
        body = partial(layers.layer_forward_saving, work)
        y, residuals = layers.run_layers(work.chunk, body, carry)
        return self.packed.pack(y), residuals

    def stack_backward(self, work: Work, state: BackwardState) -> BackwardState:
        """Run the backward of the chunk's layers of this stack, or its first half."""
        layers = self.layers
        residuals = state.residuals
        block_dy = self.packed.unpack(state.dy, self.block_type)
        if layers.splits:
            body = partial(layers.layer_input_gradient, work, residuals)
            carry = (block_dy, state.stack_grads, residuals.handed)
            block_dx, stack_grads, handed = layers.run_layers(work.chunk, body, carry, reverse=True)
            residuals = dataclasses.replace(residuals, handed=handed)
        else:
            body = partial(layers.layer_backward, work, residuals)
            carry = (block_dy, state.stack_grads)
            block_dx, stack_grads = layers.run_layers(work.chunk, body, carry, reverse=True)
        dx, non_stack_grads = self._through_before(work, block_dx, residuals, state.non_stack_grads)
        return BackwardState(
            dy=dx, non_stack_grads=non_stack_grads, stack_grads=stack_grads, residuals=residuals
        )

    def stack_weight_gradient(self, work: Work, residuals: Residuals, stack_grads: Tree) -> Tree:
        """Return `stack_grads` plus what the first half of the stack's backward left out."""
        body = partial(self.layers.layer_weight_gradient, work, residuals)
        return self.layers.run_layers(work.chunk, body, stack_grads)

    def _block_input(self, work: Work, x: Tree) -> Tree:
        """Return the input of the stack's blocks, after `before` if the stack begins here."""
        unpack = self.packed.unpack
        before = self.before
        if before is None:
            return unpack(x, self.block_type)
        with jax.named_scope(BEFORE):
            return update_if(
                self.contains_first.at(work.chunk),
                lambda _: before(
                    self.non_stack_params, unpack(x, self.input_type), work.microbatch
                ),
                unpack(x, self.block_type),
            )

    def _through_before(
        self, work: Work, block_dx: Tree, residuals: Residuals, non_stack_grads: Tree
    ) -> tuple[Tree, Tree]:
        """Return the gradient of `before`'s input, and the gradients with its own added."""
        pack = self.packed.pack
        before = self.before
        if before is None:
            return pack(block_dx), non_stack_grads
        x = read(residuals.before_inputs, work.slots.saved)

        def through(state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            _, non_stack_grads = state

            def run(non_stack_params, x):
                return before(non_stack_params, x, work.microbatch)

            _, vjp = jax.vjp(run, self.non_stack_params, x)
            grads, dx = vjp(block_dx)
            return pack(dx), add(non_stack_grads, grads)

        with jax.named_scope(BEFORE):
            state = (pack(block_dx), non_stack_grads)
            return update_if(self.contains_first.at(work.chunk), through, state)


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

    def zero_stacks_gradients(self) -> dict[str, Tree]:
        """Return, for each stack, zero gradients of its layers on this device."""
        return {name: part.layers.zero_layer_gradients() for name, part in self._parts.items()}

    def stack_gradients(self, stacks_grads: dict[str, Tree]) -> dict[str, Tree]:
        """Return, for each stack, the sums of gradients as arrays `[param slots, ...]`."""
        return {
            name: part.layers.stack_layer_gradients(stacks_grads[name])
            for name, part in self._parts.items()
        }

    def empty_chunk_residuals(self, num_slots: Mapping[str, int]) -> ChunkResiduals:
        """Return empty buffers for everything that backwards read.

        Args:
            num_slots: buffer -> number of slots. Buffers that it does not name are left out.
        """
        residuals = {
            name: part.empty_stack_residuals(num_slots) for name, part in self._parts.items()
        }
        return counted_as("activations", residuals)

    def chunk_forward(self, work: Work, x: Tree) -> Tree:
        """Return x after the chunk, without saving anything for a backward.

        Evaluations run this. So does training with `train.remat=stage`, whose backwards recompute
        the chunk's forward with `chunk_forward_saving`.
        """
        for name, part in self._parts.items():
            with jax.named_scope(scope_of_stack(name)):
                forward = part.if_present(work.chunk, partial(part.stack_forward, work))
                x = forward(x)
        return x

    def chunk_forward_saving(
        self, work: Work, x: Tree, residuals: ChunkResiduals
    ) -> tuple[Tree, ChunkResiduals]:
        """Return x after the chunk, and the buffers with the residuals for its backward."""
        residuals = dict(residuals)
        for name, part in self._parts.items():
            with jax.named_scope(scope_of_stack(name)):
                forward = part.if_present(work.chunk, partial(part.stack_forward_saving, work))
                x, residuals[name] = forward((x, residuals[name]))
        return x, residuals

    def chunk_backward(self, work: Work, state: BackwardState) -> BackwardState:
        """Run the backward of a chunk, or its first half if backwards are split.

        If they are, the residuals contain the values handed over to `chunk_weight_gradient`.
        """
        residuals = dict(state.residuals)
        stacks_grads = dict(state.stack_grads)
        for name, part in reversed(self._parts.items()):
            if not part.has_backward:
                continue
            # The gradient of a part's input is the output gradient of the part before it.
            state = dataclasses.replace(
                state, stack_grads=stacks_grads[name], residuals=residuals[name]
            )
            with jax.named_scope(scope_of_stack(name)):
                backward = part.if_present(work.chunk, partial(part.stack_backward, work))
                state = backward(state)
            stacks_grads[name] = state.stack_grads
            residuals[name] = state.residuals
        return dataclasses.replace(state, stack_grads=stacks_grads, residuals=residuals)

    def chunk_weight_gradient(
        self, work: Work, residuals: ChunkResiduals, stacks_grads: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Return `stacks_grads` plus the gradients that the first half of the backward left out."""
        stacks_grads = dict(stacks_grads)
        for name, part in self._parts.items():
            if not part.has_backward:
                continue
            with jax.named_scope(scope_of_stack(name)):
                stacks_grads[name] = part.stack_weight_gradient(
                    work, residuals[name], stacks_grads[name]
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
