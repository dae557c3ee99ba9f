"""Executes a pipeline schedule inside one jit, as one program that every device runs.

The executor knows no model. It takes a model's functions (`Model`) and a schedule table, and builds
a function from parameters and microbatches to summed losses and gradients. A `lax.scan` runs over
the ticks of the table. For example, tick 6 of `zero_bubble` with 3 stages and 8 microbatches, on
stage 1, whose cell is F5 I3 W2:

    time     ------------------------------------------------------------------------------>
    compute  [embed*]  [ F5 ]  [head*]  [    I3    ]  [embed gradient*]  [   W2   ]  [arrive]
    send               y of F5 to stage 2  =======================================>  |
    send                                  dx of I3 to stage 0  ===================>  |

    F5  forward of microbatch 5              y   its output: activations
    I3  input gradient of microbatch 3       dx  its output: a cotangent
    W2  weight gradient of microbatch 2
    *   only with pipeline.share_vocab, where all stages run embedding and head together

Each of F, B (or I) and W runs under a `lax.cond`, because a stage may be idle. A forward's output
is sent before the backward begins, and the input gradient's output before the weight gradient
begins, so a send can overlap with the work that follows it. Sends end with the tick.

- `shard_map` is manual over `pipeline`, `data` and `fsdp`, so all communication over these axes is
  written here and in gather.py. The other axes stay automatic.
- Everything that waits for a later tick is stored in the buffers that buffers.py plans.
- Gradients are summed over microbatches locally, and over `data` once, after the scan.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.estimate.labels import counted_as
from sharding.mesh import REPLICA_AXES
from sharding.pipeline.config import PipelineConfig
from sharding.pipeline.layout import Layout
from sharding.pipeline.runtime.buffers import Channel, ExecutionPlan, make_execution_plan
from sharding.pipeline.runtime.chunks import Chunks, StackPart
from sharding.pipeline.runtime.embed_and_head import EmbedAndHead
from sharding.pipeline.runtime.gather import (
    MANUAL_AXES,
    Sharing,
    check_specs,
    manual_specs,
    on_shards,
    total,
)
from sharding.pipeline.runtime.layers import Layers
from sharding.pipeline.runtime.packed_activations import PackedActivations
from sharding.pipeline.runtime.trees import Flag, add, branch, read, wide, write, zeros
from sharding.pipeline.schedules.table import Schedule
from sharding.spec import axes_of

Tree = Any
Params = dict[str, Tree]

#: Named scope of the loop over ticks. XLA keeps scope names, so sharding/analysis/cost/ can find
#: the loop in a compiled program, and the parts of it that run only in some ticks.
TICKS = "pipeline_ticks"


def scope_of(part: str) -> str:
    """Return the named scope of a part that runs in some ticks only.

    Args:
        part: an operation (F, B, W), an operation under a flag of the table (B.is_last), or work
            that all stages do together (a key of `ExecutionPlan.shared`).
    """
    return f"pipeline_{part}"


class Model(Protocol):
    """A model as the executor sees it.

    `ends` are the parameters outside the stacks. The arrays of `microbatch` have a leading batch
    dim.
    """

    @property
    def blocks(self) -> Mapping[str, Callable[[Tree, Tree, Tree, jax.Array], Tree]]:
        """Stack -> `block(params of one layer, x, microbatch, layer number) -> x`."""
        ...

    @property
    def before(self) -> Mapping[str, Callable[[Tree, Tree, Tree], Tree]]:
        """Stack -> `before(ends, x, microbatch) -> x`, run ahead of the stack's first layer.

        Stacks without such a function are absent. The output may have another type than the input.
        """
        ...

    def types(self, ends: Tree, microbatch: Tree, /) -> Mapping[str, tuple[Tree, Tree]]:
        """Return stack -> (type before the stack, type of its blocks' input and output).

        Types are trees of ShapeDtypeStructs. The stacks are in the order in which they run.
        """
        ...

    def embed(self, ends: Tree, microbatch: Tree, /) -> Tree:
        """Return the activations that enter the first layer: a tree of floating-point arrays."""
        ...

    def head(self, ends: Tree, x: Tree, microbatch: Tree, /) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of losses, sum of weights, sums of further metrics), all scalars."""
        ...

    @property
    def teach(self) -> Callable[[Tree, Tree, Tree], dict[str, jax.Array]] | None:
        """`teach(ends, x, microbatch) -> arrays [B, ...]`; replaces the head in `make_teach`."""
        ...


def make_loss_and_grad(
    model: Model,
    schedule: Schedule,
    layouts: Mapping[str, Layout],
    sharing: Sharing,
    config: PipelineConfig,
) -> Callable[[Params, Tree], tuple[dict, Params]]:
    """Build the function that computes losses and gradients with a training schedule.

    Args:
        model: the model's functions.
        schedule: a verified table with as many stages as the mesh has devices along `pipeline`.
        layouts: the layout of every stack, in the order in which the stacks run.
        sharing: how the parameters are sharded over the mesh.
        config: only `remat` and `share_vocab` are read.

    Returns:
        `f(params, batch) -> (sums, gradients)`. `params` has the structure of `sharing.specs`, and
        the arrays of `batch` are `[M, B, ...]`. `sums` holds `loss`, `weight` and the head's
        metrics, summed over microbatches and devices. `gradients` are the gradients of
        `sums["loss"]`, in float32 or wider, sharded like the parameters.

    Raises:
        ValueError: a parameter is split over `data` without ZeRO, or over `pipeline` in another dim
            than layers.
    """
    assert schedule.has_backward()
    plan = _plan(schedule, sharing, config)

    def local(params, batch):
        stage = _Stage(model, plan, layouts, sharing, params, batch)
        start = stage.training_carry()
        columns = stage.columns()
        with jax.named_scope(TICKS):
            carry, _ = jax.lax.scan(stage.train_tick, start, columns)
        sums = total(carry["sums"], sharing.mesh, MANUAL_AXES)
        return sums, stage.reduced(carry["grads"])

    return _on_mesh(local, plan, sharing, (PartitionSpec(), manual_specs(sharing.specs)))


def make_evaluate(
    model: Model,
    schedule: Schedule,
    layouts: Mapping[str, Layout],
    sharing: Sharing,
    config: PipelineConfig,
) -> Callable[[Params, Tree], dict]:
    """Build the function that computes losses with a schedule of forwards only.

    Args:
        model: as for `make_loss_and_grad`.
        schedule: a verified table without backwards.
        layouts: as for `make_loss_and_grad`.
        sharing: as for `make_loss_and_grad`.
        config: as for `make_loss_and_grad`.

    Returns:
        `f(params, batch) -> sums`.

    Raises:
        ValueError: as for `make_loss_and_grad`.
    """
    assert not schedule.has_backward()
    plan = _plan(schedule, sharing, config)

    def local(params, batch):
        stage = _Stage(model, plan, layouts, sharing, params, batch)
        sums = stage.forwards(zeros(stage.sums), stage.with_sums)
        return total(sums, sharing.mesh, MANUAL_AXES)

    return _on_mesh(local, plan, sharing, PartitionSpec())


def make_teach(
    model: Model,
    schedule: Schedule,
    layouts: Mapping[str, Layout],
    sharing: Sharing,
    config: PipelineConfig,
) -> Callable[[Params, Tree], dict[str, jax.Array]]:
    """Build the function that runs forwards up to `model.teach`.

    Args:
        model: as for `make_loss_and_grad`; it has `teach`.
        schedule: a verified table without backwards.
        layouts: as for `make_loss_and_grad`.
        sharing: as for `make_loss_and_grad`.
        config: as for `make_loss_and_grad`.

    Returns:
        `f(params, batch) -> teacher_outputs`, the outputs of `teach` for every microbatch: arrays
        `[M, B, ...]`, sharded like the batch.

    Raises:
        ValueError: as for `make_loss_and_grad`.
    """
    assert not schedule.has_backward()
    plan = _plan(schedule, sharing, config)

    def local(params, batch):
        stage = _Stage(model, plan, layouts, sharing, params, batch)
        teacher_outputs = stage.forwards(
            zeros(stage.teacher_outputs, plan.num_microbatches), stage.with_teacher_outputs
        )
        return total(teacher_outputs, sharing.mesh, ("pipeline",))

    return _on_mesh(local, plan, sharing, PartitionSpec(None, REPLICA_AXES))


def _plan(schedule: Schedule, sharing: Sharing, config: PipelineConfig) -> ExecutionPlan:
    assert schedule.num_stages == sharing.mesh.shape["pipeline"]
    shares_vocab = config.share_vocab and schedule.num_stages > 1
    return make_execution_plan(schedule, remat=config.remat, shares_vocab=shares_vocab)


def _on_mesh(local, plan: ExecutionPlan, sharing: Sharing, out_specs):
    check_specs(sharing, shares_vocab=plan.shares_vocab)
    batch = PartitionSpec(None, REPLICA_AXES)
    return on_shards(local, sharing.mesh, (manual_specs(sharing.specs), batch), out_specs)


class _Stage:
    """One device's view of the run: its parameters, its batch, its column of the table.

    The loop carries a dict:

    - `sums`: sums of losses, weights and metrics so far.
    - `grads`: sums of gradients so far.
    - `kept`: per stack, the buffers `saved`, `for_weights` and `handed`.
    - `input`, `cotangent`, `head_input`: the buffers of activations.

    Within a tick it also has `arrived`, the values that this tick reads from `input` and
    `cotangent`, and with `share_vocab` `dy`, the gradient of the head's input.
    """

    def __init__(self, model, plan: ExecutionPlan, layouts, sharing: Sharing, params, batch):
        self.plan = plan
        self.batch = batch
        assert {len(x) for x in jax.tree.leaves(batch)} == {plan.num_microbatches}
        self.index = jax.lax.axis_index("pipeline")
        of_ends = sharing.of_ends()
        self.shards: dict[str, Any] = {"ends": of_ends, "layers": {}}
        ends = of_ends.together(params["ends"])
        is_split = jax.tree.map(lambda spec: "pipeline" in axes_of(spec), sharing.specs["ends"])
        example = self._microbatch(jnp.int32(0))
        types = model.types(ends, example)
        packed = PackedActivations([x for pair in types.values() for x in pair])
        _, taken = [*types.values()][-1]
        self.ends = EmbedAndHead(model, packed, taken, ends, self.index, is_split)
        self.x = packed.type
        self._example = example
        parts: dict[str, StackPart] = {}
        for name, layout in layouts.items():
            of_stack = params["layers"][name]
            shards = sharing.of_stack(name, of_stack)
            self.shards["layers"][name] = shards
            given, taken = types[name]
            layers = Layers(
                model.blocks[name],
                shards.together(of_stack),
                shards,
                layout.layer_of_slot.reshape(len(layout.chunks), -1),
                (self.index, taken, example),
                len(layout.chunks[0]),
                splits=plan.splits_backward,
            )
            holds = [[count > 0 for _, count in stage] for stage in layout.chunks]
            begins = [[start == 0 < count for start, count in stage] for stage in layout.chunks]
            parts[name] = StackPart(
                layers=layers,
                before=model.before.get(name),
                given=given,
                taken=taken,
                holds=Flag(holds, self.index),
                begins=Flag(begins, self.index),
            )
        self.chunks = Chunks(parts, packed, ends, splits=plan.splits_backward)

    @property
    def sums(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the head's sums."""
        return wide(jax.eval_shape(self.ends.sums, self.x, self._example))

    @property
    def teacher_outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the outputs of `teach` for one microbatch."""
        return jax.eval_shape(self.ends.teacher_outputs, self.x, self._example)

    def reduced(self, grads: dict[str, Tree]) -> dict[str, Tree]:
        """Return the gradients summed over all devices, each sharded like its parameter."""
        of_layers = grads["layers"].items()
        reduced = {
            "ends": self.shards["ends"].reduced(grads["ends"]),
            "layers": {name: self.shards["layers"][name].reduced(g) for name, g in of_layers},
        }
        return counted_as("gradients", reduced)

    def columns(self) -> dict[str, jax.Array]:
        """Return this stage's column of every table, and the shared rows, each int32[ticks]."""
        tables = {k: jnp.asarray(t, jnp.int32) for k, t in self.plan.tables.items()}
        shared = {k: jnp.asarray(row, jnp.int32) for k, row in self.plan.shared.items()}
        return {name: table[:, self.index] for name, table in tables.items()} | shared

    def forwards(self, collected: Tree, collect: Callable[[Tree, Tree, jax.Array], Tree]) -> Tree:
        """Run a table of forwards, and collect a result from the output of every microbatch.

        Args:
            collected: the initial value of the result.
            collect: (result so far, output of the last layer, microbatch) -> result.

        Returns:
            The result after all microbatches. Only the last stage has it; on others it is
            `collected`.
        """

        def tick(carry, row):
            return self._evaluate_tick(collect, carry, row), None

        carry = {"collected": collected, "input": self._buffer("input")}
        columns = self.columns()
        with jax.named_scope(TICKS):
            return jax.lax.scan(tick, carry, columns)[0]["collected"]

    def with_sums(self, sums: dict[str, Tree], x: Tree, index: jax.Array) -> dict[str, Tree]:
        """Return `sums` with the head's sums of a microbatch added."""
        return add(sums, self.ends.sums(x, self._microbatch(index)))

    def with_teacher_outputs(
        self, teacher_outputs: dict[str, Tree], x: Tree, index: jax.Array
    ) -> dict[str, Tree]:
        """Return `teacher_outputs` with the outputs of `teach` for one microbatch filled in."""
        return write(teacher_outputs, index, self.ends.teacher_outputs(x, self._microbatch(index)))

    def training_carry(self) -> dict[str, Tree]:
        """Return the initial carry of the loop: zero sums, zero gradients and empty buffers."""
        grads = {"ends": zeros(wide(self.ends.params)), "layers": self.chunks.no_gradients()}
        names = ("input", "cotangent", "head_input")
        return {
            "sums": zeros(self.sums),
            "grads": counted_as("gradients", grads),
            "kept": self.chunks.kept(self.plan.depths),
            **{name: self._buffer(name) for name in names if name in self.plan.depths},
        }

    def _evaluate_tick(self, collect: Callable, carry: dict[str, Tree], row) -> dict[str, Tree]:
        carry = self._read_arrived(self._embed_together(carry, row), row)
        collected = carry["collected"]

        def forward():
            microbatch = self._microbatch(row["F.microbatch"])
            x = self._input(carry, row, "F", microbatch)
            return self.chunks.evaluate(row["F.chunk"], x, microbatch)

        def together():
            last = self.plan.last_stage
            more = collect(collected, self.ends.of(last, y), row["head"])
            return self.ends.only_on(last, more, collected)

        y = self._if_runs("F", row, forward, lambda: zeros(self.x))
        arrivals = self._send("F", y)

        def unchanged():
            return collected

        if self.plan.shares_vocab:
            more = self._if_shared("head", row, together, unchanged)
        else:

            def alone():
                return collect(collected, y, row["F.microbatch"])

            more = self._if("F", "is_last", row, alone, unchanged)
        return self._receive(carry | {"collected": more}, row, arrivals)

    def train_tick(self, carry: dict[str, Tree], row: dict[str, jax.Array]):
        """Run one tick of a training schedule; the order of the code is the order of the phases."""
        carry = self._read_arrived(self._embed_together(carry, row), row)
        arrivals = {}  # channel name -> value that arrives at the end of this tick
        if self.plan.runs("F") is not False:
            y, changed = self._operate("F", self._forward, carry, row)
            carry |= changed
            arrivals |= self._send("F", y)
        carry = self._head_together(carry, row)
        dx, changed = self._operate("B", self._backward, carry, row)
        carry |= changed
        arrivals |= self._send("B", dx)
        carry = self._embed_gradient_together(carry, row, dx)
        if self.plan.runs("W") is not False:
            grads = carry["grads"]
            added = self._if_runs(
                "W", row, lambda: self._weight_gradient(carry, row), lambda: grads
            )
            carry |= {"grads": added}
        return self._receive(carry, row, arrivals), None

    # The operations of one stage. F and B return (output to send, changed entries of the carry);
    # W returns the gradients.

    def _operate(self, kind: str, operation: Callable, carry, row) -> tuple[Tree, dict]:
        """Run an operation; if the stage is idle, return zeros and leave the carry unchanged."""
        names = {"F": ("kept", "head_input"), "B": ("sums", "grads", "kept")}
        changed = {name: carry[name] for name in names[kind] if name in carry}
        return self._if_runs(
            kind, row, lambda: operation(carry, row), lambda: (zeros(self.x), changed)
        )

    def _forward(self, carry, row) -> tuple[Tree, dict]:
        """Run a chunk's forward, and keep its residuals unless the backward recomputes them."""
        microbatch = self._microbatch(row["F.microbatch"])
        chunk = row["F.chunk"]
        x = self._input(carry, row, "F", microbatch)
        changed = {"kept": carry["kept"]}
        if self.plan.recomputes:
            y = self.chunks.evaluate(chunk, x, microbatch)
        else:
            slots = self._slots("F", row)
            y, changed["kept"] = self.chunks.forward(chunk, x, microbatch, carry["kept"], slots)
        if "head_input" in carry:
            inputs = carry["head_input"]

            def written():
                return write(inputs, row["F.head_input"], y)

            changed["head_input"] = self._if("F", "is_last", row, written, lambda: inputs)
        return y, changed

    def _backward(self, carry, row) -> tuple[Tree, dict]:
        """Run a chunk's backward, plus the head's (last chunk) or embedding's (first chunk)."""
        microbatch = self._microbatch(row["B.microbatch"])
        chunk = row["B.chunk"]
        kept = carry["kept"]
        slots = self._slots("B", row)
        y = None
        if self.plan.recomputes:
            x = self._input(carry, row, "B", microbatch)
            # Residuals that only this operation reads go to a scratch buffer with one slot.
            scratch = self.chunks.kept({"saved": 1})
            kept = {name: scratch[name] | kept[name] for name in kept}
            slots = slots | {"saved": jnp.int32(0)}
            y, kept = self.chunks.forward(chunk, x, microbatch, kept, slots)
        if "head_input" in carry:
            y = read(carry["head_input"], row["B.head_input"])

        # The cotangent of the chunk's output: from the head if it is the last chunk (`dy` was made
        # by `_head_together` if the vocabulary is shared), else from the next chunk.
        def from_head():
            if self.plan.shares_vocab:
                return carry["sums"], carry["grads"]["ends"], carry["dy"]
            sums, ends, dy = self.ends.head_gradient(y, microbatch)
            return add(carry["sums"], sums), add(carry["grads"]["ends"], ends), dy

        def from_next_chunk():
            return carry["sums"], carry["grads"]["ends"], carry["arrived"]["B.cotangent"]

        sums, ends, dx = self._if("B", "is_last", row, from_head, from_next_chunk)
        grads = carry["grads"] | {"ends": ends}
        dx, grads, kept = self.chunks.backward(chunk, dx, microbatch, kept, slots, grads)
        if not self.plan.shares_vocab:

            def embedded():
                return add(grads["ends"], self.ends.embed_gradient(dx, microbatch))

            ends = self._if("B", "is_first", row, embedded, lambda: grads["ends"])
            grads = grads | {"ends": ends}
        kept = {n: {b: kept[n][b] for b in carry["kept"][n]} for n in kept}  # without scratch
        return dx, {"sums": sums, "grads": grads, "kept": kept}

    def _weight_gradient(self, carry, row) -> dict[str, Tree]:
        """Return the gradients with the weight gradients of a chunk added."""
        microbatch = self._microbatch(row["W.microbatch"])
        slots = self._slots("W", row)
        args = (row["W.chunk"], microbatch, carry["kept"], slots, carry["grads"])
        return self.chunks.weight_gradient(*args)

    def _input(self, carry, row, kind: str, microbatch) -> Tree:
        """Return a chunk's input: the embedding on the first chunk, else the arrived value."""

        def arrived():
            return carry["arrived"][f"{kind}.input"]

        if self.plan.shares_vocab:
            return arrived()

        def embedded():
            return self.ends.embed(microbatch)

        return self._if(kind, "is_first", row, embedded, arrived)

    # Work that all stages do together with pipeline.share_vocab. Each method returns the carry.

    def _embed_together(self, carry, row) -> dict:
        """Embed a microbatch on all stages; the first stage writes it to its `input` buffer."""
        if not self.plan.shares_vocab:
            return dict(carry)

        def embed():
            x = self.ends.embed(self._microbatch(row["embed"]))
            written = write(carry["input"], row["F.input"], x)
            return self.ends.only_on(self.plan.first_stage, written, carry["input"])

        return carry | {"input": self._if_shared("embed", row, embed, lambda: carry["input"])}

    def _head_together(self, carry, row) -> dict:
        """Run the head on all stages, and add `dy`, the gradient of its input, to the carry."""
        if not self.plan.shares_vocab:
            return carry
        last = self.plan.last_stage
        grads = carry["grads"]

        def head():
            y = self.ends.of(last, read(carry["head_input"], row["B.head_input"]))
            sums, ends, dy = self.ends.head_gradient(y, self._microbatch(row["head"]))
            sums = self.ends.only_on(last, add(carry["sums"], sums), carry["sums"])
            return sums, self.ends.add_together(last, grads["ends"], ends), dy

        def nothing():
            return (carry["sums"], grads["ends"], zeros(self.x))

        sums, ends, dy = self._if_shared("head", row, head, nothing)
        return carry | {"sums": sums, "grads": grads | {"ends": ends}, "dy": dy}

    def _embed_gradient_together(self, carry, row, dx) -> dict:
        """Run the embedding's backward on all stages, with the first chunk's input gradient."""
        if not self.plan.shares_vocab:
            return carry
        first = self.plan.first_stage
        grads = carry["grads"]

        def embed():
            microbatch = self._microbatch(row["embed_gradient"])
            gradients = self.ends.embed_gradient(self.ends.of(first, dx), microbatch)
            return self.ends.add_together(first, grads["ends"], gradients)

        ends = self._if_shared("embed_gradient", row, embed, lambda: grads["ends"])
        return carry | {"grads": grads | {"ends": ends}}

    # Table, buffers and sends.

    def _microbatch(self, index: jax.Array) -> Tree:
        return read(self.batch, index)

    def _buffer(self, name: str) -> Tree:
        """Return an empty buffer of activations, with one more slot for unread arrivals."""
        depth = self.plan.depths[name]
        return counted_as("activations", zeros(self.x, depth + (depth > 0)))

    def _slots(self, kind: str, row) -> dict[str, jax.Array]:
        names = ("saved", "for_weights", "handed")
        return {name: row[f"{kind}.{name}"] for name in names if f"{kind}.{name}" in row}

    def _if_runs(self, kind: str, row, then: Callable[[], Tree], otherwise: Callable[[], Tree]):
        runs = row[f"{kind}.microbatch"] >= 0
        with jax.named_scope(scope_of(kind)):
            return branch(self.plan.runs(kind), runs, then, otherwise)

    def _if_shared(self, part: str, row, then: Callable[[], Tree], otherwise: Callable[[], Tree]):
        with jax.named_scope(scope_of(part)):
            return jax.lax.cond(row[part] >= 0, then, otherwise)

    def _if(self, kind: str, flag: str, row, then, otherwise) -> Tree:
        holds = self.plan.holds(kind, flag)
        with jax.named_scope(scope_of(f"{kind}.{flag}")):
            return branch(holds, row[f"{kind}.{flag}"] > 0, then, otherwise)

    def _send(self, kind: str, x: Tree) -> dict[str, Tree]:
        """Send `x` over all channels of a kind, and return the value that arrives over each."""

        def moved(channel: Channel) -> Tree:
            if channel.shift == 0:
                return x

            def move(leaf):
                return jax.lax.ppermute(leaf, "pipeline", channel.pairs)

            return jax.tree.map(move, x)

        return {c.name: moved(c) for c in self.plan.channels if c.kind == kind}

    def _read_arrived(self, carry: dict, row) -> dict:
        """Add to the carry the values from other chunks that this tick's operations read.

        It is read ahead of the `lax.cond`s, so that their branches do not take whole buffers as
        operands.
        """
        buffers = {name: carry[name] for name in ("input", "cotangent") if name in carry}
        arrived = {}
        for name in ("F.input", "B.input", "B.cotangent"):
            buffer = buffers.get(name.split(".")[1])
            if name in row and jax.tree.leaves(buffer)[0].size:
                arrived[name] = read(buffer, row[name])
        return carry | {"arrived": arrived}

    def _receive(self, carry: dict, row, arrivals: dict[str, Tree]) -> dict:
        """Return the carry for the next tick, with the arrivals written to their slots."""
        for name, x in arrivals.items():
            buffer = "input" if name.startswith("F") else "cotangent"
            carry = carry | {buffer: write(carry[buffer], row[name], x)}
        return {name: value for name, value in carry.items() if name not in ("arrived", "dy")}
