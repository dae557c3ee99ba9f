"""Builds a `Run` from a config and a mesh: model, optimizer, schedule, state layout and steps.

`prepare` builds and checks all parts with abstract arrays, so it computes nothing and takes no
memory. The steps are traced and compiled when they are first used.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding

from models.flops import num_tokens, train_flops
from models.layers.attention import Choice
from models.stack import (
    Parts,
    named_activations,
    partition,
)
from sharding.analysis.targets import Target
from sharding.batches import batch_sharding, process_rows
from sharding.estimate.jaxpr import open_jaxpr
from sharding.estimate.memory_estimate import Estimate, estimate
from sharding.hardware import Hardware, hardware_of
from sharding.logical import Rules
from sharding.mesh import AnyMesh, use_mesh
from sharding.pipeline.config import AUTO
from sharding.pipeline.layout import Layout, cut
from sharding.pipeline.schedule import Schedule, make_schedule
from sharding.rules import make_rules
from train.config.schema import RunConfig
from train.config.shapes import batch_of, microbatch
from train.optim.ema import average_params
from train.optim.freeze import frozen_params, with_frozen_params
from train.optim.layer_decay import depths_of
from train.optim.optimizer import make_learning_rate, make_optimizer
from train.run.attention_kernels import attention_choices
from train.run.compatibility import (
    check_axes,
    check_mesh,
    check_objective,
    check_optimizer,
    check_parts,
)
from train.run.stage_balance import LayerCosts, count_work
from train.state.averaged import evaluated
from train.state.initialize import StateSpec
from train.state.layout import StateLayout
from train.state.train_state import TrainState, partition_specs_of, shardings_of
from train.step.tracing import traced_for
from train.step.train_step import StepConfig, make_eval_step, make_train_step
from train.step.update import Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a run, checked for compatibility. Nothing is computed until a step is used."""

    config: RunConfig
    mesh: jax.sharding.Mesh
    trace_mesh: AnyMesh  # mesh for tracing: `mesh`, or its abstract mesh for some targets
    hardware: Hardware  # the mesh's devices
    target: Target | None  # GPUs to compile for that are not present; None: the mesh's devices
    rules: Rules  # sharding rules
    build: Callable[[], nnx.Module]  # initializes the model
    model_config: Any  # the model's dataclass, with all sizes
    model: nnx.Module  # abstract
    parts: Parts  # the model's functions
    optimizer: optax.GradientTransformation  # without clipping, which the step does
    learning_rate: optax.Schedule
    schedule: Schedule  # pipeline schedule
    layouts: Mapping[str, Layout]  # stack -> layers of every stage
    state: StateLayout
    frozen: Any  # a bool per parameter; None: no parameter is frozen
    attention: tuple[Choice, ...]  # kernels that the blocks use; () without attention
    work: Callable[[], LayerCosts]  # FLOPs of a microbatch; counted at the first call

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of every array of a batch."""
        return batch_sharding(self.mesh, self.rules)

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each global batch that this process reads."""
        return process_rows(self.batch_sharding, self.config.data.global_batch_size)

    @cached_property
    def activation_names(self) -> set[str]:
        """The names of activations in the model's blocks, for `train.remat`."""
        with traced_for(self.hardware, self.config.attention):
            return named_activations(self.model, *microbatch(self.config, self.mesh, self.model))

    @cached_property
    def num_params(self) -> int:
        """Number of parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.portable.params))

    @property
    def unit(self) -> str:
        """The unit of throughput: "token" or "image"."""
        return "image" if self.config.data.reads_images else "token"

    @cached_property
    def num_frozen(self) -> int:
        """Number of frozen parameters."""
        if self.frozen is None:
            return 0
        pairs = zip(*map(jax.tree.leaves, (self.state.portable.params, self.frozen)), strict=True)
        return sum(leaf.size for leaf, is_frozen in pairs if is_frozen)

    @cached_property
    def units_per_step(self) -> int:
        """Tokens or images per global batch."""
        if self.config.data.reads_images:
            return self.config.data.global_batch_size
        return num_tokens(self._abstract_batch())

    @cached_property
    def flops_per_unit(self) -> int:
        """Model FLOPs per token or image, forward and backward; see models/flops.py.

        0 if they are unknown, because an image model does not define them.
        """
        flops = train_flops(self.model, self._abstract_batch(), self.num_params)
        return flops // self.units_per_step

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced `train_step(state, batch)`; the state is donated."""
        step, out_shardings = self._train_step_function(), (shardings_of(self.state.abstract), None)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
        with use_mesh(self.trace_mesh):
            return jitted.trace(*self._arguments)

    @cached_property
    def train_step(self) -> jax.stages.Compiled:
        """The compiled `train_step(state, batch)`; the state is donated."""
        return self._compiled(self.traced)

    def _compiled(self, traced: jax.stages.Traced) -> jax.stages.Compiled:
        with use_mesh(self.trace_mesh):
            if self.target is not None:
                return self.target.compile(traced, self.trace_mesh)
            return traced.lower().compile()

    @cached_property
    def estimate(self) -> Estimate:
        """Estimated memory and work of a training step on one device, from its trace."""
        state, batch = self._arguments
        labels = jax.tree.map(lambda _: "optimizer", state)
        parameters = jax.tree.map(lambda _: "parameters", state.params)
        labels = dataclasses.replace(labels, params=parameters)
        jaxpr = self.traced.jaxpr
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
        return self.state.abstract, self._abstract_batch("index")

    def _train_step_function(self) -> Callable:
        specs = partition_specs_of(self.state.abstract.params)
        update = Update(
            self.optimizer,
            self.config.optimizer.clip_norm,
            self.state,
            self.layouts,
            self.trace_mesh,
            self.config.train.seed,
        )
        return make_train_step(
            self.parts if self.frozen is None else with_frozen_params(self.parts, self.frozen),
            update,
            self.learning_rate,
            self._step_config(),
            self.trace_mesh,
            self.rules,
            specs,
        )

    @cached_property
    def eval_step(self) -> jax.stages.Compiled:
        """The compiled `eval_step(params, teacher, batch)`; `evaluated` returns the first two."""
        specs = partition_specs_of(self.state.abstract.params)
        step = make_eval_step(self.parts, self._step_config(), self.trace_mesh, self.rules, specs)
        with use_mesh(self.trace_mesh):
            arguments = (*self.evaluated(self.state.abstract), self._abstract_batch())
            traced = jax.jit(step).trace(*arguments)
        return self._compiled(traced)

    def evaluated(self, state: TrainState) -> tuple[Any, Any]:
        """Returns the parameters to evaluate, and the teacher's; see state/averaged.py."""
        return evaluated(state, teaches=self.parts.teach is not None)

    def compile(self) -> None:
        """Compiles both steps.

        Raises:
            ValueError: evaluations do not report `checkpoint.best_metric`.
        """
        self._check_best_metric()
        _ = self.train_step

    def _check_best_metric(self) -> None:
        tree, checkpoint = self.eval_step.out_tree, self.config.checkpoint
        sums = jax.tree.unflatten(tree, range(tree.num_leaves))
        names = [f"eval_{name}" for name in sums if name != "weight"]
        if self.config.data.has_perplexity:
            names.append("eval_perplexity")
        if checkpoint.keep_best and checkpoint.best_metric not in names:
            raise ValueError(
                f"checkpoint.best_metric={checkpoint.best_metric!r} is not a metric of this run's "
                f"evaluations; choose {', '.join(sorted(names))}"
            )

    def _step_config(self) -> StepConfig:
        return StepConfig(
            pipeline=self.config.pipeline,
            schedule=self.schedule,
            layouts=self.layouts,
            precision=self.config.precision,
            seed=self.config.train.seed,
            memory=self.config.memory,
            skip_spikes=self.config.train.skip_spikes,
            hardware=self.hardware,
            attention=self.config.attention,
        )

    def _abstract_batch(self, *per_example: str) -> dict[str, jax.ShapeDtypeStruct]:
        size = self.config.data.global_batch_size
        batch = batch_of(self.config, size)
        batch |= {name: jax.ShapeDtypeStruct((size,), jnp.uint32) for name in per_example}
        sharding = batch_sharding(self.trace_mesh, self.rules)
        return {name: leaf.update(sharding=sharding) for name, leaf in batch.items()}


def prepare(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    *,
    vocab_size: int | None = None,
    num_labels: int | None = None,
    target: Target | None = None,
) -> Run:
    """Builds the run of a config on a mesh.

    Args:
        config: the run's config.
        mesh: the mesh; over the target's devices, if there is a target.
        vocab_size: number of tokens of the tokenizer; None if there is no tokenizer.
        num_labels: number of labels in the data; None if it has no labels.
        target: GPUs that are not present: steps can be compiled for them, but not run.

    Raises:
        ValueError: the model, the mesh, the rules and the data are not compatible.
    """
    hardware = hardware_of(mesh.devices.flat[0])
    # Devices that are only described have no memory kinds, so shardings over them would lose
    # theirs. An abstract mesh keeps them.
    is_abstract = target is not None and config.memory.placement != "device"
    trace_mesh = mesh.abstract_mesh if is_abstract else mesh
    check_mesh(config, mesh)
    pipeline = config.pipeline
    shares_vocab = pipeline.share_vocab and mesh.shape["pipeline"] > 1
    rules = make_rules(config.rules, shares_vocab=shares_vocab)
    # Check this early if the class states its objectives: otherwise a missing size in the data of
    # another objective would be the first, less helpful, error.
    check_objective(config, config.model_class)
    model_config = config.model_config(vocab_size=vocab_size, num_labels=num_labels)

    def build() -> nnx.Module:
        return config.model_class(model_config, rngs=nnx.Rngs(config.train.seed))

    model = nnx.eval_shape(build)
    offload = config.memory.offload_activations
    parts = partition(model, remat=config.train.remat, offload=offload)
    check_parts(config, mesh, hardware, model, parts)
    learning_rate = make_learning_rate(config.optimizer, config.train.num_steps)
    optimizer, frozen = _optimizer(config, mesh, model, parts, learning_rate)
    schedule = make_schedule(
        pipeline.schedule, mesh.shape["pipeline"], config.train.num_microbatches, pipeline.chunks
    )
    work = functools.cache(partial(_work, config, mesh, model, parts))
    counts = pipeline.layers_per_stage
    if counts == AUTO:
        counts = work().balanced(len(schedule.placement), shares_vocab=shares_vocab)
    layouts = cut(parts.num_layers, schedule.placement, counts)
    start = StateSpec(
        build=build,
        optimizer=optimizer,
        precision=config.precision,
        tracks_spikes=config.train.skip_spikes is not None,
        frozen=frozen,
    )
    state = StateLayout(start, trace_mesh, rules, layouts, config.memory)
    specs = partition_specs_of(state.abstract.params)
    check_axes(model, specs, rules, mesh)
    return Run(
        config=config,
        mesh=mesh,
        trace_mesh=trace_mesh,
        hardware=hardware,
        target=target,
        rules=rules,
        build=build,
        model_config=model_config,
        model=model,
        parts=parts,
        optimizer=optimizer,
        learning_rate=learning_rate,
        schedule=schedule,
        layouts=layouts,
        state=state,
        frozen=frozen,
        attention=attention_choices(config, mesh, hardware, rules, model, parts),
        work=work,
    )


def _optimizer(
    config: RunConfig,
    mesh: AnyMesh,
    model: nnx.Module,
    parts: Parts,
    learning_rate: optax.Schedule,
) -> tuple[optax.GradientTransformation, Any]:
    """Returns the optimizer, and a bool per parameter, whether it is frozen, or None."""
    check_optimizer(config)
    train, arguments, average = config.train, microbatch(config, mesh, model), None
    if train.ema_decay is not None:
        average = average_params(train.ema_decay, train.ema_schedule, train.num_steps)
    optimizer = make_optimizer(
        config.optimizer,
        learning_rate,
        clips=False,
        stacks=parts.num_layers,
        not_decayed=getattr(model, "not_decayed", ()),
        depths=None if config.optimizer.layer_decay == 1 else depths_of(parts, *arguments),
        average=average,
    )
    patterns = config.optimizer.frozen
    return optimizer, frozen_params(arguments[0], patterns) if patterns else None


def _work(config: RunConfig, mesh: AnyMesh, model: nnx.Module, parts: Parts) -> LayerCosts:
    """Returns the FLOPs of a microbatch of one replica."""
    recomputes = config.pipeline.remat == "full"
    return count_work(parts, *microbatch(config, mesh, model), recomputes=recomputes)
