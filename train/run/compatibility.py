"""Checks that the parts of a run are compatible, before the first step.

Every function raises a ValueError that states the conflict and a remedy in one sentence.
"""

from typing import Any

import jax
from flax import nnx

from data.examples import Corpus
from data.shapes import example_shapes
from data.text.text_corpus import TextCorpus
from models.functions import ModelFunctions, can_share_vocab
from models.layers.float8 import LOWEST_CAPABILITY
from models.stack import REMAT_POLICIES, saved_names
from pipeline.runtime.tick_program import make_tick_program
from pipeline.schedules.table import Schedule
from sharding.hardware import Hardware
from sharding.logical import Rules
from sharding.mesh import AnyMesh
from sharding.rules import unused_axes
from train.config.remat import Remat
from train.config.schema import RunConfig
from train.optim.config import SLICED
from train.run.model_traces import ModelTraces
from train.state.state_layout import StateLayout

#: Most layers that are unrolled without a request: XLA takes one or two seconds for each of them.
MOST_UNROLLED = 32


def check_objective(config: RunConfig, model: nnx.Module | type) -> None:
    """Reject an objective that a model, or every model of a class, cannot learn."""
    objectives = getattr(model, "objectives", None)
    # On a class it may be a property, which has no value yet.
    if isinstance(objectives, tuple) and config.data.objective not in objectives:
        choices = " or ".join(objectives) or "another model.head: this one cannot be trained"
        raise ValueError(
            f"data.objective={config.data.objective!r} does not match model.name="
            f"{config.model.name!r} with its head; choose {choices}"
        )


def _check_float8(config: RunConfig, functions: ModelFunctions, hardware: Hardware) -> None:
    """Reject float8 on GPUs that have none, and for models without layers of suitable sizes."""
    if not config.precision.in_float8:
        return
    if hardware.platform == "gpu" and hardware.compute_capability < LOWEST_CAPABILITY:
        raise ValueError(
            f"precision.compute='float8' needs a GPU of compute capability {LOWEST_CAPABILITY} or "
            f"higher, but {hardware.device_kind} has {hardware.compute_capability}; set "
            "precision.compute=bfloat16"
        )
    if not any(functions.float8_kernels.values()):
        raise ValueError(
            f"precision.compute='float8': no linear layer of model.name={config.model.name!r} has "
            "multiples of 16 inputs and outputs; choose larger sizes, or set "
            "precision.compute=bfloat16"
        )


def unrolls(
    config: RunConfig,
    model_config: Any,
    schedule: Schedule,
    functions: ModelFunctions,
    hardware: Hardware,
) -> bool:
    """Return whether a step has no loop over layers, by `train.unroll`.

    Args:
        model_config: model's dataclass.

    Raises:
        ValueError: `train.unroll` is True, and the schedule or the memory settings rule it out.
    """
    if config.train.unroll:
        if problem := _why_not_unrolled(config, schedule):
            raise ValueError(f"train.unroll=True does not fit {problem}; set train.unroll=False")
        return True
    if config.train.unroll is False or hardware.platform != "gpu":
        return False
    # On these meshes and without dropout, memory estimates of unrolled steps are close.
    is_known = config.mesh.model == config.mesh.context == config.mesh.expert == 1
    is_known &= not getattr(model_config, "dropout", 0.0)
    keeps_activations = config.train.parsed_remat.layers != "full"  # which a loop would copy
    has_few_layers = sum(functions.num_layers.values()) <= MOST_UNROLLED
    may_pay = keeps_activations and has_few_layers and is_known
    return may_pay and not _why_not_unrolled(config, schedule)


def _why_not_unrolled(config: RunConfig, schedule: Schedule) -> str:
    """Return the settings with which layers cannot be unrolled; "" if they can be."""
    memory = config.memory
    recomputes = config.train.parsed_remat.recomputes_stages
    if not make_tick_program(schedule, recomputes=recomputes).can_unroll:
        return (
            f"mesh.pipeline={schedule.num_stages}, pipeline.schedule={schedule.name} and "
            f"pipeline.chunks={config.pipeline.chunks}: it needs a single stage with one chunk, "
            "whose microbatches run one after another, as in 1f1b"
        )
    if memory.placement == "host":
        return "memory.placement=host: layers are copied to and from host memory in a loop"
    if memory.offload_activations:
        return (
            f"memory.offload_activations={memory.offload_activations}: activations are copied to "
            "and from host memory in a loop"
        )
    return ""


def check_parts(
    config: RunConfig,
    model: nnx.Module,
    functions: ModelFunctions,
    traces: ModelTraces,
    *,
    shares_vocab: bool,
) -> None:
    """Reject a model that is inconsistent, or that does not match its batch or pipeline."""
    name = type(model).__name__
    if shares_vocab and not can_share_vocab(model):
        raise ValueError(
            f"pipeline.share_vocab=True: {name} does not declare that its embedding and its loss "
            "work on a part of the vocab (can_share_vocab = True; see models/stack.py); set "
            "pipeline.share_vocab=False"
        )
    check_objective(config, model)
    _check_float8(config, functions, traces.hardware)
    _check_whole_batch(config, model, functions)
    try:
        traces.check()
    except KeyError as error:
        raise ValueError(
            f"{name} reads {error} from the batch, but "
            f"data.objective={config.data.objective!r} provides "
            f"{', '.join(example_shapes(config.data, config.images))}"
        ) from None
    _check_names(config, model, traces)


def _check_whole_batch(config: RunConfig, model: nnx.Module, functions: ModelFunctions) -> None:
    name = type(model).__name__
    num_parts = config.train.num_microbatches
    if functions.teach is not None and config.train.ema_decay is None:
        raise ValueError(
            f"train.ema_decay=None: {name} learns from an average of its parameters; choose for "
            "example 0.99"
        )
    if getattr(model, "sees_whole_batch", False) and num_parts > 1:
        raise ValueError(
            f"train.num_microbatches={num_parts}: {name} compares all examples of a batch with "
            "each other, so they must be one microbatch; set train.num_microbatches=1, and split "
            "the batch over mesh.data or mesh.fsdp"
        )


def _check_names(config: RunConfig, model: nnx.Module, traces: ModelTraces) -> None:
    """Reject names of activations that the model's blocks do not have."""
    remat = config.train.remat
    offload = config.memory.offload_activations
    remat_names = saved_names(Remat.parse(remat).layers)
    if not remat_names and not offload:
        return
    known = traces.activation_names
    named = ", ".join(sorted(known)) or "none"
    levels = ", ".join(REMAT_POLICIES)
    for key, names, choices in (
        (f"train.remat={remat!r}", remat_names, f"{levels}, or names"),
        (f"memory.offload_activations={offload}", offload, "names"),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"{key}: no block of {type(model).__name__} names an activation {unknown[0]!r}; "
                f"choose {choices} of activations: {named}"
            )


def check_optimizer(config: RunConfig) -> None:
    """Reject an optimizer that does not fit the memory, precision, average or length of the run."""
    if config.optimizer.name == "schedule_free":
        _check_schedule_free(config)
    scaling = config.model_fields.get("scaling", "none")
    if scaling != "none" and config.optimizer.name != "adamw":
        raise ValueError(
            f"model.scaling={scaling!r} scales the learning rates of AdamW, but optimizer.name="
            f"{config.optimizer.name!r}; set optimizer.name=adamw, or model.scaling=none"
        )
    if config.train.num_epochs is None:  # otherwise the length is known after reading the data
        config.optimizer.check_length(config.train.num_steps)
    if config.memory.placement == "host" and not config.optimizer.can_be_sliced:
        raise ValueError(
            f"memory.placement=host updates one layer at a time, but optimizer.name="
            f"{config.optimizer.name!r} may need whole arrays; set "
            f"optimizer.name={' or '.join(SLICED)}, or memory.placement=device"
        )


def _check_schedule_free(config: RunConfig) -> None:
    if config.train.ema_decay is not None:
        raise ValueError(
            f"optimizer.name=schedule_free keeps an average of its own, so it cannot be combined "
            f"with train.ema_decay={config.train.ema_decay}; remove one of them"
        )
    if config.optimizer.layer_decay != 1:
        raise ValueError(
            "optimizer.name=schedule_free computes its iterate from the parameters, which "
            f"optimizer.layer_decay={config.optimizer.layer_decay} would move by a part of their "
            "updates only; set optimizer.layer_decay=1"
        )
    if config.precision.params == "bfloat16":
        raise ValueError(
            "optimizer.name=schedule_free computes its iterate from parameters and average, which "
            "precision.params=bfloat16 rounds too much; set precision.params=float32"
        )


def check_axes(model: nnx.Module, layout: StateLayout, rules: Rules, mesh: AnyMesh) -> None:
    """Reject mesh axes over which the model splits nothing."""
    experts = frozenset[str]().union(*jax.tree.leaves(layout.kept_axes))
    if mesh.shape["expert"] > 1 and "expert" not in experts:
        raise ValueError(
            f"mesh.expert={mesh.shape['expert']} divides experts, which {type(model).__name__} "
            "does not have; set mesh.expert=1, and use mesh.data for more devices"
        )
    for axis in unused_axes(layout.param_specs, rules, mesh):
        if axis not in ("pipeline", *rules["seq"]):  # the executor checks the pipeline
            raise ValueError(
                f"mesh.{axis}={mesh.shape[axis]}: {type(model).__name__} splits nothing over "
                f"{axis!r}, so its devices would repeat each other's work; set mesh.{axis}=1"
            )


def check_tokenizer(config: RunConfig, model_config: Any, corpus: Corpus) -> None:
    """Check that the model agrees with the tokenizer about special tokens.

    Raises:
        ValueError: the model uses another padding token, or has token types for only one text per
            row while the data has two.
    """
    if not isinstance(corpus, TextCorpus):
        return
    tokenizer = corpus.tokenizer
    pad = tokenizer.special_ids.get("pad")
    pad_id = getattr(model_config, "pad_id", None)
    if pad_id is not None and pad is not None and pad_id != pad:
        raise ValueError(
            f"model.pad_id={pad_id}, but padding is token {pad} of data.tokenizer="
            f"{config.data.tokenizer!r}; set model.pad_id={pad} and "
            f"model.first_position={pad + 1}"
        )
    _check_end_of_text(config, model_config, tokenizer.eos_id)
    shapes = example_shapes(config.data, config.images)
    has_types = tokenizer.has_token_types and "token_types" in shapes
    # A model with 0 has no token types; it tells two texts apart by the tokens around them.
    if has_types and getattr(model_config, "num_token_types", 2) == 1:
        raise ValueError(
            f"model.num_token_types={model_config.num_token_types}, but data.objective="
            f"{config.data.objective!r} has two texts per row; set model.num_token_types=2"
        )


def _check_end_of_text(config: RunConfig, model_config: Any, eos_id: int) -> None:
    """Reject a model that represents a text by another token than the tokenizer's last one."""
    pool = getattr(model_config, "text_pool", None)
    is_other = pool == "eos" and model_config.eos_id != eos_id
    if is_other or (pool == "highest_id" and eos_id != model_config.vocab_size - 1):
        raise ValueError(
            f"model.text_pool={pool!r} with model.eos_id={model_config.eos_id}, but texts end with "
            f"token {eos_id} of data.tokenizer={config.data.tokenizer!r}; set "
            f"model.text_pool='eos' and model.eos_id={eos_id}"
        )
