"""A run: its config, mesh, model, layout of the state and schedule, and its compiled steps."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from models.flops import num_tokens, train_flops
from models.functions import ModelFunctions
from models.layers.attention import SelectedKernel
from models.preference import REFERENCE_LOG_PROBS
from pipeline.runtime.gather import ParamSharding
from pipeline.runtime.tick_program import TickProgram, make_tick_program
from pipeline.schedules.table import Schedule
from pipeline.stack_layout import StackLayout
from predict.machines.targets import Target
from predict.memory.jaxpr import open_jaxpr
from predict.memory.memory_estimate import Estimate, estimate
from predict.program.memory import memory
from sharding.batches import BatchLayout, place_batch, process_rows
from sharding.compiler_options import CompilerOption, as_dict, options_for
from sharding.hardware import Hardware
from sharding.logical import Rules
from sharding.mesh import AnyMesh, use_mesh
from sharding.ops.sequence import SequenceSplit
from train.config.schema import RunConfig
from train.config.shapes import batch_shapes
from train.optim.freeze import with_frozen_params
from train.run.model_traces import ModelTraces
from train.state.state_layout import StateLayout
from train.state.train_state import TrainState, average_of, shardings_of
from train.step.means import means_of
from train.step.reference_step import make_reference_step
from train.step.train_step import StepConfig, make_eval_step, make_train_step
from train.step.update import Update

T = TypeVar("T")


def _once(method: Callable[["Run"], T]) -> Callable[["Run"], T]:
    """Cache the result of a method without arguments, per object."""
    # Not `cached_property`: tracing and compiling may take minutes, so they should look like calls.
    # Not `functools.cache`: a Run cannot be hashed.
    name = f"_{method.__name__}_result"

    @functools.wraps(method)
    def remembered(self: "Run") -> T:
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        return self.__dict__[name]

    return remembered


def metric_prefix(name: str) -> str:
    """Return the prefix of the metrics of a validation set; its name is "" if it has none."""
    return f"eval_{name}_" if name else "eval_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Executable:
    """A compiled step, and the options with which it was compiled."""

    compiled: jax.stages.Compiled
    options: list[CompilerOption]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a run, checked for compatibility. Nothing is computed until a step is used."""

    config: RunConfig
    mesh: jax.sharding.Mesh
    trace_mesh: AnyMesh  # mesh for tracing: `mesh`, or its abstract mesh for some targets
    hardware: Hardware  # the mesh's devices
    target: Target | None  # GPUs to compile for that are not present; None: the mesh's devices
    rules: Rules  # sharding rules
    sequence: SequenceSplit  # how sequences are divided over `context`
    build: Callable[[], nnx.Module]  # initializes the model
    model_config: Any  # the model's dataclass, with all sizes
    model: nnx.Module  # abstract
    functions: ModelFunctions  # the model's functions
    optimizer: optax.GradientTransformation  # without clipping, which the step does
    learning_rate_schedule: optax.Schedule | None  # None: the optimizer is not a built-in one
    schedule: Schedule  # pipeline schedule
    unrolls: bool  # whether the training step has no loops over layers
    layouts: Mapping[str, StackLayout]  # stack -> layers of every stage
    state_layout: StateLayout
    frozen: Any  # a bool per parameter; None: no parameter is frozen
    attention_kernels: tuple[SelectedKernel, ...]  # of the blocks; () without attention
    traces: ModelTraces  # properties found by tracing the model, such as FLOPs
    device_budget: float  # bytes of a device that a step may use; infinite if unknown

    @property
    def batch_layout(self) -> BatchLayout:
        """How the arrays of a batch are split over the mesh."""
        return BatchLayout(mesh=self.mesh, sequence=self.sequence)

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each global batch that this process reads."""
        by_example = self.batch_layout.sharding("index")
        return process_rows(by_example, self.config.data.global_batch_size)

    def place_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Assemble the global batch on the mesh from the rows that this process read."""
        size = self.config.data.global_batch_size
        return place_batch(batch, self.rows, self.batch_layout, size)

    @cached_property
    def num_params(self) -> int:
        """Number of parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state_layout.portable.params))

    @property
    def unit(self) -> str:
        """The unit of throughput: "token" or "image"."""
        return "image" if self.config.data.reads_images else "token"

    @cached_property
    def num_frozen(self) -> int:
        """Number of frozen parameters."""
        if self.frozen is None:
            return 0
        pairs = zip(
            *map(jax.tree.leaves, (self.state_layout.portable.params, self.frozen)), strict=True
        )
        return sum(leaf.size for leaf, is_frozen in pairs if is_frozen)

    @cached_property
    def units_per_step(self) -> int:
        """Tokens or images per global batch."""
        if self.config.data.reads_images:
            return self.config.data.global_batch_size
        return num_tokens(self._abstract_batch())

    @cached_property
    def flops_per_unit(self) -> int:
        """Model FLOPs per token or image, forward and backward; see models/flops.py."""
        has_adapters = self.config.lora.rank is not None
        batch = batch_shapes(self.config, self.config.data.global_batch_size)
        flops = train_flops(self.functions, self.traces.params, batch, has_adapters=has_adapters)
        return flops // self.units_per_step

    @_once
    def trace_train_step(self) -> jax.stages.Traced:
        """Trace `train_step(state, batch)`, which donates the state. The result is cached."""
        update = Update(
            optimizer=self.optimizer,
            clip_norm=self.config.optimizer.clip_norm,
            state_layout=self.state_layout,
            layouts=self.layouts,
            mesh=self.trace_mesh,
            seed=self.config.train.seed,
        )
        functions = self.functions
        if self.frozen is not None:
            functions = with_frozen_params(functions, self.frozen)
        step = make_train_step(
            functions,
            update,
            self.learning_rate_schedule,
            self._step_config(),
            self._param_sharding(),
            self.rules,
        )
        out_shardings = (shardings_of(self.state_layout.abstract), None)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
        with use_mesh(self.trace_mesh):
            return jitted.trace(*self._arguments)

    def compile_train_step(self) -> jax.stages.Compiled:
        """Compile `train_step(state, batch)`, which donates the state. The result is cached."""
        return self._compile_train_step().compiled

    @_once
    def _compile_train_step(self) -> _Executable:
        return self._compile(self.trace_train_step())

    def compiler_options(self) -> list[CompilerOption]:
        """Return the options with which the training step is compiled; the first call compiles."""
        return self._compile_train_step().options

    def _compile(self, traced: jax.stages.Traced) -> _Executable:
        """Compile for speed, and a second time to save memory if the step does not fit."""
        step = self._compile_with(traced, saves_memory=False)
        needs = memory(step.compiled).in_all
        if self.hardware.platform == "gpu" and needs is not None and needs > self.device_budget:
            return self._compile_with(traced, saves_memory=True)
        return step

    def _compile_with(self, traced: jax.stages.Traced, *, saves_memory: bool) -> _Executable:
        options = options_for(
            self.hardware,
            is_described=self.target is not None,
            saves_memory=saves_memory,
            has_stages=self.mesh.shape["pipeline"] > 1,
            in_float8=self.config.precision.in_float8,
            bytes_of_layer=self._bytes_of_layer() if self.unrolls else 0,
        )
        with use_mesh(self.trace_mesh):
            if self.target is not None:
                compiled = self.target.compile(traced, self.trace_mesh, options)
            else:
                compiled = traced.lower().compile(compiler_options=as_dict(options))
        return _Executable(compiled=compiled, options=options)

    def _bytes_of_layer(self) -> int:
        """Return the bytes that a device receives when gradients of a layer are reduce-scattered.

        0 if the gradients of all layers are reduced together.
        """
        dtype = jnp.dtype(self.config.precision.reduce or jnp.float32)
        return self.state_layout.elements_of_layer() * dtype.itemsize

    @_once
    def estimate_memory(self) -> Estimate:
        """Estimate memory and work of a training step on one device. The result is cached."""
        state, batch = self._arguments
        labels = jax.tree.map(lambda _: "optimizer", state)
        parameters = jax.tree.map(lambda _: "parameters", state.params)
        labels = dataclasses.replace(labels, params=parameters)
        jaxpr = self.trace_train_step().jaxpr
        if self.frozen is not None:
            # XLA removes computations that only gradients of frozen parameters need.
            needed = [True] * len(jaxpr.jaxpr.outvars)
            jaxpr = jaxpr.replace(jaxpr=dce_jaxpr(jaxpr.jaxpr, needed, instantiate=True)[0])
        platform = self.hardware.platform
        arguments = jax.tree.leaves(self._arguments)
        program = open_jaxpr(jaxpr, arguments, splits_gradients=platform != "cpu")
        return estimate(
            program,
            [*jax.tree.leaves(labels), *["batch"] * len(batch)],
            self.mesh.shape,
            platform=platform,
        )

    @property
    def _arguments(self) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
        return self.state_layout.abstract, self._abstract_batch()

    @_once
    def _trace_eval_step(self) -> jax.stages.Traced:
        step = make_eval_step(
            self.functions, self._step_config(), self._param_sharding(), self.rules
        )
        with use_mesh(self.trace_mesh):
            params, teacher = self.params_to_evaluate(self.state_layout.abstract)
            return jax.jit(step).trace(params, teacher, self._abstract_batch())

    @_once
    def compile_eval_step(self) -> jax.stages.Compiled:
        """Compile `eval_step(params, teacher, batch)`. The result is cached.

        `params_to_evaluate` returns the first two arguments.
        """
        return self._compile(self._trace_eval_step()).compiled

    def compile_reference_step(self) -> jax.stages.Compiled:
        """Compile `reference_step(params, batch) -> arrays [batch, ...]`, on all devices.

        The batch has no arrays of the reference yet.
        """
        assert self.functions.reference is not None
        step = make_reference_step(
            self.functions, self._step_config(), self._param_sharding(), self.rules
        )
        batch = self._abstract_batch()
        batch.pop(REFERENCE_LOG_PROBS)
        with use_mesh(self.trace_mesh):
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            jitted = jax.jit(step, out_shardings=everywhere)
            traced = jitted.trace(self.state_layout.abstract.params, batch)
        return self._compile(traced).compiled

    def params_to_evaluate(self, state: TrainState) -> tuple[Any, Any]:
        """Return the parameters to evaluate, and the teacher's, or None without a teacher.

        That is (average, None), or (parameters, average) for a model that learns from its average.

        Args:
            state: as for `average_of`.
        """
        average = average_of(state)
        return (average, None) if self.functions.teach is None else (state.params, average)

    def compile(self) -> None:
        """Compile both steps."""
        self.compile_eval_step()
        self.compile_train_step()

    def check_metrics(self, *, ranks_checkpoints: bool) -> None:
        """Check the names of metrics and the one that ranks checkpoints, if there may be doubts.

        This traces the evaluation step.

        Args:
            ranks_checkpoints: whether the run trains, so that it keeps the best checkpoints.

        Raises:
            ValueError: evaluations do not report `checkpoint.best_metric`, or two metrics of
                different validation sets have the same name.
        """
        checkpoint = self.config.checkpoint
        sets = self.config.data.validation_names
        has_best = bool(checkpoint.keep_best) and ranks_checkpoints
        if not has_best and len(sets) == 1:
            return
        shapes = self._trace_eval_step().out_info
        sums = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        means = [*means_of(sums, lambda value, weight: 0)]
        if self.config.data.has_perplexity:
            means.append("perplexity")
        names = [f"{metric_prefix(each)}{name}" for each in sets for name in means]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"data.validation_paths={self.config.data.validation_paths!r}: two validation sets "
                f"have a metric {twice[0]!r}; rename one of the sets"
            )
        if has_best and checkpoint.best_metric not in names:
            raise ValueError(
                f"checkpoint.best_metric={checkpoint.best_metric!r} is not a metric of this run's "
                f"evaluations; choose {', '.join(sorted(names))}"
            )

    def _step_config(self) -> StepConfig:
        return StepConfig(
            schedule=self.schedule,
            recomputes_stages=self.config.train.parsed_remat.recomputes_stages,
            shares_vocab=self.config.pipeline.shares_vocab(self.schedule.num_stages),
            layouts=self.layouts,
            unrolls=self.unrolls,
            precision=self.config.precision,
            seed=self.config.train.seed,
            skip_spikes=self.config.train.skip_spikes,
            hardware=self.hardware,
            attention=self.config.model.attention,
            sequence=self.sequence,
        )

    def tick_program(self) -> TickProgram:
        """Return the pipeline schedule of the training step as the program that executes it."""
        config = self._step_config()
        return make_tick_program(
            config.schedule,
            recomputes=config.recomputes_stages,
            shares_vocab=config.shares_vocab,
            unrolls=config.unrolls,
        )

    def _param_sharding(self) -> ParamSharding:
        return ParamSharding(
            mesh=self.trace_mesh,
            specs=self.functions.split(self.state_layout.param_specs),
            gather_modes=self.functions.split(self.state_layout.gather_modes),
            kept_axes=self.functions.split(self.state_layout.kept_axes),
            zero_stage=self.config.memory.zero_stage,
            compute_dtype=self.config.precision.compute_dtype,
            reduce_dtype=self.config.precision.reduce,
        )

    def _abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        size = self.config.data.global_batch_size
        batch = batch_shapes(self.config, size)
        layout = BatchLayout(mesh=self.trace_mesh, sequence=self.sequence)
        return {name: leaf.update(sharding=layout.sharding(name)) for name, leaf in batch.items()}
