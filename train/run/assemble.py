"""Assembles a run from its config and a mesh, and checks that its parts are compatible.

All parts use abstract arrays, so this computes nothing and needs no device memory. It does trace
the model, though: see model_traces.py. The steps are traced later, by `Run`, except that
`train.remat=auto` estimates the memory of a step for each level that it tries.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

from models.adapters import add_adapters
from models.functions import ModelFunctions, functions_of
from models.preference import with_preference
from models.scaling import param_scales
from pipeline.config import BALANCED
from pipeline.schedule import make_schedule
from pipeline.schedules.table import Schedule
from pipeline.stack_layout import StackLayout, cut
from predict.machines.targets import Target
from sharding.hardware import hardware_of
from sharding.mesh import AnyMesh
from sharding.rules import make_rules
from train.config.remat import AUTO_REMAT, levels
from train.config.schema import RunConfig
from train.optim.config import FOR_MATRICES
from train.optim.ema import average_params
from train.optim.freeze import frozen_params, trained_params
from train.optim.matrices import matrices_of
from train.optim.optimizer import make_optimizer
from train.optim.schedules import make_learning_rate_schedule
from train.run.compatibility import (
    check_axes,
    check_objective,
    check_optimizer,
    check_parts,
    unrolls,
)
from train.run.model_traces import ModelTraces
from train.run.run import Run
from train.run.sequences import choose_sequence_split
from train.state.amax_history import empty_history
from train.state.initialize import StateSpec
from train.state.state_layout import StateLayout

#: With `train.remat=auto`, the memory budget must be at least this multiple of a step's estimate,
#: because a compiled step can take a few percent more than estimated.
_ROOM = 1.03


def assemble_run(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    *,
    vocab_size: int | None = None,
    num_labels: int | None = None,
    target: Target | None = None,
    device_budget: float = math.inf,
) -> Run:
    """Build the run of a config on a mesh.

    With `train.remat=auto`, the run keeps as many activations as fit by the estimate, for which its
    step is traced. If nothing fits, it keeps the fewest.

    Args:
        mesh: mesh; over the target's devices, if there is a target.
        vocab_size: number of tokens of the tokenizer; None if there is no tokenizer.
        num_labels: number of labels in the data; None if it has no labels.
        target: GPUs that are not present: steps can be compiled for them, but not run.
        device_budget: bytes of a device that a step may use.

    Raises:
        ValueError: the model, the mesh, the rules and the data are not compatible.
    """
    assemble = partial(
        _assemble,
        mesh=mesh,
        vocab_size=vocab_size,
        num_labels=num_labels,
        target=target,
        device_budget=device_budget,
    )
    if config.train.remat != AUTO_REMAT:
        return assemble(config)
    run = assemble(config.with_values({"train.remat": "none"}))
    others = iter(levels(run.traces.activation_names)[1:])
    if mesh.shape["pipeline"] > 1:
        others = itertools.chain(others, ["stage,full"])
    while run.estimate_memory().device_bytes > device_budget / _ROOM:
        remat = next(others, None)
        if remat is None:
            break
        run = assemble(config.with_values({"train.remat": remat}))
    return run


def _assemble(
    config: RunConfig,
    *,
    mesh: jax.sharding.Mesh,
    vocab_size: int | None,
    num_labels: int | None,
    target: Target | None,
    device_budget: float,
) -> Run:
    hardware = hardware_of(mesh.devices.flat[0])
    trace_mesh = _trace_mesh(config, mesh, target)
    shares_vocab = config.pipeline.shares_vocab(mesh.shape["pipeline"])
    rules = make_rules(config.rules, shares_vocab=shares_vocab)
    abstract = _abstract_model(config, vocab_size=vocab_size, num_labels=num_labels)
    model = abstract.model
    functions = abstract.functions
    traces = ModelTraces(config, mesh, hardware, model, functions)
    check_parts(config, model, functions, traces, shares_vocab=shares_vocab)
    learning_rate_schedule = make_learning_rate_schedule(config.optimizer, config.train.num_steps)
    optimizer, frozen = _optimizer(config, model, functions, traces, learning_rate_schedule)
    sequence = choose_sequence_split(config, mesh, model, traces, rules)
    schedule = _schedule(config, mesh)
    layouts = _layouts(config, functions, schedule, traces, shares_vocab=shares_vocab)
    state_spec = _state_spec(config, abstract, optimizer, frozen)
    state_layout = StateLayout(state_spec, trace_mesh, rules, layouts, config.memory)
    check_axes(model, state_layout, rules, mesh)
    return Run(
        config=config,
        mesh=mesh,
        trace_mesh=trace_mesh,
        hardware=hardware,
        target=target,
        rules=rules,
        sequence=sequence,
        build=abstract.build,
        model_config=abstract.config,
        model=model,
        functions=functions,
        optimizer=optimizer,
        learning_rate_schedule=learning_rate_schedule if config.optimizer.is_built_in else None,
        schedule=schedule,
        unrolls=unrolls(config, abstract.config, schedule, functions, hardware),
        layouts=layouts,
        state_layout=state_layout,
        frozen=frozen,
        attention_kernels=traces.attention_kernels(rules, sequence),
        traces=traces,
        device_budget=device_budget,
    )


def with_batch_size(run: Run, size: int) -> Run:
    """Return a run with the same state whose steps have another global batch size.

    Args:
        size: global batch size of a phase of the ramp-up.
    """
    if size == run.config.data.global_batch_size:
        return run
    config = run.config.with_batch_size(size)
    schedule = _schedule(config, run.mesh)
    assert schedule.placement == run.schedule.placement  # or the layers would have to move
    return dataclasses.replace(run, config=config, schedule=schedule)


def _trace_mesh(config: RunConfig, mesh: jax.sharding.Mesh, target: Target | None) -> AnyMesh:
    # Devices that are only described have no memory kinds, so shardings over them would lose
    # theirs. An abstract mesh keeps them.
    is_abstract = target is not None and config.memory.placement != "device"
    return mesh.abstract_mesh if is_abstract else mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AbstractModel:
    """A model without values of its parameters."""

    config: Any  # the model's dataclass, with all sizes
    build: Callable[[], nnx.Module]  # initializes the model
    model: nnx.Module
    functions: ModelFunctions


def _abstract_model(
    config: RunConfig, *, vocab_size: int | None, num_labels: int | None
) -> _AbstractModel:
    """Return the model of a config, with the sizes that it takes from the data."""
    # Check this early if the class states its objectives: otherwise a missing size in the data of
    # another objective would be the first, less helpful, error.
    check_objective(config, config.model_class)
    model_config = config.model_config(vocab_size=vocab_size, num_labels=num_labels)

    def build() -> nnx.Module:
        model = config.model_class(model_config, rngs=nnx.Rngs(config.train.seed))
        add_adapters(model, config.lora, seed=config.train.seed)
        return model

    model = nnx.eval_shape(build)
    offload = config.memory.offload_activations
    functions = functions_of(
        model,
        remat=config.train.parsed_remat.layers,
        offload=offload,
        in_float8=config.precision.in_float8,
    )
    if config.data.objective == "preference":
        functions = with_preference(functions, model, config.preference)
    return _AbstractModel(config=model_config, build=build, model=model, functions=functions)


def _schedule(config: RunConfig, mesh: AnyMesh) -> Schedule:
    """Return the pipeline schedule, after a check that smaller batches of a ramp-up have one."""
    smallest = config.data.batch_sizes.phases[0].size
    if smallest < config.data.global_batch_size:
        # If the schedule exists for the fewest microbatches, it does for all numbers of them.
        try:
            _schedule(config.with_batch_size(smallest), mesh)
        except ValueError as error:
            raise ValueError(
                f"data.rampup_batch_size={config.data.rampup_batch_size!r} begins with batches of "
                f"{smallest}, which the pipeline schedule does not fit: {error}; or choose a "
                "schedule by its name"
            ) from error
    pipeline = config.pipeline
    num_microbatches = config.train.num_microbatches
    return make_schedule(
        pipeline.schedule, mesh.shape["pipeline"], num_microbatches, pipeline.chunks
    )


def _layouts(
    config: RunConfig,
    functions: ModelFunctions,
    schedule: Schedule,
    traces: ModelTraces,
    *,
    shares_vocab: bool,
) -> Mapping[str, StackLayout]:
    """Return the layers of every stage, for each stack."""
    layer_counts = config.pipeline.layers_per_stage
    if layer_counts == BALANCED:
        layer_counts = traces.work.balanced(len(schedule.placement), shares_vocab=shares_vocab)
    return cut(functions.num_layers, schedule.placement, layer_counts)


def _state_spec(
    config: RunConfig,
    abstract: _AbstractModel,
    optimizer: optax.GradientTransformation,
    frozen: Any,
) -> StateSpec:
    """Return the contents of the training state."""
    return StateSpec(
        model=abstract.model,
        build=abstract.build,
        optimizer=optimizer,
        precision=config.precision,
        tracks_spikes=config.train.skip_spikes is not None,
        empty_history=(
            partial(empty_history, abstract.functions)
            if config.precision.keeps_amax_history
            else None
        ),
        frozen=frozen,
    )


def _optimizer(
    config: RunConfig,
    model: nnx.Module,
    functions: ModelFunctions,
    traces: ModelTraces,
    learning_rate_schedule: optax.Schedule,
) -> tuple[optax.GradientTransformation, Any]:
    """Return the optimizer, and a bool per parameter, whether it is frozen, or None."""
    check_optimizer(config)
    train = config.train
    not_decayed = getattr(model, "not_decayed", ())
    average = None
    if train.ema_decay is not None:
        average = average_params(train.ema_decay, train.ema_schedule, train.num_steps)
    frozen = frozen_params(traces.params, config.optimizer.frozen, config.lora)
    matrices = None
    if config.optimizer.name in FOR_MATRICES:
        matrices = matrices_of(model, functions.num_layers, not_decayed)
    optimizer = make_optimizer(
        config.optimizer,
        learning_rate_schedule,
        params=trained_params(traces.params, frozen),
        stacks=functions.num_layers,
        not_decayed=not_decayed,
        matrices=matrices,
        compute_dtype=config.precision.compute_dtype,
        depths=traces.depths if config.optimizer.layer_decay != 1 else None,
        scales=param_scales(getattr(model, "config", None), traces.params, functions.num_layers),
        average=average,
    )
    return optimizer, frozen
