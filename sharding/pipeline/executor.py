"""Runs any schedule's table inside one jit, as one program that every device executes.

The executor knows no model. It gets three functions (`Model`) and a table, and returns a function
from parameters and microbatches to summed losses and gradients:

- `shard_map` is manual over `pipeline`, `data` and `fsdp`, so that nothing is communicated over
  them except what is written here; the other axes stay automatic inside a stage.
- A `lax.scan` runs over the table's ticks. In a tick a stage runs its forward, then its backward,
  each under a `lax.cond`; activations then move to the next stage and cotangents to the previous
  one with one `ppermute` each.
- A stage keeps only the *inputs* of the microbatches in flight and runs its forward again in the
  backward; the buffers are as deep as the table needs. The last stage therefore has no forward of
  its own, and with one stage the whole is plain gradient accumulation.
- Gradients are summed over microbatches locally and reduced over `data` once, after the scan.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.pipeline.plan import TABLES, Plan, make_plan
from sharding.pipeline.schedule import Schedule, verify
from sharding.rules import axes_of

#: Mesh axes whose communication is written out in this file.
MANUAL_AXES = ("pipeline", "data", "fsdp")

Tree = Any


class Model(Protocol):
    """A model as the executor sees it; arrays of `microbatch` have a leading batch dim."""

    def embed(self, ends: Tree, microbatch: Tree, /) -> Tree:
        """Returns the activations that enter the first layer."""
        ...

    def stack(self, layers: Tree, x: Tree, microbatch: Tree, first_layer: jax.Array, /) -> Tree:
        """Returns `x` after these layers; `first_layer` is the index of the first of them."""
        ...

    def head(self, ends: Tree, x: Tree, microbatch: Tree, /) -> tuple[jax.Array, jax.Array, dict]:
        """Returns (sum of losses, sum of weights, sums of further metrics), all scalars."""
        ...


def make_loss_and_grad(
    parts: Model, schedule: Schedule, mesh: jax.sharding.Mesh, specs: dict[str, Tree]
) -> Callable[[dict[str, Tree], Tree], tuple[dict, dict[str, Tree]]]:
    """Returns `f(params, batch) -> (sums, gradients)` that runs a training schedule.

    Args:
      parts: the model's three functions.
      schedule: a table with as many stages as `mesh.shape["pipeline"]`.
      mesh: all axes Auto.
      specs: `{"ends": ..., "layers": ...}`, the PartitionSpec of every parameter; every leaf of
        `layers` has its layers dim first, split over `pipeline`.

    `f` takes parameters of that structure and a batch whose arrays are `[M, B, ...]`; `sums` holds
    `loss`, `weight` and the head's metrics, summed over microbatches and devices; the gradients
    are those of `sums["loss"]`, in float32 or wider, laid out like the parameters.

    Raises:
      ValueError: a parameter is split over `data`, or over `pipeline` other than by layers.
    """
    _check_specs(specs, mesh)
    _check_schedule(schedule, mesh, has_backward=True)
    plan = make_plan(schedule)

    def local(ends, layers, batch):
        stage = _Stage(parts, plan, mesh.shape["pipeline"], ends, layers, batch)
        carry = stage.initial_carry(with_gradients=True)
        carry, _ = jax.lax.scan(stage.train_tick, carry, stage.columns())
        grads = {
            "ends": _reduce(carry["ends"], specs["ends"], mesh, ("pipeline", "data")),
            "layers": _reduce(carry["layers"], specs["layers"], mesh, ("data",)),
        }
        return _psum(carry["sums"], mesh, MANUAL_AXES), grads

    return _shard_map(local, mesh, specs, with_gradients=True)


def make_evaluate(
    parts: Model, schedule: Schedule, mesh: jax.sharding.Mesh, specs: dict[str, Tree]
) -> Callable[[dict[str, Tree], Tree], dict]:
    """Returns `f(params, batch) -> sums` that runs a forward-only schedule.

    Arguments and errors as for `make_loss_and_grad`.
    """
    _check_specs(specs, mesh)
    _check_schedule(schedule, mesh, has_backward=False)
    plan = make_plan(schedule)

    def local(ends, layers, batch):
        stage = _Stage(parts, plan, mesh.shape["pipeline"], ends, layers, batch)
        carry = stage.initial_carry(with_gradients=False)
        carry, _ = jax.lax.scan(stage.evaluate_tick, carry, stage.columns())
        return _psum(carry["sums"], mesh, MANUAL_AXES)

    return _shard_map(local, mesh, specs, with_gradients=False)


class _Stage:
    """One device's view of the run: its parameters, its batch, its column of the table."""

    def __init__(self, parts: Model, plan: Plan, num_stages: int, ends, layers, batch):
        self.parts, self.plan, self.num_stages = parts, plan, num_stages
        self.ends, self.layers, self.batch = ends, layers, batch
        assert {len(x) for x in jax.tree.leaves(batch)} == {plan.num_microbatches}
        self.index = jax.lax.axis_index("pipeline")
        layers_per_stage = jax.tree.leaves(layers)[0].shape[0]
        self.first_layer = self.index * layers_per_stage
        microbatch = self.microbatch(jnp.int32(0))
        self.x = jax.eval_shape(parts.embed, ends, microbatch)
        self.sums = jax.eval_shape(self._head_sums, ends, self.x, microbatch)

    def columns(self) -> dict[str, jax.Array]:
        """Returns this stage's column of every table of the plan, `int32[ticks]` each."""
        tables = {name: jnp.asarray(getattr(self.plan, name), jnp.int32) for name in TABLES}
        return {name: table[:, self.index] for name, table in tables.items()}

    def initial_carry(self, *, with_gradients: bool) -> dict[str, Tree]:
        def buffers(depth):
            slots = depth + 1 if self.num_stages > 1 else 0
            return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), self.x)

        carry = {"sums": _zeros(self.sums), "inputs": buffers(self.plan.depth)}
        if with_gradients:
            wide = jax.tree.map(_accumulator, {"ends": self.ends, "layers": self.layers})
            carry |= {**wide, "cotangents": buffers(self.plan.cotangent_depth)}
        return carry

    def train_tick(self, carry: dict[str, Tree], row: dict[str, jax.Array]):
        carry = dict(carry)
        if self.num_stages > 1:
            runs = (row["forward"] >= 0) & ~self._is_last()
            y = jax.lax.cond(
                runs, lambda: self._forward(carry["inputs"], row)[0], lambda: _zeros(self.x)
            )
            arriving = self._send(y, +1)
        accumulated = {key: carry[key] for key in ("sums", "ends", "layers")}
        accumulated, cotangent = self._when(
            row["backward"] >= 0,
            lambda: self._backward(accumulated, carry, row),
            lambda: (accumulated, _zeros(self.x)),
        )
        carry |= accumulated
        if self.num_stages > 1:
            carry["cotangents"] = _write(
                carry["cotangents"], row["arriving_cotangent_slot"], self._send(cotangent, -1)
            )
            carry["inputs"] = _write(carry["inputs"], row["arriving_slot"], arriving)
        return carry, None

    def evaluate_tick(self, carry: dict[str, Tree], row: dict[str, jax.Array]):
        def forward():
            y, microbatch = self._forward(carry["inputs"], row)
            sums = self._when(
                self._is_last(),
                lambda: _add(carry["sums"], self._head_sums(self.ends, y, microbatch)),
                lambda: carry["sums"],
            )
            return sums, y

        sums, y = self._when(row["forward"] >= 0, forward, lambda: (carry["sums"], _zeros(self.x)))
        inputs = carry["inputs"]
        if self.num_stages > 1:
            inputs = _write(inputs, row["arriving_slot"], self._send(y, +1))
        return {"sums": sums, "inputs": inputs}, None

    def microbatch(self, index: jax.Array) -> Tree:
        return _read(self.batch, index)

    def _forward(self, inputs, row) -> tuple[Tree, Tree]:
        microbatch = self.microbatch(row["forward"])
        x = self._input(inputs, row["forward_slot"], microbatch)
        return self.parts.stack(self.layers, x, microbatch, self.first_layer), microbatch

    def _backward(self, accumulated, carry, row) -> tuple[dict, Tree]:
        microbatch = self.microbatch(row["backward"])
        x = self._input(carry["inputs"], row["backward_slot"], microbatch)
        y, stack_vjp = jax.vjp(
            lambda layers, x: self.parts.stack(layers, x, microbatch, self.first_layer),
            self.layers,
            x,
        )

        def from_head():
            def loss(ends, y):
                sums = self._head_sums(ends, y, microbatch)
                return sums["loss"], sums

            (ends, cotangent), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(self.ends, y)
            return _add(accumulated["ends"], ends), _add(accumulated["sums"], sums), cotangent

        def from_next_stage():
            cotangent = _read(carry["cotangents"], row["cotangent_slot"])
            return accumulated["ends"], accumulated["sums"], cotangent

        ends, sums, cotangent = self._when(self._is_last(), from_head, from_next_stage)
        layers, cotangent = stack_vjp(cotangent)

        def into_embed():
            _, vjp = jax.vjp(lambda ends: self.parts.embed(ends, microbatch), self.ends)
            return _add(ends, vjp(cotangent)[0])

        ends = self._when(self._is_first(), into_embed, lambda: ends)
        layers = _add(accumulated["layers"], layers)
        return {"sums": sums, "ends": ends, "layers": layers}, cotangent

    def _input(self, inputs, slot, microbatch) -> Tree:
        return self._when(
            self._is_first(),
            lambda: self.parts.embed(self.ends, microbatch),
            lambda: _read(inputs, slot),
        )

    def _head_sums(self, ends, x, microbatch) -> dict[str, jax.Array]:
        loss, weight, metrics = self.parts.head(ends, x, microbatch)
        assert not {"loss", "weight"} & metrics.keys(), "a head's metric may not be named so"
        return {"loss": loss, "weight": weight, **metrics}

    def _is_first(self) -> jax.Array:
        return self.index == 0

    def _is_last(self) -> jax.Array:
        return self.index == self.num_stages - 1

    def _when(self, predicate, then: Callable[[], Tree], otherwise: Callable[[], Tree]) -> Tree:
        """A `lax.cond`; with one stage every predicate is known to hold."""
        return then() if self.num_stages == 1 else jax.lax.cond(predicate, then, otherwise)

    def _send(self, x: Tree, shift: int) -> Tree:
        """Returns what the neighbour sends: stage i's `x` goes to stage i + shift."""
        stages = range(self.num_stages)
        pairs = [(i, i + shift) for i in stages if i + shift in stages]
        return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "pipeline", pairs), x)


def _shard_map(local, mesh, specs, *, with_gradients: bool):
    manual = jax.tree.map(_manual_part, specs, is_leaf=_is_spec)
    gather = jax.tree.map(lambda spec: _gather(spec, mesh), specs, is_leaf=_is_spec)

    def gathered(ends, layers, batch):
        ends = jax.tree.map(lambda f, x: f(x), gather["ends"], ends)
        layers = jax.tree.map(lambda f, x: f(x), gather["layers"], layers)
        return local(ends, layers, batch)

    mapped = jax.shard_map(
        gathered,
        mesh=mesh,
        in_specs=(manual["ends"], manual["layers"], PartitionSpec(None, ("data", "fsdp"))),
        out_specs=(PartitionSpec(), manual) if with_gradients else PartitionSpec(),
        # Axes of size 1 too: XLA then sees no partly manual mesh unless it has to.
        axis_names={axis for axis, size in mesh.shape.items() if size == 1 or axis in MANUAL_AXES},
        check_vma=False,
    )
    return lambda params, batch: mapped(params["ends"], params["layers"], batch)


def _check_schedule(schedule: Schedule, mesh, *, has_backward: bool) -> None:
    verify(schedule)
    assert schedule.num_stages == mesh.shape["pipeline"]
    assert schedule.has_backward() == has_backward


def _check_specs(specs: dict[str, Tree], mesh) -> None:
    """Refuses layouts for which a stage would compute with a part of a parameter."""
    split = {axis for axis in ("data", "pipeline") if mesh.shape[axis] > 1}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec):
        name = ".".join(str(key.key) for key in path[1:])
        of_layers = path[0].key == "layers"
        first = axes_of(PartitionSpec(*spec[:1]))
        if of_layers and "pipeline" in split - first:
            raise ValueError(
                f"parameter {name} is laid out as {spec}: layers must be split over 'pipeline'; "
                "set rules.layers=pipeline"
            )
        rest = axes_of(PartitionSpec(*spec[1:])) | (first - {"pipeline"} if of_layers else first)
        for axis in sorted(split & rest):
            raise ValueError(
                f"parameter {name} is laid out as {spec}: nothing but layers can be split over "
                f"'pipeline', and nothing but the batch over 'data'; take {axis!r} out of the "
                "rule, or split over 'fsdp' instead"
            )


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)


def _manual_part(spec: PartitionSpec) -> PartitionSpec:
    def keep(part):
        axes = part if isinstance(part, tuple) else (part,)
        return tuple(axis for axis in axes if axis in MANUAL_AXES) or None

    return PartitionSpec(*(keep(part) for part in spec))


def _fsdp_dim(spec: PartitionSpec, mesh) -> int | None:
    """Returns the dim that is split over fsdp, if there is one and it is really split."""
    if mesh.shape["fsdp"] == 1:
        return None
    return next((i for i, p in enumerate(spec) if "fsdp" in axes_of(PartitionSpec(p))), None)


def _gather(spec: PartitionSpec, mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that puts a parameter's fsdp shards together, once a step."""
    dim = _fsdp_dim(spec, mesh)
    if dim is None:
        return lambda x: x
    return lambda x: jax.lax.all_gather(x, "fsdp", axis=dim, tiled=True)


def _reduce(grads: Tree, specs: Tree, mesh, axes: tuple[str, ...]) -> Tree:
    """Returns gradients summed over `axes` and `fsdp`; split over `fsdp` where parameters are."""

    def reduce(grad, spec):
        dim = _fsdp_dim(spec, mesh)
        if dim is None:
            return _psum(grad, mesh, (*axes, "fsdp"))
        grad = jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=dim, tiled=True)
        return _psum(grad, mesh, axes)

    return jax.tree.map(reduce, grads, specs)


def _psum(tree: Tree, mesh, axes: tuple[str, ...]) -> Tree:
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return jax.lax.psum(tree, axes) if axes else tree


def _accumulator(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _add(total: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, tree)


def _read(buffers: Tree, slot: jax.Array) -> Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), buffers)


def _write(buffers: Tree, slot: jax.Array, value: Tree) -> Tree:
    return jax.tree.map(
        lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, slot, 0), buffers, value
    )
