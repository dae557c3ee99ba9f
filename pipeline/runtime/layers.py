"""Runs the layers of one chunk one after another: forward, backward, and the backward's two halves.

Parameters and gradients are `[param slots, ...]`, in the layout of
pipeline/stack_layout.py. The residuals of a microbatch are written directly into a buffer
`[buffer slots, layers, ...]`, and gradients are accumulated in place, so no second array of a whole
chunk's size is ever allocated.
With L = `max_layers_per_chunk`:

    forward of chunk c, microbatch m         for i in 0 .. L-1
        x, saved = vjp.forward(params[param slot c*L + i], x)
        buffers[buffer slot of m, i] = saved

    backward of chunk c, microbatch m        for i in L-1 .. 0
        saved = buffers[buffer slot of m, i]
        dw, dx = vjp.backward(params[param slot c*L + i], saved, dx)
        grads[param slot c*L + i] += dw

The layers run in a loop, or, if the program says `unrolls`, one after another without one. The
residuals and gradients of unrolled layers are arrays of their own, which are not copied into and
out of arrays of all layers. That is possible if only one microbatch has residuals at a time. But
nothing then keeps XLA from gathering all parameters at once, or from keeping values of a forward
that the backward is meant to compute again. Barriers do:

    before a layer       of x and the parameters of the next layer, so that parameters are gathered
                         at most one layer ahead
    before its backward  of its residuals, its number and the gradient of its output; and of the
                         gradients of three layers ago, whose reduce-scatters have to end by then
    after its backward   of its gradients, so that XLA does not delay their products, whose operands
                         would be kept; they are sent to other devices during the next layer
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.runtime.block_vjp import BlockVJP
from pipeline.runtime.gather import ParamGatherer
from pipeline.runtime.tick_table import BufferSlots
from pipeline.runtime.trees import add, is_none, wide_types, without, zeros
from pipeline.stack_layout import StackLayout
from sharding.labels import begins_layer, counted_as
from sharding.logical import automatic_axes
from sharding.memory import is_on_host, to_device, to_where, zeros_on_host
from sharding.ops.update_if import Condition, update_if

Tree = Any
#: Arrays `[buffer slots, layers, ...]`; of unrolled layers, for each a list of arrays `[...]`.
Buffer = list[Any]

#: Named scope of the loops over layers, by which predict/time/ finds them in a program.
LAYERS = "layers"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """One stack's buffers for values that wait for a backward; tick_program.py explains each.

    A buffer is None if the schedule has no such buffer.

    Attributes:
        saved: residuals that the backward reads.
        for_weights: residuals that the weight gradient reads too, if backwards are split.
        handed: values that the input gradient hands over to the weight gradient.
        before_inputs: inputs of the stack's `before`, `[buffer slots, ...]`; used by chunks.py.
    """

    saved: Buffer | None = None
    for_weights: Buffer | None = None
    handed: Buffer | None = None
    before_inputs: Tree | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """An operation on a chunk, as every level below the stage needs it.

    Attributes:
        chunk: chunk's number on this device, int32[].
        microbatch: arrays `[B, ...]`.
        slots: buffer slots that the operation reads or writes.
    """

    chunk: jax.Array
    microbatch: Tree
    slots: BufferSlots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The place of a layer, and the arrays that contain its parameters.

    Attributes:
        i: layer's number within its chunk, int32[]; an int if layers are unrolled.
        param_slot: slot of its parameters on this stage, int32[]; an int if layers are unrolled.
        number: its number within the stack, int32[].
        params: this stage's parameters of the stack, `[param slots of this stage, ...]`.
    """

    i: jax.Array | int
    param_slot: jax.Array | int
    number: jax.Array
    params: Tree


@dataclasses.dataclass(kw_only=True)
class Layers:
    """One device's layers of one stack.

    Attributes:
        block: see `PipelineFunctions.blocks`.
        params: this stage's parameters, `[param slots of this stage, ...]`.
        gatherer: gathers the parameters of one layer, and reduces its gradients.
        layout: stack's layers in the slots of every stage.
        stage_index: this device's stage, int32[].
        x: input of a layer, or its ShapeDtypeStructs.
        microbatch: one of the microbatches, or its ShapeDtypeStructs.
        splits: whether backwards run in two halves.
        unrolls: whether forwards that save residuals, and backwards, run without a loop.
        accumulates: whether several backwards of a layer add up their gradients in a step.
        frozen: bool per parameter, whether it has no gradient; None: all have one.
    """

    block: Callable[..., Tree]
    params: Tree
    gatherer: ParamGatherer
    layout: StackLayout
    stage_index: dataclasses.InitVar[jax.Array]
    x: Tree
    microbatch: Tree
    splits: bool
    unrolls: bool
    accumulates: bool
    frozen: Tree | None = None

    def __post_init__(self, stage_index: jax.Array) -> None:
        layout = self.layout
        numbers = layout.layer_of_slot.reshape(len(layout.chunks), -1)  # [stages, slots of a stage]
        self._numbers = jnp.asarray(numbers)[stage_index]
        self._has_padding = bool((numbers < 0).any())
        self._max_layers_per_chunk = layout.max_layers_per_chunk

    @cached_property
    def _vjp(self) -> BlockVJP:
        params = jax.eval_shape(self._first_params)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        return BlockVJP(self.block, params, self.x, self.microbatch, number)

    @cached_property
    def _block_forward(self) -> Callable[..., tuple[Tree, list[jax.Array]]]:
        """`BlockVJP.forward`, which is traced once for all unrolled layers."""
        return jax.jit(self._vjp.forward) if self.unrolls else self._vjp.forward

    @cached_property
    def _block_backward(self) -> Callable[..., tuple[Tree, Tree]]:
        """`BlockVJP.backward`, which is traced once for all unrolled layers."""
        return jax.jit(self._vjp.backward) if self.unrolls else self._vjp.backward

    @cached_property
    def _for_weights(self) -> list[int]:
        """Indices of the saved residuals that weight gradients read."""
        return self._vjp.saved_for_weights if self.splits else []

    def zero_layer_gradients(self) -> Tree:
        """Return zero gradients in float32 or wider, in the same memory as the parameters.

        Frozen parameters have None. Unrolled layers have a list with a tree for each.
        """
        gradients = jax.eval_shape(lambda: self.gatherer.scattered(self._first_params()))
        if self.unrolls:
            layer_gradients = zeros(wide_types(without(gradients, self.frozen)))
            return [layer_gradients] * len(self._numbers)

        def empty(shape: jax.ShapeDtypeStruct, param: jax.Array) -> jax.Array:
            # Zeros even if every slot is written once: XLA would allocate an empty array at the
            # beginning of the step, so that it would take memory during the forward pass too.
            make = zeros_on_host if is_on_host(param) else jnp.zeros
            return make(shape.shape, shape.dtype)

        gradients = without(wide_types(gradients, len(self._numbers)), self.frozen)
        return jax.tree.map(empty, gradients, without(self.params, self.frozen))

    def stack_layer_gradients(self, grads: Tree) -> Tree:
        """Return the sums of gradients as arrays `[param slots, ...]`."""
        if not self.unrolls:
            return grads
        return jax.tree.map(lambda *layers: jnp.stack(layers), *grads)

    def empty_layer_residuals(self, num_slots: Mapping[str, int]) -> Residuals:
        """Return empty buffers.

        Args:
            num_slots: buffer -> number of slots. Buffers that it does not name are left out.
        """
        shapes = [*zip(self._vjp.saved, self._vjp.saved_on_host, strict=True)]
        saved, for_weights = self._parted(shapes)

        def empty(shape: jax.ShapeDtypeStruct, on_host: bool, count: int) -> jax.Array:
            if self.unrolls:
                return jax.lax.empty(shape.shape, shape.dtype)
            whole = (count, self._max_layers_per_chunk, *shape.shape)
            if on_host:
                return zeros_on_host(whole, shape.dtype, num_loop_dims=2)
            # A slot is written before it is read, so zeros are not necessary. But XLA can split
            # zeros like the values that will be written to them, and not an empty array.
            if automatic_axes("act_tokens"):
                return jnp.zeros(whole, shape.dtype)
            return jax.lax.empty(whole, shape.dtype)

        def buffer(name: str, shapes: list) -> Buffer | None:
            if name not in num_slots:
                return None
            arrays = [empty(shape, on_host, num_slots[name]) for shape, on_host in shapes]
            return [arrays] * self._max_layers_per_chunk if self.unrolls else arrays

        return Residuals(
            saved=buffer("saved", saved),
            for_weights=buffer("for_weights", for_weights),
            handed=buffer("handed", [(shape, False) for shape in self._vjp.handed])
            if self.splits
            else None,
        )

    # The methods `layer_*` are bodies for `run_layers`, with their first arguments bound: each
    # computes one layer, and takes and returns the carry of the loop.

    def layer_forward(self, work: Work, layer: Layer, x: Tree) -> Tree:
        """Return x after a layer, without saving anything for a backward."""
        params = self._params_of(layer)
        return self.block(params, x, microbatch=work.microbatch, number=layer.number)

    def layer_forward_saving(
        self, work: Work, layer: Layer, carry: tuple[Tree, Residuals]
    ) -> tuple[Tree, Residuals]:
        """Return x after a layer, and the buffers with the saved residuals."""
        x, residuals = carry
        params = self._params_of(layer)
        x, values = self._block_forward(params, x, work.microbatch, layer.number)
        saved, for_weights = self._parted(values)
        slots = work.slots
        residuals = dataclasses.replace(
            residuals,
            saved=_write(residuals.saved, slots.saved, layer, saved),
            for_weights=_write(residuals.for_weights, slots.for_weights, layer, for_weights),
        )
        return x, residuals

    def layer_backward(
        self, work: Work, residuals: Residuals, layer: Layer, carry: tuple[Tree, Tree]
    ) -> tuple[Tree, Tree]:
        """Return the gradient of a layer's input, and the gradients so far plus the layer's."""
        dy, grads = carry
        saved = _read(residuals.saved, work.slots.saved, layer)
        if self.unrolls:
            # The number, too: dropout masks follow from it, and would otherwise be kept. And the
            # gradients of three layers ago: XLA would let their reduce-scatters wait for longer.
            sent = slice(layer.i + 3, layer.i + 4)
            values = (dy, saved, layer.number, grads[sent])
            dy, saved, number, sent_grads = jax.lax.optimization_barrier(values)
            grads = [*grads]
            grads[sent] = sent_grads
            saved = counted_as("activations", saved)
            layer = dataclasses.replace(layer, number=number)
        params = self._params_of(layer)
        gradients, dx = self._block_backward(params, work.microbatch, layer.number, saved, dy)
        if self.unrolls:
            dx, gradients = jax.lax.optimization_barrier((dx, gradients))
        return dx, self._accumulate(grads, layer, gradients)

    def layer_input_gradient(
        self, work: Work, residuals: Residuals, layer: Layer, carry: tuple[Tree, Tree, Buffer]
    ) -> tuple[Tree, Tree, Buffer | None]:
        """Run the first half of `layer_backward`.

        Returns:
            (gradient of the layer's input, the gradients so far plus those that this half computes,
            the buffer `handed` with the values that `layer_weight_gradient` reads).
        """
        dy, grads, handed = carry
        saved = self._joined(
            _read(residuals.saved, work.slots.saved, layer),
            _read(residuals.for_weights, work.slots.for_weights, layer),
        )
        params = self._params_of(layer)
        dx, early, values = self._vjp.input_gradient(
            params, work.microbatch, layer.number, saved, dy
        )
        handed = _write(handed, work.slots.handed, layer, values)
        return dx, self._accumulate(grads, layer, early), handed

    def layer_weight_gradient(
        self, work: Work, residuals: Residuals, layer: Layer, grads: Tree
    ) -> Tree:
        """Return the gradients so far plus those that `layer_input_gradient` left out."""
        late = self._vjp.weight_gradient(
            self._params_of(layer),
            work.microbatch,
            layer.number,
            _read(residuals.for_weights, work.slots.for_weights, layer),
            _read(residuals.handed, work.slots.handed, layer),
        )
        return self._accumulate(grads, layer, late)

    def run_layers(
        self,
        chunk: jax.Array,
        body: Callable[[Layer, Tree], Tree],
        carry: Tree,
        *,
        reverse: bool = False,
    ) -> Tree:
        """Return the carry after `carry = body(layer, carry)` for every layer of a chunk.

        Args:
            chunk: chunk's number on this device.
            body: computes one layer; it is not called for padding.
            carry: tree of arrays. If layers are unrolled, a tuple whose first element is the value
                that layers hand to each other.
            reverse: whether to begin with the last layer.
        """
        if self.unrolls:
            return self._run_unrolled(body, carry, reverse)

        # The loop counts in its carry. XLA does not recognize a counter that is read from an array,
        # and would neither pipeline collectives nor read weights where they are stored.
        def step(count_and_carry, _):
            count, carry = count_and_carry
            i = self._max_layers_per_chunk - 1 - count if reverse else count
            param_slot = chunk * self._max_layers_per_chunk + i
            number = self._numbers[param_slot]
            is_layer = number >= 0
            layer = Layer(i=i, param_slot=param_slot, number=number, params=self.params)
            run = partial(body, layer)
            if self._has_padding:
                carry = update_if(Condition(lambda: is_layer), run, carry)
            else:
                carry = run(carry)
            return (count + 1, carry), None

        with jax.named_scope(LAYERS):
            start = (jnp.int32(0), carry)
            return jax.lax.scan(step, start, None, length=self._max_layers_per_chunk)[0][1]

    def _run_unrolled(
        self, body: Callable[[Layer, Tree], Tree], carry: Tree, reverse: bool
    ) -> Tree:
        order = range(self._max_layers_per_chunk)
        params = self.params
        with jax.named_scope(LAYERS):
            for i in reversed(order) if reverse else order:
                x, *others = carry
                # The next layer can gather its parameters from now on, and not earlier. With the
                # layer's number as a constant, each layer would have kernels of its own.
                x, number, next_params = jax.lax.optimization_barrier(
                    (begins_layer(x), self._numbers[i], params)
                )
                layer = Layer(i=i, param_slot=i, number=number, params=params)
                carry = body(layer, (x, *others))
                params = next_params
            x, *others = carry
            return begins_layer(x), *others

    def _first_params(self) -> Tree:
        """Return the parameters of the layer in the first slot; those of all layers are alike."""
        first = jnp.int32(0)
        return self._params_of(Layer(i=first, param_slot=first, number=first, params=self.params))

    def _params_of(self, layer: Layer) -> Tree:
        """Return the parameters of one layer, gathered."""

        def at(x):
            return jax.lax.dynamic_index_in_dim(x, layer.param_slot, keepdims=False)

        return self.gatherer.gather_layer(jax.tree.map(at, layer.params))

    def _accumulate(self, grads: Tree, layer: Layer, values: Tree) -> Tree:
        """Add a layer's gradients to `grads`, in the dtype of `grads`, where neither is None.

        If a layer has only one backward, they are written without an addition. XLA can then let
        their reduce-scatter end in the next iteration, because nothing in this one reads it.
        """

        def converted(g: jax.Array | None, value: jax.Array | None) -> jax.Array | None:
            return None if g is None or value is None else value.astype(g.dtype)

        before = grads[layer.i] if self.unrolls else grads
        values = jax.tree.map(converted, before, values, is_leaf=is_none)
        values = self.gatherer.scattered(values)
        if self.unrolls:
            after = add(before, values) if self.accumulates else values
            return [*grads[: layer.i], after, *grads[layer.i + 1 :]]
        accumulate = _add_to_slot if self.accumulates else _written

        def accumulated(g: jax.Array | None, value: jax.Array | None) -> jax.Array | None:
            return g if g is None or value is None else accumulate(g, layer.param_slot, value)

        return jax.tree.map(accumulated, grads, values, is_leaf=is_none)

    def _parted(self, saved: Sequence) -> tuple[list, list]:
        """Split saved residuals between the buffers `saved` and `for_weights`."""
        other_residuals = [value for i, value in enumerate(saved) if i not in self._for_weights]
        return other_residuals, [saved[i] for i in self._for_weights]

    def _joined(self, saved: Iterable, for_weights: Iterable) -> list:
        """Merge the residuals of both buffers back into the order of `BlockVJP.saved`."""
        saved = iter(saved)
        for_weights = iter(for_weights)
        count = len(self._vjp.saved)
        return [next(for_weights if i in self._for_weights else saved) for i in range(count)]


def _add_to_slot(g: jax.Array, param_slot: jax.Array | int, value: jax.Array) -> jax.Array:
    """Return `g`, on the device or in host memory, with `value` added to one parameter slot."""
    if not is_on_host(g):
        return g.at[param_slot].add(value)
    before = jax.lax.dynamic_index_in_dim(g, param_slot, keepdims=False)
    return _written(g, param_slot, to_device(before) + value)


def _written(g: jax.Array, param_slot: jax.Array | int, value: jax.Array) -> jax.Array:
    """Return `g`, on the device or in host memory, with `value` in one parameter slot."""
    return jax.lax.dynamic_update_index_in_dim(g, to_where(value, g), param_slot, 0)


def _write(
    buffer: Buffer | None, buffer_slot, layer: Layer, values: Sequence[jax.Array]
) -> Buffer | None:
    """Return the buffer with the values of a layer of a chunk written to a buffer slot."""
    if buffer is None:
        return None
    if isinstance(layer.i, int):
        return [*buffer[: layer.i], [*values], *buffer[layer.i + 1 :]]
    return [
        jax.lax.dynamic_update_slice(array, value[None, None], _start(array, buffer_slot, layer.i))
        for array, value in zip(buffer, values, strict=True)
    ]


def _read(buffer: Buffer | None, buffer_slot, layer: Layer) -> list[jax.Array]:
    """Return the values of a layer of a chunk from a buffer slot."""
    assert buffer is not None
    if isinstance(layer.i, int):
        return buffer[layer.i]
    return [
        jax.lax.dynamic_slice(b, _start(b, buffer_slot, layer.i), (1, 1, *b.shape[2:]))[0, 0]
        for b in buffer
    ]


def _start(buffer: jax.Array, buffer_slot, i) -> tuple[jax.Array, ...]:
    zeros = [jnp.int32(0)] * (buffer.ndim - 2)
    return (jnp.int32(buffer_slot), jnp.int32(i), *zeros)
