"""Where model, mesh and data meet: a config becomes compiled steps and a described state."""

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

from data.config import DataConfig
from data.examples import Corpus
from data.shapes import batch_shapes
from data.text import TextCorpus
from models.flops import num_tokens, train_flops
from models.stack import (
    REMAT_POLICIES,
    Parts,
    can_share_vocab,
    check,
    named_activations,
    partition,
)
from sharding.batches import batch_sharding, process_rows
from sharding.estimate import Estimate, estimate
from sharding.logical import Rules
from sharding.pipeline.config import AUTO
from sharding.pipeline.layout import Layout, cut
from sharding.pipeline.schedule import Schedule, make_schedule
from sharding.program import open_jaxpr
from sharding.rules import make_rules, unused_axes
from train.balance import Work, count_work
from train.birth import Start
from train.config import RunConfig
from train.ema import average_params, averaged
from train.frozen import frozen_params, held
from train.layer_decay import depths_of
from train.optimizer import ELEMENTWISE, make_learning_rate, make_optimizer
from train.state import TrainState, partition_specs_of, shardings_of
from train.state_layout import StateLayout
from train.step import StepConfig, make_eval_step, make_train_step
from train.update import Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a run, checked against each other; nothing has been computed yet."""

    config: RunConfig
    mesh: jax.sharding.Mesh
    rules: Rules
    build: Callable[[], nnx.Module]
    model_config: Any  # the model's own dataclass, complete
    model: nnx.Module  # abstract
    parts: Parts
    optimizer: optax.GradientTransformation  # clips nothing: the step does
    learning_rate: optax.Schedule
    schedule: Schedule  # of the pipeline
    layouts: Mapping[str, Layout]  # of every stack
    state: StateLayout
    frozen: Any  # a bool per parameter; None: of none
    work: Callable[[], Work]  # of a microbatch; counted when first asked for

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        return batch_sharding(self.mesh, self.rules)

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each global batch that this process reads."""
        return process_rows(self.batch_sharding, self.config.data.global_batch_size)

    @cached_property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.portable.params))

    @property
    def unit(self) -> str:
        """What the run's speed counts: "token" or "image"."""
        return "image" if self.config.data.reads_images else "token"

    @cached_property
    def num_frozen(self) -> int:
        """How many of these `optimizer.frozen` names."""
        if self.frozen is None:
            return 0
        pairs = zip(*map(jax.tree.leaves, (self.state.portable.params, self.frozen)), strict=True)
        return sum(leaf.size for leaf, is_frozen in pairs if is_frozen)

    @cached_property
    def units_per_step(self) -> int:
        """Tokens, or images, of a global batch."""
        if self.config.data.reads_images:
            return self.config.data.global_batch_size
        return num_tokens(self._abstract_batch())

    @cached_property
    def flops_per_unit(self) -> int:
        """Model FLOPs of a token's, or an image's, forward and backward; see models/flops.py.

        0 if they are not known: of a model of images that does not tell them.
        """
        flops = train_flops(self.model, self._abstract_batch(), self.num_params)
        return flops // self.units_per_step

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """`train_step(state, batch)` as traced; the state is donated."""
        step, out_shardings = self._train_step_function(), (shardings_of(self.state.abstract), None)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
        with jax.set_mesh(self.mesh):
            return jitted.trace(*self._arguments)

    @cached_property
    def train_step(self) -> jax.stages.Compiled:
        """The compiled `train_step(state, batch)`; the state is donated."""
        with jax.set_mesh(self.mesh):
            return self.traced.lower().compile()

    @cached_property
    def estimate(self) -> Estimate:
        """What a training step takes on one device, from shapes alone."""
        state, batch = self._arguments
        labels = jax.tree.map(lambda _: "optimizer", state)
        parameters = jax.tree.map(lambda _: "parameters", state.params)
        labels = dataclasses.replace(labels, params=parameters)
        jaxpr = self.traced.jaxpr
        if self.frozen is not None:
            # XLA leaves out what only gradients of frozen parameters are for.
            needed = [True] * len(jaxpr.jaxpr.outvars)
            jaxpr = jaxpr.replace(jaxpr=dce_jaxpr(jaxpr.jaxpr, needed, instantiate=True)[0])
        program = open_jaxpr(jaxpr, jax.tree.leaves(self._arguments))
        return estimate(
            program,
            [*jax.tree.leaves(labels), *["batch"] * len(batch)],
            self.mesh.shape,
            platform=self.mesh.devices.flat[0].platform,
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
            self.mesh,
            self.config.train.seed,
        )
        return make_train_step(
            self.parts if self.frozen is None else held(self.parts, self.frozen),
            update,
            self.learning_rate,
            self._step_config(),
            self.mesh,
            self.rules,
            specs,
        )

    @cached_property
    def eval_step(self) -> jax.stages.Compiled:
        """The compiled `eval_step(params, batch)`, for what train.ema.averaged gives of a state."""
        params = averaged(self.state.abstract)
        specs = partition_specs_of(self.state.abstract.params)
        step = make_eval_step(self.parts, self._step_config(), self.mesh, self.rules, specs)
        with jax.set_mesh(self.mesh):
            return jax.jit(step).lower(params, self._abstract_batch()).compile()

    def compile(self) -> None:
        """Compiles both steps now.

        Raises:
            ValueError: no evaluation gives `checkpoint.best_metric`.
        """
        self._check_best_metric()
        _ = self.train_step

    def _check_best_metric(self) -> None:
        tree, checkpoint = self.eval_step.out_tree, self.config.checkpoint
        sums = jax.tree.unflatten(tree, range(tree.num_leaves))
        names = [f"eval_{name}" for name in sums if name != "weight"]
        if has_perplexity(self.config.data):
            names.append("eval_perplexity")
        if checkpoint.keep_best and checkpoint.best_metric not in names:
            raise ValueError(
                f"checkpoint.best_metric={checkpoint.best_metric!r} is none of what an evaluation "
                f"gives: {', '.join(sorted(names))}"
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
        )

    def _abstract_batch(self, *per_example: str) -> dict[str, jax.ShapeDtypeStruct]:
        size = self.config.data.global_batch_size
        batch = _batch(self.config, size)
        batch |= {name: jax.ShapeDtypeStruct((size,), jnp.uint32) for name in per_example}
        return {name: leaf.update(sharding=self.batch_sharding) for name, leaf in batch.items()}


def prepare(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    *,
    vocab_size: int | None = None,
    num_labels: int | None = None,
) -> Run:
    """Returns the run that the config describes on this mesh.

    Args:
        vocab_size: of the tokenizer; None: there is none.
        num_labels: that the data has, if it has labels.

    Raises:
        ValueError: the model, the mesh, the rules or the data do not fit each other.
    """
    pipeline = config.pipeline
    shares_vocab = pipeline.share_vocab and mesh.shape["pipeline"] > 1
    rules = make_rules(config.rules, shares_vocab=shares_vocab)
    # Where the class itself says it: the data of another objective may not have what it needs.
    _check_objective(config, config.model_class)
    model_config = config.model_config(vocab_size=vocab_size, num_labels=num_labels)

    def build() -> nnx.Module:
        return config.model_class(model_config, rngs=nnx.Rngs(config.train.seed))

    model = nnx.eval_shape(build)
    if shares_vocab and not can_share_vocab(model):
        raise ValueError(
            f"pipeline.share_vocab=True: {type(model).__name__} does not say that its embedding "
            "and its loss can work with a part of the vocab (can_share_vocab = True; see "
            "models/stack.py); set pipeline.share_vocab=False"
        )
    offload = config.memory.offload_activations
    parts = partition(model, remat=config.train.remat, offload=offload)
    _check_objective(config, model)
    try:
        check(parts, *_microbatch(config, mesh, model))
    except KeyError as error:
        raise ValueError(
            f"{type(model).__name__} reads {error} of the batch, in which "
            f"data.objective={config.data.objective!r} puts "
            f"{', '.join(batch_shapes(config.data, config.images))}"
        ) from None
    _check_names(config, mesh, model)
    learning_rate = make_learning_rate(config.optimizer, config.train.num_steps)
    optimizer, frozen = _optimizer(config, mesh, model, parts, learning_rate)
    schedule = make_schedule(
        pipeline.schedule, mesh.shape["pipeline"], config.train.num_microbatches, pipeline.chunks
    )
    work = functools.cache(partial(_work, config, mesh, model, parts))
    counts = pipeline.layers_per_stage
    if counts == AUTO:
        counts = work().balanced(len(schedule.placement), shares_ends=shares_vocab)
    layouts = cut(parts.num_layers, schedule.placement, counts)
    start = Start(
        build=build,
        optimizer=optimizer,
        precision=config.precision,
        tracks_spikes=config.train.skip_spikes is not None,
        frozen=frozen,
    )
    state = StateLayout(start, mesh, rules, layouts, config.memory)
    specs = partition_specs_of(state.abstract.params)
    name = type(model).__name__
    for axis in unused_axes(specs, rules, mesh):
        if axis not in ("pipeline", *rules["seq"]):  # the executor checks the pipeline
            raise ValueError(
                f"mesh.{axis}={mesh.shape[axis]}: {name} splits nothing over "
                f"{axis!r}, so its devices would repeat each other's work; set mesh.{axis}=1"
            )
    return Run(
        config=config,
        mesh=mesh,
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
        work=work,
    )


def _optimizer(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    model: nnx.Module,
    parts: Parts,
    learning_rate: optax.Schedule,
) -> tuple[optax.GradientTransformation, Any]:
    """Returns the optimizer, and a bool per parameter that it leaves as it is, or None."""
    if config.memory.placement == "host" and config.optimizer.name not in ELEMENTWISE:
        raise ValueError(
            f"memory.placement=host updates one layer at a time, and optimizer.name="
            f"{config.optimizer.name!r} may look at more than one element; set "
            f"optimizer.name={' or '.join(ELEMENTWISE)}, or memory.placement=device"
        )
    train, arguments, average = config.train, _microbatch(config, mesh, model), None
    if train.ema_decay is not None:
        average = average_params(train.ema_decay, train.ema_schedule, train.num_steps)
    optimizer = make_optimizer(
        config.optimizer,
        learning_rate,
        clips=False,
        stacks=parts.num_layers,
        depths=None if config.optimizer.layer_decay == 1 else depths_of(parts, *arguments),
        average=average,
    )
    patterns = config.optimizer.frozen
    return optimizer, frozen_params(arguments[0], patterns) if patterns else None


def _batch(config: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch of `size` examples as the data makes them."""
    shapes = batch_shapes(config.data, config.images)
    return {name: jax.ShapeDtypeStruct((size, *s), dtype) for name, (s, dtype) in shapes.items()}


def _check_objective(config: RunConfig, model: nnx.Module | type) -> None:
    objectives = getattr(model, "objectives", None)
    # Of a class it may be a property, which tells nothing yet.
    if isinstance(objectives, tuple) and config.data.objective not in objectives:
        choices = " or ".join(objectives) or "another model.head: this one learns nothing"
        raise ValueError(
            f"data.objective={config.data.objective!r} does not fit model.name="
            f"{config.model_name!r} with its head; choose {choices}"
        )


def activation_names(run: Run) -> set[str]:
    """Returns the names that the model's blocks give to activations."""
    return named_activations(run.model, *_microbatch(run.config, run.mesh, run.model))


def _check_names(config: RunConfig, mesh: jax.sharding.Mesh, model: nnx.Module) -> None:
    """Refuses names of activations that the model's blocks do not give."""
    remat, offload = config.train.remat, config.memory.offload_activations
    kept = () if remat in REMAT_POLICIES else tuple(remat.split(","))
    if not kept and not offload:
        return
    known = named_activations(model, *_microbatch(config, mesh, model))
    named = ", ".join(sorted(known)) or "none"
    for name in (*kept, *offload):
        if name not in known:
            levels = f"choose {', '.join(REMAT_POLICIES)}, or " if name in kept else "choose "
            key = (
                f"train.remat={remat!r}"
                if name in kept
                else (f"memory.offload_activations={offload}")
            )
            raise ValueError(
                f"{key}: no block of {type(model).__name__} names an activation {name!r}; "
                f"{levels}some of the names that there are: {named}"
            )


def has_perplexity(config: DataConfig) -> bool:
    """Returns whether the loss is one of tokens, so that e to its power says something."""
    return not config.reads_images and config.objective != "classification"


def check_tokenizer(run: Run, corpus: Corpus) -> None:
    """Checks that the model counts with the special tokens of a text's tokenizer.

    Raises:
        ValueError: it takes another token for padding, or knows one text a row where there are two.
    """
    if not isinstance(corpus, TextCorpus):
        return
    tokenizer = corpus.tokenizer
    model, pad = run.model_config, tokenizer.special_ids.get("pad")
    pad_id = getattr(model, "pad_id", None)
    if pad_id is not None and pad is not None and pad_id != pad:
        raise ValueError(
            f"model.pad_id={pad_id}, but padding is token {pad} of data.tokenizer="
            f"{run.config.data.tokenizer!r}; set model.pad_id={pad} and "
            f"model.first_position={pad + 1}"
        )
    shapes = batch_shapes(run.config.data, run.config.images)
    has_types = tokenizer.has_token_types and "token_types" in shapes
    if has_types and getattr(model, "num_token_types", 2) < 2:
        raise ValueError(
            f"model.num_token_types={model.num_token_types}, but data.objective="
            f"{run.config.data.objective!r} puts two texts into a row; set model.num_token_types=2"
        )


def _microbatch(
    config: RunConfig, mesh: jax.sharding.Mesh, model: nnx.Module
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """Returns parameters and a microbatch as the devices of one replica get them."""
    num_parts = config.train.num_microbatches * mesh.shape["data"] * mesh.shape["fsdp"]
    batch = _batch(config, config.data.global_batch_size // num_parts)
    dtype = jnp.dtype(config.precision.compute)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
        nnx.to_pure_dict(nnx.split(model)[1]),
    )
    return params, batch


def _work(config: RunConfig, mesh: jax.sharding.Mesh, model: nnx.Module, parts: Parts) -> Work:
    """Returns the work of a microbatch on the devices of one replica."""
    recomputes = config.pipeline.remat == "full"
    return count_work(parts, *_microbatch(config, mesh, model), recomputes=recomputes)


def _describe_stages(run: Run) -> str:
    """Returns how evenly the work lies on the chunks, and what would make it more even."""
    counts = [0] * len(run.schedule.placement)
    for layout in run.layouts.values():
        for v, stage in enumerate(run.schedule.placement):
            counts[v] += layout.chunks[stage][run.schedule.chunk_of(v)][1]
    work = run.work()
    shares = run.config.pipeline.share_vocab

    def unevenness(counts, shares_ends):
        chunks = work.of_chunks(counts, shares_ends=shares_ends)
        return max(chunks) * len(chunks) / sum(chunks)

    now, auto = unevenness(counts, shares), work.balanced(len(counts), shares_ends=shares)
    ways = {"pipeline.layers_per_stage=auto": unevenness(auto, shares)}
    if can_share_vocab(run.model) and not shares:
        even = work.balanced(len(counts), shares_ends=True)
        ways["pipeline.share_vocab=True"] = unevenness(even, True)
    better = [
        f"{way} would make it {value:.2f}" for way, value in ways.items() if value < now - 0.1
    ]
    layers = ", ".join(map(str, counts))
    return "; ".join([f"{layers} layers; the busiest computes {now:.2f} × the mean", *better])


def describe(run: Run, corpus: Corpus) -> str:
    """Returns the summary of a run for its start: parameters, mesh, stages and data."""
    mesh = " × ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
    frozen = f" ({run.num_frozen:,} frozen)" if run.num_frozen else ""
    lines = [
        f"model   {type(run.model).__name__}, {run.num_params:,} parameters{frozen}, "
        f"{sum(run.parts.num_layers.values())} layers, {_describe_flops(run)}",
        f"mesh    {mesh} on {run.mesh.size} {run.mesh.devices.flat[0].device_kind} device(s), "
        f"{jax.process_count()} process(es)",
        *([f"stages  {_describe_stages(run)}"] if run.mesh.shape["pipeline"] > 1 else []),
        f"data    {run.config.data.name}: {len(corpus.train):,} training and "
        f"{len(corpus.validation):,} validation {_describe_rows(run, corpus)}",
    ]
    return "\n".join(lines)


def _describe_flops(run: Run) -> str:
    if not run.flops_per_unit:
        return "FLOPs not known: the model has no forward_flops"
    return f"{run.flops_per_unit:,} FLOPs {'an image' if run.unit == 'image' else 'a token'}"


def _describe_rows(run: Run, corpus: Corpus) -> str:
    images = run.config.images
    if run.config.data.reads_images:
        classes = f", {len(corpus.labels):,} classes" if corpus.labels else ""
        return f"images of {images.size} × {images.size} × {images.channels}{classes}"
    return (
        f"sequences of {run.config.data.sequence_length} tokens, vocabulary {corpus.vocab_size:,}"
    )
