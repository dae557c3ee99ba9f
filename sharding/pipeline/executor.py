"""Runs any schedule's table inside one jit, as one program that every device executes.

The executor knows no model. It gets a model's functions (`Model`) and a table, and returns a
function from parameters and microbatches to summed losses and gradients:

- `shard_map` is manual over `pipeline`, `data` and `fsdp`, so that nothing is communicated over
  them except what is written here and in parameters.py; the other axes stay automatic.
- A `lax.scan` runs over the table's ticks. In a tick a stage runs at most one forward, one
  backward (or its half for the input's gradient) and one weight gradient, each under a `lax.cond`.
  What a forward gives out leaves for the next stage before the backward begins, and what an input
  gradient gives out before the weight gradient: a send can hide behind the work that follows it.
- Everything that waits for a later tick lies in the buffers that plan.py allots.
- Gradients are summed over microbatches locally, and over `data` once, after the scan.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sharding.collectives import psum
from sharding.pipeline.config import PipelineConfig
from sharding.pipeline.layers import Layers
from sharding.pipeline.layout import Layout
from sharding.pipeline.parameters import (
    MANUAL_AXES,
    check_specs,
    gather,
    manual_specs,
    on_shards,
    reduce,
    total,
)
from sharding.pipeline.plan import Plan, make_plan
from sharding.pipeline.table import Schedule
from sharding.rules import axes_of

Tree = Any
Params = dict[str, Tree]


class Model(Protocol):
    """A model as the executor sees it; arrays of `microbatch` have a leading batch dim."""

    @property
    def blocks(self) -> Mapping[str, Callable[[Tree, Tree, Tree, jax.Array], Tree]]:
        """Stack -> `block(params of one layer, x, microbatch, number of the layer) -> x`."""
        ...

    @property
    def before(self) -> Mapping[str, Callable[[Tree, Tree, Tree], Tree]]:
        """Stack -> `before(ends, x, microbatch) -> x`, for stacks that x is made ready for."""
        ...

    def embed(self, ends: Tree, microbatch: Tree, /) -> Tree:
        """Returns the activations that enter the first layer: a tree of floating arrays."""
        ...

    def head(self, ends: Tree, x: Tree, microbatch: Tree, /) -> tuple[jax.Array, jax.Array, dict]:
        """Returns (sum of losses, sum of weights, sums of further metrics), all scalars."""
        ...


def make_loss_and_grad(
    model: Model,
    schedule: Schedule,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    specs: Params,
    config: PipelineConfig,
) -> Callable[[Params, Tree], tuple[dict, Params]]:
    """Returns `f(params, batch) -> (sums, gradients)` that runs a training schedule.

    Args:
      schedule: a verified table with as many stages as `mesh.shape["pipeline"]`.
      layouts: of every stack, in the order in which they run.
      mesh: all axes Auto.
      specs: `{"ends": ..., "layers": {stack: ...}}`, the PartitionSpec of every parameter; every
        leaf of `layers` has its dim of slots first, split over `pipeline`.
      config: `remat`, `share_vocab` and `gather` of it are followed here.

    `f` takes parameters of that structure and a batch whose arrays are `[M, B, ...]`; `sums` holds
    `loss`, `weight` and the head's metrics, summed over microbatches and devices; the gradients
    are those of `sums["loss"]`, in float32 or wider, laid out like the parameters.

    Raises:
      ValueError: a parameter is split over `data`, or over `pipeline` other than by layers.
    """
    assert schedule.has_backward()
    shares_ends = config.share_vocab and mesh.shape["pipeline"] > 1
    plan = make_plan(schedule, remat=config.remat, shares_ends=shares_ends)

    def local(ends, layers, batch):
        stage = _Stage(model, plan, layouts, mesh, specs, config, ends, layers, batch)
        carry, _ = jax.lax.scan(stage.train_tick, stage.training_carry(), stage.columns())
        grads = {
            "ends": reduce(carry["grads"]["ends"], specs["ends"], mesh, ("pipeline", "data")),
            "layers": reduce(carry["grads"]["layers"], specs["layers"], mesh, ("data",)),
        }
        return total(carry["sums"], mesh, MANUAL_AXES), grads

    check_specs(specs, mesh, shares_ends=shares_ends)
    return _on_mesh(local, schedule, mesh, specs, (PartitionSpec(), manual_specs(specs)))


def make_evaluate(
    model: Model,
    schedule: Schedule,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    specs: Params,
    config: PipelineConfig,
) -> Callable[[Params, Tree], dict]:
    """Returns `f(params, batch) -> sums` that runs a schedule of forwards alone.

    Arguments and errors as for `make_loss_and_grad`.
    """
    assert not schedule.has_backward()
    shares_ends = config.share_vocab and mesh.shape["pipeline"] > 1
    plan = make_plan(schedule, shares_ends=shares_ends)

    def local(ends, layers, batch):
        stage = _Stage(model, plan, layouts, mesh, specs, config, ends, layers, batch)
        carry, _ = jax.lax.scan(stage.evaluate_tick, stage.evaluation_carry(), stage.columns())
        return total(carry["sums"], mesh, MANUAL_AXES)

    check_specs(specs, mesh, shares_ends=shares_ends)
    return _on_mesh(local, schedule, mesh, specs, PartitionSpec())


def _on_mesh(local, schedule: Schedule, mesh: Mesh, specs: Params, out_specs):
    assert schedule.num_stages == mesh.shape["pipeline"]
    manual, batch = manual_specs(specs), PartitionSpec(None, ("data", "fsdp"))
    mapped = on_shards(local, mesh, (manual["ends"], manual["layers"], batch), out_specs)
    return lambda params, batch: mapped(params["ends"], params["layers"], batch)


class _Stage:
    """One device's view of the run: its parameters, its batch, its column of the table."""

    def __init__(self, model, plan: Plan, layouts, mesh, specs, config, ends, layers, batch):
        self.model, self.plan, self.batch = model, plan, batch
        self.num_stages = mesh.shape["pipeline"]
        self.shares_ends = config.share_vocab and self.num_stages > 1
        self.recomputes = config.remat == "full"
        assert {len(x) for x in jax.tree.leaves(batch)} == {plan.num_microbatches}
        self.index = jax.lax.axis_index("pipeline")
        self.ends = gather(ends, specs["ends"], mesh)
        self.splits_end = jax.tree.map(lambda spec: "pipeline" in axes_of(spec), specs["ends"])
        microbatch = self._microbatch(jnp.int32(0))
        self.x = jax.eval_shape(model.embed, self.ends, microbatch)
        self.sums = jax.eval_shape(self._head, self.ends, self.x, microbatch)
        self.layers: dict[str, Layers] = {}
        self.begins: dict[str, jax.Array] = {}
        for name, layout in layouts.items():
            stack_specs, params = specs["layers"][name], layers[name]
            once = config.gather == "step"  # or per layer, without the dim of slots
            self.layers[name] = Layers(
                model.blocks[name],
                gather(params, stack_specs, mesh) if once else params,
                (lambda x: x) if once else partial(gather, specs=stack_specs, mesh=mesh, skip=1),
                layout.layer_of_slot.reshape(self.num_stages, -1),
                (self.index, self.x, microbatch),
                len(layout.chunks[0]),
                splits=plan.splits_backward,
            )
            begins = [[first == 0 and count > 0 for first, count in s] for s in layout.chunks]
            self.begins[name] = jnp.array(begins)[self.index]

    def columns(self) -> dict[str, jax.Array]:
        """Returns this stage's column of every table, and what all share: int32[ticks] each."""
        tables = {k: jnp.asarray(t, jnp.int32) for k, t in self.plan.tables.items()}
        shared = {k: jnp.asarray(row, jnp.int32) for k, row in self.plan.shared.items()}
        return {name: table[:, self.index] for name, table in tables.items()} | shared

    def evaluation_carry(self) -> dict[str, Tree]:
        return {"sums": _zeros(self.sums), "input": self._buffer("input")}

    def training_carry(self) -> dict[str, Tree]:
        depths = self.plan.depths
        layers = {name: x.gradient_shapes() for name, x in self.layers.items()}
        carry = {
            "sums": _zeros(self.sums),
            "grads": {"ends": jax.tree.map(_accumulator, self.ends), "layers": _zeros(layers)},
            "input": self._buffer("input"),
            "cotangent": self._buffer("cotangent"),
            "kept": self._kept(depths),
        }
        if "head_input" in depths:
            carry["head_input"] = self._buffer("head_input")
        return carry

    def evaluate_tick(self, carry: dict[str, Tree], row: dict[str, jax.Array]):
        carry = self._embed_together(dict(carry), row)

        def forward():
            microbatch = self._microbatch(row["F.microbatch"])
            x = self._input(carry, row, "F", microbatch)
            return self._evaluate_chunk(row["F.chunk"], x, microbatch)

        def head(x, microbatch_index):
            microbatch = self._microbatch(microbatch_index)
            return _add(carry["sums"], self._head(self.ends, x, microbatch))

        y = self._if_runs("F", row, forward, lambda: _zeros(self.x))
        arrivals = self._send("F", y)
        if self.shares_ends:
            sums = jax.lax.cond(
                row["head"] >= 0,
                lambda: self._only_on(
                    self.plan.last_stage,
                    head(self._from(self.plan.last_stage, y), row["head"]),
                    carry["sums"],
                ),
                lambda: carry["sums"],
            )
        else:
            sums = self._if(
                "F",
                "is_last",
                row,
                lambda: head(y, row["F.microbatch"]),
                lambda: carry["sums"],
            )
        return self._receive(carry | {"sums": sums}, row, arrivals), None

    def train_tick(self, carry: dict[str, Tree], row: dict[str, jax.Array]):
        carry = self._embed_together(dict(carry), row)
        arrivals = {}
        if self.plan.runs("F") is not False:
            waiting = {name: carry[name] for name in ("kept", "head_input") if name in carry}
            y, waiting = self._if_runs(
                "F", row, lambda: self._forward(carry, row), lambda: (_zeros(self.x), waiting)
            )
            carry |= waiting
            arrivals |= self._send("F", y)
        dy = self._head_together(carry, row) if self.shares_ends else None
        changed = {name: carry[name] for name in ("sums", "grads", "kept")}
        dx, changed = self._if_runs(
            "B", row, lambda: self._backward(carry, row, dy), lambda: (_zeros(self.x), changed)
        )
        carry |= changed
        arrivals |= self._send("B", dx)
        if self.shares_ends:
            self._embed_gradient_together(carry, row, dx)
        if self.plan.runs("W") is not False:
            carry["grads"] = self._if_runs(
                "W", row, lambda: self._weight_gradient(carry, row), lambda: carry["grads"]
            )
        return self._receive(carry, row, arrivals), None

    # One stage's operations.

    def _forward(self, carry, row) -> tuple[Tree, dict]:
        microbatch = self._microbatch(row["F.microbatch"])
        x = self._input(carry, row, "F", microbatch)
        if self.recomputes:
            y, kept = self._evaluate_chunk(row["F.chunk"], x, microbatch), carry["kept"]
        else:
            slots = self._slots("F", row)
            y, kept = self._forward_chunk(row["F.chunk"], x, microbatch, carry["kept"], slots)
        waiting = {"kept": kept}
        if "head_input" in carry:
            waiting["head_input"] = self._if(
                "F",
                "is_last",
                row,
                lambda: _write(carry["head_input"], row["F.head_input"], y),
                lambda: carry["head_input"],
            )
        return y, waiting

    def _backward(self, carry, row, dy_of_shared_head) -> tuple[Tree, dict]:
        """Returns the input's gradient, and the sums, gradients and buffers after it."""
        microbatch, chunk = self._microbatch(row["B.microbatch"]), row["B.chunk"]
        kept, slots, y = carry["kept"], self._slots("B", row), None
        if self.recomputes:
            x = self._input(carry, row, "B", microbatch)
            kept = self._with_scratch(kept)
            slots = slots | {"saved": jnp.int32(0)}
            y, kept = self._forward_chunk(chunk, x, microbatch, kept, slots)
        if "head_input" in carry:
            y = _read(carry["head_input"], row["B.head_input"])

        def from_head():
            if self.shares_ends:
                return carry["sums"], carry["grads"]["ends"], dy_of_shared_head
            sums, ends, dy = self._head_gradient(y, microbatch)
            return _add(carry["sums"], sums), _add(carry["grads"]["ends"], ends), dy

        def from_next_chunk():
            dy = _read(carry["cotangent"], row["B.cotangent"])
            return carry["sums"], carry["grads"]["ends"], dy

        sums, ends, dx = self._if("B", "is_last", row, from_head, from_next_chunk)
        grads = {"ends": ends, "layers": carry["grads"]["layers"]}
        dx, grads, kept = self._backward_chunk(chunk, dx, microbatch, kept, slots, grads)
        if not self.shares_ends:
            grads["ends"] = self._if(
                "B",
                "is_first",
                row,
                lambda: _add(grads["ends"], self._embed_gradient(dx, microbatch)),
                lambda: grads["ends"],
            )
        kept = {n: {b: kept[n][b] for b in carry["kept"][n]} for n in carry["kept"]}
        return dx, {"sums": sums, "grads": grads, "kept": kept}

    def _weight_gradient(self, carry, row) -> Params:
        microbatch = self._microbatch(row["W.microbatch"])
        chunk, slots = row["W.chunk"], self._slots("W", row)
        grads = dict(carry["grads"]["layers"])
        for name, layers in self.layers.items():
            kept = carry["kept"][name]
            grads[name] = layers.weight_gradient(chunk, microbatch, kept, slots, grads[name])
        return carry["grads"] | {"layers": grads}

    # A chunk: stacks one after another, each made ready for where it begins.

    def _evaluate_chunk(self, chunk, x: Tree, microbatch) -> Tree:
        for name, layers in self.layers.items():
            x = self._before(name, chunk, x, microbatch)
            x = layers.evaluate(chunk, x, microbatch)
        return x

    def _forward_chunk(self, chunk, x: Tree, microbatch, kept, slots) -> tuple[Tree, Tree]:
        kept = dict(kept)
        for name, layers in self.layers.items():
            if name in self.model.before:
                inputs = _write(kept[name]["before"], slots["saved"], x)
                kept[name] = kept[name] | {"before": inputs}
            x = self._before(name, chunk, x, microbatch)
            x, buffers = layers.forward(chunk, x, microbatch, kept[name], slots)
            kept[name] = kept[name] | buffers
        return x, kept

    def _backward_chunk(self, chunk, dx: Tree, microbatch, kept, slots, grads):
        kept, ends, of_layers = dict(kept), grads["ends"], dict(grads["layers"])
        for name, layers in reversed(self.layers.items()):
            args = (chunk, dx, microbatch, kept[name], slots, of_layers[name])
            if self.plan.splits_backward:
                dx, of_layers[name], handed = layers.input_gradient(*args)
                kept[name] = kept[name] | {"handed": handed}
            else:
                dx, of_layers[name] = layers.backward(*args)
            if name in self.model.before:
                x = _read(kept[name]["before"], slots["saved"])
                ends, dx = self._before_gradient(name, chunk, x, dx, microbatch, ends)
        return dx, {"ends": ends, "layers": of_layers}, kept

    def _before(self, name: str, chunk, x: Tree, microbatch) -> Tree:
        if name not in self.model.before:
            return x
        return jax.lax.cond(
            self.begins[name][chunk],
            lambda: self.model.before[name](self.ends, x, microbatch),
            lambda: x,
        )

    def _before_gradient(self, name: str, chunk, x, dx, microbatch, ends):
        def through():
            before = self.model.before[name]
            _, vjp = jax.vjp(lambda ends, x: before(ends, x, microbatch), self.ends, x)
            gradient, dx_before = vjp(dx)
            return _add(ends, gradient), dx_before

        return jax.lax.cond(self.begins[name][chunk], through, lambda: (ends, dx))

    # Embedding and head, on one stage or on all of them.

    def _input(self, carry, row, kind: str, microbatch) -> Tree:
        arrived = lambda: _read(carry["input"], row[f"{kind}.input"])  # noqa: E731
        if self.shares_ends:
            return arrived()
        embed = lambda: self.model.embed(self.ends, microbatch)  # noqa: E731
        return self._if(kind, "is_first", row, embed, arrived)

    def _head(self, ends, x, microbatch) -> dict[str, jax.Array]:
        loss, weight, metrics = self.model.head(ends, x, microbatch)
        assert not {"loss", "weight"} & metrics.keys(), "a head's metric may not be named so"
        return {"loss": loss, "weight": weight, **metrics}

    def _head_gradient(self, y, microbatch) -> tuple[dict, Tree, Tree]:
        def loss(ends, y):
            sums = self._head(ends, y, microbatch)
            return sums["loss"], sums

        (ends, dy), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(self.ends, y)
        return sums, ends, dy

    def _embed_gradient(self, dx, microbatch) -> Tree:
        _, vjp = jax.vjp(lambda ends: self.model.embed(ends, microbatch), self.ends)
        return vjp(dx)[0]

    def _embed_together(self, carry, row) -> dict:
        """Returns the carry with the microbatch that begins in this tick embedded."""
        if not self.shares_ends:
            return carry

        def embed():
            x = self.model.embed(self.ends, self._microbatch(row["embed"]))
            written = _write(carry["input"], row["F.input"], x)
            return self._only_on(self.plan.first_stage, written, carry["input"])

        return carry | {"input": jax.lax.cond(row["embed"] >= 0, embed, lambda: carry["input"])}

    def _head_together(self, carry, row) -> Tree:
        """Returns the gradient of the head's input; adds to the carry what the head yields."""
        last = self.plan.last_stage

        def head():
            y = self._from(last, _read(carry["head_input"], row["B.head_input"]))
            sums, ends, dy = self._head_gradient(y, self._microbatch(row["head"]))
            sums = self._only_on(last, _add(carry["sums"], sums), carry["sums"])
            return sums, self._add_ends(last, carry["grads"]["ends"], ends), dy

        def nothing():
            return carry["sums"], carry["grads"]["ends"], _zeros(self.x)

        sums, ends, dy = jax.lax.cond(row["head"] >= 0, head, nothing)
        carry |= {"sums": sums, "grads": carry["grads"] | {"ends": ends}}
        return dy

    def _embed_gradient_together(self, carry, row, dx) -> None:
        first = self.plan.first_stage

        def embed():
            gradient = self._embed_gradient(
                self._from(first, dx), self._microbatch(row["embed_gradient"])
            )
            return self._add_ends(first, carry["grads"]["ends"], gradient)

        ends = jax.lax.cond(row["embed_gradient"] >= 0, embed, lambda: carry["grads"]["ends"])
        carry |= {"grads": carry["grads"] | {"ends": ends}}

    def _add_ends(self, stage: int, total: Tree, gradient: Tree) -> Tree:
        """Adds gradients that all stages have computed; those of whole parameters on one."""
        return jax.tree.map(
            lambda t, g, is_split: (
                t + (g if is_split else jnp.where(self.index == stage, g, 0)).astype(t.dtype)
            ),
            total,
            gradient,
            self.splits_end,
        )

    def _from(self, stage: int, x: Tree) -> Tree:
        """Returns, on every stage, what `stage` has."""
        zeros = _zeros(x)
        return psum(self._only_on(stage, x, zeros), ("pipeline",))

    def _only_on(self, stage: int, then: Tree, otherwise: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(self.index == stage, a, b), then, otherwise)

    # Buffers and sends.

    def _microbatch(self, index: jax.Array) -> Tree:
        return _read(self.batch, index)

    def _buffer(self, name: str) -> Tree:
        """Returns an empty buffer of activations, with a slot for arrivals that nobody reads."""
        depth = self.plan.depths[name]
        depth += depth > 0
        return jax.tree.map(lambda x: jnp.zeros((depth, *x.shape), x.dtype), self.x)

    def _kept(self, depths: Mapping[str, int]) -> dict[str, dict]:
        kept: dict[str, dict] = {}
        for name, layers in self.layers.items():
            kept[name] = layers.buffers(depths)
            if name in self.model.before and "saved" in depths:
                shape = lambda x: jnp.zeros((depths["saved"], *x.shape), x.dtype)  # noqa: E731
                kept[name]["before"] = jax.tree.map(shape, self.x)
        return kept

    def _with_scratch(self, kept: dict[str, dict]) -> dict[str, dict]:
        """Returns the buffers with room for what lives no longer than a tick."""
        return {name: buffers | kept[name] for name, buffers in self._kept({"saved": 1}).items()}

    def _slots(self, kind: str, row) -> dict[str, jax.Array]:
        names = ("saved", "for_weights", "handed")
        return {name: row[f"{kind}.{name}"] for name in names if f"{kind}.{name}" in row}

    def _if_runs(self, kind: str, row, then: Callable[[], Tree], otherwise: Callable[[], Tree]):
        runs = row[f"{kind}.microbatch"] >= 0
        return _cond(self.plan.runs(kind), runs, then, otherwise)

    def _if(self, kind: str, flag: str, row, then, otherwise) -> Tree:
        return _cond(self.plan.holds(kind, flag), row[f"{kind}.{flag}"] > 0, then, otherwise)

    def _send(self, kind: str, x: Tree) -> dict[str, Tree]:
        """Returns, per channel of that kind, what arrives."""

        def moved(channel):
            if channel.shift == 0:
                return x
            return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "pipeline", channel.pairs), x)

        return {c.name: moved(c) for c in self.plan.channels if c.kind == kind}

    def _receive(self, carry: dict, row, arrivals: dict[str, Tree]) -> dict:
        for name, x in arrivals.items():
            buffer = "input" if name.startswith("F") else "cotangent"
            carry = carry | {buffer: _write(carry[buffer], row[name], x)}
        return carry


def _cond(known: bool | None, predicate: jax.Array, then, otherwise) -> Tree:
    """A `lax.cond`, or nothing but the branch that is always taken."""
    if known is not None:
        return then() if known else otherwise()
    return jax.lax.cond(predicate, then, otherwise)


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
