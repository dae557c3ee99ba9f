"""Executes a pipeline schedule inside one jit, as one program that every device runs.

The executor does not depend on a particular model. From a model's functions (`PipelineFunctions`)
and a schedule table, it builds a function that maps parameters and microbatches to summed losses
and gradients. A `lax.scan` runs over the ticks of the table. For example, tick 6 of `zero_bubble`
with 3 stages and 8 microbatches, on stage 1, whose cell is F5 I3 W2:

    time     ------------------------------------------------------------------------------>
    compute  [embed*]  [ F5 ]  [head*]  [    I3    ]  [embed gradient*]  [   W2   ]  [arrive]
    send               y of F5 to stage 2  =======================================>  |
    send                                  dx of I3 to stage 0  ===================>  |

    F5  forward of microbatch 5              y   its output: activations
    I3  input gradient of microbatch 3       dx  its output: a cotangent
    W2  weight gradient of microbatch 2
    *   only with pipeline.share_vocab, see embed_and_head.py

If backwards are whole, nothing of its own tick could hide the send of dx. An iteration of the scan
then runs the backwards of one tick and the forwards of the next (`TickTable.skewed`):

    compute  [head*]  [    B3    ]  [embed gradient*]  [arrive]  [embed*]  [ F6 ]  [arrive]
    send     y of F5 to stage 2  ====================>  |
    send                          dx of B3 to stage 0  ===========================>  |

Each of F, B (or I) and W runs under a condition, because a stage may be idle: in a loop that runs
at most once (sharding/ops/update_if.py), so that buffers are updated in place.

An operation that runs in every tick of every stage has no such loop, and one that never runs is
not in the program at all. With one stage and `train.remat=stage`, for example, there is one tick
per microbatch, and it has only a B, which runs the forward too: plain gradient accumulation,
without a condition or a send.

The path of a batch, from level to level; docs/architecture.md lists every call:

    level           file                     its methods
    device          here                     train_on_device
    TrainingStage   training.py, stage.py    tick, _run_forward, _run_backward, ...
    Chunks          chunks.py                chunk_forward, chunk_backward, ...
    StackPart       chunks.py                stack_forward, stack_backward
    Layers          layers.py                run_layers; of a layer: layer_forward, ...
    BlockVJP        block_vjp.py             forward, backward, ..., unless nothing is saved
    block           models/stack.py          the model's block, a function

A tick has a `TickTable` (tick_table.py). From it, the stage makes a `Work` for every operation,
which the levels below pass on.

In shapes, M is the number of microbatches and B the number of examples of one microbatch: of all
replicas in the arguments of the functions that are built here, of one replica inside `shard_map`.
There T is the number of tokens of a row that this device has (sharding/ops/sequence.py).

- `shard_map` is manual over `pipeline`, `data`, `fsdp` and `context`, so all communication over
  these axes is written here, in gather.py, and in attention. The other axes stay automatic.
- Everything that waits for a later tick is stored in the buffers that tick_program.py plans.
- Gradients are summed over microbatches locally. They are summed over all replicas once, after
  the scan, except for parameters that are gathered layer by layer (ZeRO 3): their gradients are
  reduce-scattered at every layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pipeline.runtime.gather import (
    MANUAL_AXES,
    ParamSharding,
    check_specs,
    manual_specs,
    on_shards,
    total,
)
from pipeline.runtime.pipeline_functions import PipelineFunctions
from pipeline.runtime.stage import Stage
from pipeline.runtime.tick_program import TickProgram, make_tick_program
from pipeline.runtime.tick_table import TICKS
from pipeline.runtime.training import TrainingStage
from pipeline.schedules.table import Schedule
from pipeline.stack_layout import StackLayout
from sharding.mesh import BATCH_AXES
from sharding.ops import sequence

Tree = Any
Params = dict[str, Tree]


def make_loss_and_grad(
    functions: PipelineFunctions,
    schedule: Schedule,
    layouts: Mapping[str, StackLayout],
    param_sharding: ParamSharding,
    *,
    recomputes: bool = True,
    shares_vocab: bool = False,
    unrolls: bool = False,
) -> Callable[[Params, Tree], tuple[dict, Params]]:
    """Build the function that computes losses and gradients with a training schedule.

    Args:
        functions: model's functions.
        schedule: verified table with as many stages as the mesh has devices along `pipeline`.
        layouts: layout of every stack, in the order in which the stacks run.
        param_sharding: how the parameters are sharded over the mesh.
        recomputes: as for `make_tick_program`.
        shares_vocab: as for `make_tick_program`.
        unrolls: as for `make_tick_program`.

    Returns:
        `f(params, microbatches) -> (sums, gradients)`. `params` has the structure of
        `param_sharding.specs`, and the arrays of `microbatches` are `[M, B, ...]`. `sums` holds
        `loss`, `weight` and the head's metrics, summed over microbatches and devices. `gradients`
        are the gradients of the total of `sums["loss"]`, in float32 or wider, sharded like the
        parameters.

    Raises:
        ValueError: a parameter is split over `data` without ZeRO, or a dim other than layers is
            split over `pipeline`.
    """
    assert schedule.has_backward()
    program = make_tick_program(
        schedule, recomputes=recomputes, shares_vocab=shares_vocab, unrolls=unrolls
    )

    def train_on_device(params, microbatches):
        stage = TrainingStage(functions, program, layouts, param_sharding, params, microbatches)
        carry = stage.first_carry()
        column = stage.column()
        with jax.named_scope(TICKS):
            carry, _ = jax.lax.scan(stage.tick, carry, column)
        sums = total(carry.sums, param_sharding.mesh, MANUAL_AXES)
        return sums, stage.reduce_gradients(carry)

    out_specs = (PartitionSpec(), manual_specs(param_sharding.specs))
    return _on_mesh(train_on_device, program, param_sharding, out_specs)


def make_evaluate(
    functions: PipelineFunctions,
    schedule: Schedule,
    layouts: Mapping[str, StackLayout],
    param_sharding: ParamSharding,
    *,
    shares_vocab: bool = False,
) -> Callable[[Params, Tree], dict]:
    """Build the function that computes losses with a schedule of forwards only.

    Args:
        functions: as for `make_loss_and_grad`.
        schedule: verified table without backwards.
        layouts: as for `make_loss_and_grad`.
        param_sharding: as for `make_loss_and_grad`.
        shares_vocab: as for `make_tick_program`.

    Returns:
        `f(params, microbatches) -> sums`.

    Raises:
        ValueError: as for `make_loss_and_grad`.
    """
    assert not schedule.has_backward()
    program = make_tick_program(schedule, shares_vocab=shares_vocab)

    def evaluate_on_device(params, microbatches):
        stage = Stage(functions, program, layouts, param_sharding, params, microbatches)
        sums = stage.evaluate()
        return total(sums, param_sharding.mesh, MANUAL_AXES)

    return _on_mesh(evaluate_on_device, program, param_sharding, PartitionSpec())


def make_teach(
    functions: PipelineFunctions,
    schedule: Schedule,
    layouts: Mapping[str, StackLayout],
    param_sharding: ParamSharding,
    *,
    shares_vocab: bool = False,
) -> Callable[[Params, Tree], dict[str, jax.Array]]:
    """Build the function that runs forwards up to `model.teach`.

    Args:
        functions: as for `make_loss_and_grad`; it has `teach`.
        schedule: verified table without backwards.
        layouts: as for `make_loss_and_grad`.
        param_sharding: as for `make_loss_and_grad`.
        shares_vocab: as for `make_tick_program`.

    Returns:
        `f(params, microbatches) -> teacher_outputs`, the outputs of `teach` for every microbatch:
        arrays `[M, B, ...]`, sharded like the microbatches.

    Raises:
        ValueError: as for `make_loss_and_grad`.
    """
    assert not schedule.has_backward()
    program = make_tick_program(schedule, shares_vocab=shares_vocab)

    def teach_on_device(params, microbatches):
        stage = Stage(functions, program, layouts, param_sharding, params, microbatches)
        teacher_outputs = stage.teach()
        return total(teacher_outputs, param_sharding.mesh, ("pipeline",))

    out_specs = PartitionSpec(None, BATCH_AXES)
    return _on_mesh(teach_on_device, program, param_sharding, out_specs)


def _on_mesh(run_on_device, program: TickProgram, param_sharding: ParamSharding, out_specs):
    assert program.num_stages == param_sharding.mesh.shape["pipeline"]
    check_specs(param_sharding, shares_vocab=program.shares_vocab)
    params_specs = manual_specs(param_sharding.specs)

    def run(params: Params, microbatches: Tree) -> Any:
        split = sequence.current()
        batch_specs = {name: split.batch_spec(name, (None,)) for name in microbatches}
        in_specs = (params_specs, batch_specs)
        on_mesh = on_shards(run_on_device, param_sharding.mesh, in_specs, out_specs)
        return on_mesh(params, microbatches)

    return run
