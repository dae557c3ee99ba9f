"""Compiles the parts of a pipeline step separately, so that `benchmarks.pipeline` can time them.

The parts are the forward and backward pass of a stage's layers, the two halves of the backward
pass, the gradients of embedding and head, and the optimizer update. The layers run as in the
executor, through pipeline/runtime/layers.py:

    part              computes                                      per
    evaluate          layers, without saving residuals              microbatch
    forward           layers, saving residuals                      microbatch
    backward          gradients of the layers' input and weights    microbatch
    input_gradient    first half of backward                        microbatch
    weight_gradient   second half of backward                       microbatch
    embed             embedding                                     microbatch
    embed_gradient    gradient of the embedding's parameters        microbatch
    head_gradient     loss, gradients of the head and its input     microbatch
    update            optimizer update of a stage's parameters      step
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness.batches import random_batch
from benchmarks.harness.timing import NUM_WARM_UP_STEPS
from pipeline.runtime.gather import ParamGatherer, ParamSharding
from pipeline.runtime.layers import Layers, Work
from pipeline.runtime.tick_table import BufferSlots
from pipeline.runtime.trees import add, total_of, wide_types, zeros
from pipeline.stack_layout import StackLayout
from predict.program.flops import matmul_flops
from sharding.gather_modes import all_once
from train.run.run import Run

Tree = Any

#: (name, number of layers); the number is 0 for embedding and head.
StagePart = tuple[str, int]


class StageParts:
    """The parts of a run's step, compiled for a set of devices.

    All devices compute the same part at the same time, each on its own copy of the arrays. Arrays
    therefore have a leading dimension with one entry per device.

    Args:
        run: run; its model, batch, precision and optimizer are used.
        on: devices.
    """

    def __init__(self, run: Run, on: Sequence[Any]):
        self._run = run
        self._mesh = Mesh(np.array(on), ("stage",))
        self._num_microbatches = count = run.config.train.num_microbatches
        (self._stack,) = run.functions.num_layers
        self._shapes = run.functions.split(run.state_layout.portable.params)
        self._dtype = run.config.precision.compute
        microbatches = _microbatches(run)
        non_stack_params = jax.tree.map(
            lambda p: _random(p.shape, self._dtype), self._shapes["non_stack"]
        )
        self._microbatch = jax.tree.map(lambda x: x[0], microbatches)
        self._x = jax.eval_shape(run.functions.embed, non_stack_params, self._microbatch)
        # One per microbatch: activations, or cotangents where a part needs these.
        xs = jax.tree.map(lambda x: _random((count, *x.shape), x.dtype, stddev=1.0), self._x)
        self._inputs = self._copied((microbatches, xs))
        self._non_stack_params = self._copied(non_stack_params)
        self._params: dict[int, Tree] = {}  # number of layers -> their parameters
        self._compiled: dict[tuple, Any] = {}
        self._flops: dict[StagePart, float | None] = {}

    def repeats(self, part: StagePart) -> int:
        """Return how often a step of the part computes it."""
        return 1 if part[0] == "update" else self._num_microbatches

    def flops(self, part: StagePart) -> float | None:
        """Return the FLOPs of a part's matrix products on one device, or None if unknown.

        They are per microbatch, or per step for the update. `step_of` must have been called.
        """
        total = self._flops[part]
        return None if total is None else total / self.repeats(part)

    def step_of(self, part: StagePart) -> Callable[[], None]:
        """Return a step of the part, which has warmed up.

        It computes the part for all microbatches in sequence, on all devices at the same time.
        """
        name, num_layers = part
        if name == "update":
            compiled, carry, fixed = self._compile_update(num_layers)
        elif num_layers:
            compiled, carry, fixed = self._compile_layers(name, num_layers)
        else:
            compiled, carry, fixed = self._compile_end(name)
        self._flops[part] = matmul_flops(compiled)

        def step() -> None:
            nonlocal carry
            carry, outputs = compiled(carry, *fixed)
            jax.block_until_ready((carry, outputs))

        for _ in range(1 + NUM_WARM_UP_STEPS):
            step()
        return step

    def _compile_end(self, name: str) -> tuple[Any, Tree, Tree]:
        """Compile a part of the embedding or the head.

        Returns:
            (compiled, carry, fixed): `compiled(carry, *fixed)` computes the part for all
            microbatches, and returns the new carry and the outputs.
        """
        functions = self._run.functions

        def embed(carry, m, microbatch, non_stack_params, x):
            return carry, functions.embed(non_stack_params, microbatch)

        def embed_gradient(grads, m, microbatch, non_stack_params, dx):
            _, vjp = jax.vjp(lambda params: functions.embed(params, microbatch), non_stack_params)
            return add(grads, vjp(dx)[0]), None

        def head_gradient(grads, m, microbatch, non_stack_params, x):
            def loss_of(non_stack_params, x):
                return total_of(functions.head(non_stack_params, x, microbatch)[0])

            loss, (gradient, dx) = jax.value_and_grad(loss_of, argnums=(0, 1))(non_stack_params, x)
            return add(grads, gradient), (loss, dx)

        body = {"embed": embed, "embed_gradient": embed_gradient, "head_gradient": head_gradient}
        carry = {} if name == "embed" else zeros(wide_types(self._non_stack_params))
        fixed = (self._non_stack_params, *self._inputs)
        return self._compile((name,), self._scanned(body[name]), carry, fixed), carry, fixed

    def _compile_layers(self, name: str, num_layers: int) -> tuple[Any, Tree, Tree]:
        """Compile a part of the layers; returns the same as `_compile_end`.

        The buffers of residuals have two slots, which microbatches use in turns.
        """
        splits = name in ("input_gradient", "weight_gradient")
        bodies = self._layer_bodies(num_layers, splits=splits)
        params = self._layers(num_layers)
        fixed = (params, *self._inputs)

        def compiled(name, carry):
            key = (name, num_layers, splits)
            return self._compile(key, self._scanned(bodies[name]), carry, fixed)

        if name == "evaluate":
            return compiled(name, {}), {}, fixed
        num_slots = {"saved": 2} | ({"for_weights": 2, "handed": 2} if splits else {})
        first = jax.tree.map(lambda x: x[0], params)
        make_layers = self._make_layers(num_layers, splits=splits)
        residuals = self._copied(make_layers(first).empty_layer_residuals(num_slots))
        carry = (zeros(wide_types(params)), residuals)
        # Fill the buffers that this part reads, so that it does not compute with zeros.
        before = {"weight_gradient": ["forward", "input_gradient"], "forward": []}
        for earlier in before.get(name, ["forward"]):
            carry = compiled(earlier, carry)(carry, *fixed)[0]
        return compiled(name, carry), carry, fixed

    def _make_layers(self, num_layers: int, *, splits: bool) -> Callable[[Tree], Layers]:
        """Return a function from the parameters of `num_layers` layers to these layers."""
        layout = StackLayout(num_layers=num_layers, chunks=(((0, num_layers),),))

        def make_layers(params):
            specs = jax.tree.map(lambda _: PartitionSpec(), params)
            param_sharding = ParamSharding(
                mesh=self._run.mesh, specs={}, gather_modes={}, kept_axes={}
            )
            kept_axes = jax.tree.map(lambda _: frozenset[str](), params)
            gatherer = ParamGatherer(specs, param_sharding, (), all_once(specs), kept_axes)
            return Layers(
                block=self._run.functions.blocks[self._stack],
                params=params,
                gatherer=gatherer,
                layout=layout,
                stage_index=jnp.int32(0),
                x=self._x,
                microbatch=self._microbatch,
                splits=splits,
                unrolls=False,
                accumulates=True,
            )

        return make_layers

    def _layer_bodies(self, num_layers: int, *, splits: bool) -> dict[str, Callable]:
        """Return, by name, the parts of layers: functions of one microbatch for `_scanned`."""
        make_layers = self._make_layers(num_layers, splits=splits)

        def work_on(m, microbatch):
            slots = BufferSlots(saved=m % 2, for_weights=m % 2, handed=m % 2)
            return Work(chunk=jnp.int32(0), microbatch=microbatch, slots=slots)

        def evaluate(carry, m, microbatch, params, x):
            layers = make_layers(params)
            work = work_on(m, microbatch)
            return carry, layers.run_layers(work.chunk, partial(layers.layer_forward, work), x)

        def forward(carry, m, microbatch, params, x):
            grads, residuals = carry
            layers = make_layers(params)
            work = work_on(m, microbatch)
            body = partial(layers.layer_forward_saving, work)
            y, residuals = layers.run_layers(work.chunk, body, (x, residuals))
            return (grads, residuals), y

        def backward(carry, m, microbatch, params, dx):
            grads, residuals = carry
            layers = make_layers(params)
            work = work_on(m, microbatch)
            body = partial(layers.layer_backward, work, residuals)
            dx, grads = layers.run_layers(work.chunk, body, (dx, grads), reverse=True)
            return (grads, residuals), dx

        def input_gradient(carry, m, microbatch, params, dx):
            grads, residuals = carry
            layers = make_layers(params)
            work = work_on(m, microbatch)
            body = partial(layers.layer_input_gradient, work, residuals)
            carry = (dx, grads, residuals.handed)
            dx, grads, handed = layers.run_layers(work.chunk, body, carry, reverse=True)
            return (grads, dataclasses.replace(residuals, handed=handed)), dx

        def weight_gradient(carry, m, microbatch, params, x):
            grads, residuals = carry
            layers = make_layers(params)
            work = work_on(m, microbatch)
            body = partial(layers.layer_weight_gradient, work, residuals)
            return (layers.run_layers(work.chunk, body, grads), residuals), None

        bodies = [evaluate, forward, backward, input_gradient, weight_gradient]
        return {body.__name__: body for body in bodies}

    def _compile_update(self, num_layers: int) -> tuple[Any, Tree, Tree]:
        """Compile the optimizer update of a stage's parameters; returns the same as `_compile_end`.

        These are the parameters of `num_layers` layers and, on every stage, of embedding and head.
        """
        optimizer = self._run.optimizer
        dtype = self._run.config.precision.params
        layers = {self._stack: self._layers(num_layers)}
        params = self._run.functions.join({"non_stack": self._non_stack_params, "stacks": layers})
        # The update donates its arguments, and other parts read these arrays, so copy them.
        params = jax.tree.map(lambda p: jnp.array(p, dtype, copy=True), params)
        grads = jax.tree.map(jnp.copy, params)

        def update(carry, grads):
            params, opt_state = carry
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), optax.tree.norm(grads)

        opt_state = self._copied(optimizer.init(jax.tree.map(lambda p: p[0], params)))
        carry = (params, opt_state)
        return self._compile(("update", num_layers), update, carry, (grads,)), carry, (grads,)

    def _layers(self, num_layers: int) -> Tree:
        if num_layers not in self._params:
            shapes = self._shapes["stacks"][self._stack]
            self._params[num_layers] = self._copied(
                jax.tree.map(lambda p: _random((num_layers, *p.shape[1:]), self._dtype), shapes)
            )
        return self._params[num_layers]

    def _scanned(self, body: Callable) -> Callable:
        """Return a function that scans `body` over all microbatches, numbered from 0."""

        def scanned(carry, params, microbatches, xs):
            def step(carry, row):
                m, microbatch, x = row
                return body(carry, m, microbatch, params, x)

            numbers = jnp.arange(self._num_microbatches, dtype=jnp.int32)
            return jax.lax.scan(step, carry, (numbers, microbatches, xs))

        return scanned

    def _compile(self, key: tuple, function: Callable, carry: Tree, fixed: tuple) -> Any:
        """Compile a function that each device runs on its own arrays, once per key.

        Args:
            key: identifies the function in the cache of compiled functions.
            function: `(carry, *fixed) -> (carry, outputs)`, for arrays of one device.
            carry: arrays of all devices, which are donated.
            fixed: further arrays of all devices.

        Returns:
            The compiled function, for arrays of all devices.
        """

        def local(carry, *fixed):
            carry, fixed = jax.tree.map(lambda x: x[0], (carry, fixed))
            return jax.tree.map(lambda x: x[None], function(carry, *fixed))

        if key not in self._compiled:
            spec = PartitionSpec("stage")
            mapped = jax.shard_map(
                local, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
            jitted = jax.jit(mapped, donate_argnums=0)
            self._compiled[key] = jitted.lower(carry, *fixed).compile()
        return self._compiled[key]

    def _copied(self, tree: Tree) -> Tree:
        """Return the arrays with a leading dimension of devices, and a copy on each of them."""

        def copy(x):
            return jnp.broadcast_to(x, (self._mesh.size, *x.shape))

        sharding = NamedSharding(self._mesh, PartitionSpec("stage"))
        return jax.jit(lambda tree: jax.tree.map(copy, tree), out_shardings=sharding)(tree)


def _microbatches(run: Run) -> dict[str, Any]:
    """Return random microbatches `[M, B, ...]`, with a dropout key for every example."""
    count = run.config.train.num_microbatches
    batch = random_batch(run)
    size = len(batch.pop("index")) // count
    keys = jax.random.split(jax.random.key(0), (count, size))
    arrays = {name: array.reshape(count, size, *array.shape[1:]) for name, array in batch.items()}
    return arrays | {"dropout_keys": keys}


def _random(shape: tuple[int, ...], dtype: Any, stddev: float = 0.02) -> jax.Array:
    return (stddev * jax.random.normal(jax.random.key(0), shape)).astype(dtype)
