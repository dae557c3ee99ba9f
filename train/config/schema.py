"""Turns a config into validated, frozen dataclasses.

Each component owns the dataclass of its section, which checks its own fields. This module checks
combinations of sections, and takes the model's vocabulary, number of labels and input sizes
from the data if the config does not set them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
from ml_collections import ConfigDict

from checkpoint.config import CheckpointConfig
from data.config import DataConfig
from data.image_config import ImageConfig, check_images
from fields.field import field, join_values
from fields.keys import check_keys, nearest
from fields.numbers import shown
from fields.section import Section
from fields.types import check_types, check_value
from models.layers.lora import LoraConfig
from models.preference import PreferenceConfig
from models.registry import MODELS, find_model
from models.section import ModelSettings, split_model_keys
from pipeline.config import PipelineConfig
from pipeline.schedule import SCHEDULES
from pipeline.schedules.table import check_size
from sharding.memory import MemoryConfig
from sharding.mesh import MeshConfig, make_mesh
from sharding.tensor import TensorConfig
from train.config.train_config import EvalConfig, LogConfig, TrainConfig
from train.optim.config import OptimizerConfig
from train.precision import PrecisionConfig

#: Keys of `model` that the data sets if they are absent or None -> how messages name that value.
FROM_DATA = {
    "vocab_size": "the tokenizer's {} tokens",
    "max_positions": "data.sequence_length={}",
    "num_labels": "the {} labels of the data",
    "image_size": "images.size={}",
    "num_channels": "images.channels={}",
}
#: The subset of these keys that must equal the data's value. The others may be larger.
_MUST_EQUAL = ("image_size", "num_channels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The validated config of a run: one dataclass per section, and the model's class and fields.

    The sections and the declared fields, in this order, are the default ConfigDict and the
    reference (see train/config/defaults.py and train/config/reference.py).
    """

    init_from: str = field(
        "",
        "Checkpoint that the initial parameters are read from: a directory with a Hugging Face "
        "model, `OWNER/NAME[@REVISION]` for one on the hub, a checkpoint of Megatron-LM, LiBai or "
        "MaxText, or the directory of a run, also as `s3://` or `gs://`. Empty: initialize the "
        "parameters from `train.seed`.",
        required=True,
    )
    model: ModelSettings
    lora: LoraConfig
    preference: PreferenceConfig
    mesh: MeshConfig
    tensor: TensorConfig
    rules: Mapping[str, Any] = field(
        {},
        "Rows to add to, or change in, the table of sharding/rules.py. A row maps a logical axis "
        "to a mesh axis, to a sequence of mesh axes, or to None to replicate it: "
        "`--config.rules.mlp=None`.",
        required=True,
    )
    pipeline: PipelineConfig
    memory: MemoryConfig
    data: DataConfig
    images: ImageConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    precision: PrecisionConfig
    log: LogConfig
    model_class: type
    model_fields: Mapping[str, Any]  # the keys of `model` that are fields of model_class.Config

    def __post_init__(self):
        check_images(self.data, self.images)
        if self.data.objective != "preference" and self.preference != PreferenceConfig():
            raise ValueError(
                "the section preference is only for data.objective='preference', but it is "
                f"{self.data.objective!r}; remove the section"
            )
        if "batch" in self.rules:
            raise ValueError(
                f"rules.batch={self.rules['batch']!r}: a batch is always split over mesh.data, "
                "mesh.fsdp and mesh.expert; remove it, and set the sizes of these axes"
            )
        if self.train.init_labels != "by_name" and not self.init_from:
            raise ValueError(
                f"train.init_labels={self.train.init_labels!r} needs config.init_from, the "
                "checkpoint to start from; set it, or set train.init_labels='by_name'"
            )
        if self.train.num_epochs is not None and self.data.streaming:
            raise ValueError(
                f"train.num_epochs={shown(self.train.num_epochs)}: with data.streaming=True, the "
                "length of an epoch is known only after the data has been read; set "
                "train.num_steps"
            )
        if self.train.num_epochs is None:  # otherwise the length is known after reading the data
            self.log.check_length(self.train.num_steps)
        mesh = self.mesh
        parts = self.train.num_microbatches
        if mesh.pipeline > 0 and self.pipeline.schedule in SCHEDULES:
            # The schedule is made after the devices have been found; refuse a huge one before that.
            check_size(
                f"pipeline.schedule={self.pipeline.schedule}",
                mesh.pipeline,
                parts,
                self.pipeline.chunks,
            )
        self._check_experts()
        self._check_best()
        sizes = [mesh.data, mesh.fsdp, mesh.expert]
        if self.tensor.mode != "1d":
            sizes.append(mesh.model)
        if -1 in sizes:
            return  # checked again once the number of devices is known
        if self.tensor.mode != "1d":
            self.tensor.factors(mesh.model)
        self._check_batch()
        self._check_rampup()
        self._check_memory()
        is_text = not self.data.reads_images
        if is_text and mesh.context > 0 and self.data.sequence_length % mesh.context:
            length = self.data.sequence_length
            least = length // mesh.context * mesh.context
            nearest = [least] * (least > 0) + [least + mesh.context]
            raise ValueError(
                f"mesh.context={mesh.context} must divide data.sequence_length={length}; choose "
                f"{' or '.join(map(str, nearest))} tokens"
            )

    def _check_batch(self) -> None:
        mesh = self.mesh
        batch = self.data.global_batch_size
        parts = self.train.num_microbatches
        divisor = parts * self.num_replicas
        if batch % divisor:
            of_experts = f" × mesh.expert={mesh.expert}" if mesh.expert > 1 else ""
            in_groups = self.tensor.num_replicas(mesh.model)
            groups = f" × {in_groups} groups of examples in tensor.mode={self.tensor.mode!r}"
            of_tensor = groups if in_groups > 1 else ""
            raise ValueError(
                f"train.num_microbatches={parts} × mesh.data={mesh.data} × mesh.fsdp={mesh.fsdp}"
                f"{of_experts}{of_tensor} must divide data.global_batch_size={batch}; the next "
                f"batch size that fits is {-(-batch // divisor) * divisor}"
            )

    def _check_memory(self) -> None:
        memory = self.memory
        mesh = self.mesh
        shards = mesh.fsdp > 1 or self.tensor.mode != "1d"
        if memory.shard_parameters_fraction != 1 and memory.zero_stage != 3 and not shards:
            raise ValueError(
                f"memory.shard_parameters_fraction={memory.shard_parameters_fraction} requires "
                f"memory.zero_stage=3, not {memory.zero_stage}, or mesh.fsdp of more than 1; "
                "change one of them"
            )

    def make_mesh(self, devices: Sequence[Any]) -> jax.sharding.Mesh:
        """Return the mesh of the run on the first of the devices; see sharding/mesh.py."""
        return make_mesh(self.mesh, devices, self.tensor)

    @property
    def num_replicas(self) -> int:
        """Number of groups of devices that have different examples."""
        return self.mesh.num_replicas * self.tensor.num_replicas(self.mesh.model)

    def _check_rampup(self) -> None:
        replicas = self.num_replicas
        count = self.train.num_microbatches
        unit = replicas if count == 1 else self.data.global_batch_size // count
        sizes = self.data.batch_sizes
        size = sizes.undivided_size(count, replicas)
        if size is not None:
            raise ValueError(
                f"data.rampup_batch_size={self.data.rampup_batch_size!r}: a batch of {size} cannot "
                f"be divided into {sizes.num_microbatches(size, count)} microbatch(es) × "
                f"{replicas} replica(s) (mesh.data × mesh.fsdp × mesh.expert); choose START and "
                f"INCREMENT that are multiples of {unit}, or another train.num_microbatches"
            )

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return the config with values replaced: `section.key` -> value.

        Raises:
            ValueError: the values do not fit together.
        """
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        changed = {k: dataclasses.replace(getattr(self, k), **v) for k, v in sections.items()}
        return dataclasses.replace(self, **changed)

    def with_batch_size(self, size: int) -> Self:
        """Return the config of the steps of a ramp-up that have this global batch size."""
        count = self.data.batch_sizes.num_microbatches(size, self.train.num_microbatches)
        return self.with_values(
            {
                "data.global_batch_size": size,
                "data.rampup_batch_size": (),
                "train.num_microbatches": count,
            }
        )

    def _check_best(self) -> None:
        checkpoint = self.checkpoint
        if self.train.early_stopping is not None and not checkpoint.keep_best:
            raise ValueError(
                f"train.early_stopping={self.train.early_stopping} keeps the best checkpoint, but "
                f"checkpoint.keep_best={checkpoint.keep_best}; set checkpoint.keep_best=1"
            )
        if checkpoint.keep_best and not (checkpoint.every_steps and self.eval.every_steps):
            raise ValueError(
                f"checkpoint.keep_best={checkpoint.keep_best} compares checkpoints of evaluated "
                f"steps, but checkpoint.every_steps={checkpoint.every_steps} and "
                f"eval.every_steps={self.eval.every_steps}; set both to more than 0"
            )

    def _check_experts(self) -> None:
        num_experts = self.model_fields.get("num_experts")
        divisor = self.mesh.expert
        if num_experts and divisor > 1 and num_experts % divisor:
            choices = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"mesh.expert={divisor} must divide model.num_experts={num_experts}; choose "
                f"{join_values(choices)}"
            )

    def model_config(self, *, vocab_size: int | None = None, num_labels: int | None = None) -> Any:
        """Build the model's config, with sizes that it does not set taken from the data.

        Args:
            vocab_size: number of tokens of the tokenizer; None if there is no tokenizer.
            num_labels: number of labels in the data; None if it has no labels.

        Raises:
            ValueError: the data has more tokens, positions or labels than the model, images of
                another size, or no value for a size that the model does not set.
        """
        fields = dict(self.model_fields)
        known = {each.name: each for each in dataclasses.fields(self.model_class.Config)}
        values = {"vocab_size": vocab_size, "num_labels": num_labels}
        if self.data.reads_images:
            values |= {"image_size": self.images.size, "num_channels": self.images.channels}
        if self.data.reads_text:
            values["max_positions"] = self.data.sequence_length
        for name in FROM_DATA.keys() & known.keys():
            self._take_from_data(name, values.get(name), fields, known[name])
        return self.model_class.Config(**fields)

    def _take_from_data(
        self, name: str, value: int | None, fields: dict[str, Any], field: dataclasses.Field
    ) -> None:
        """Set an open field to the data's value, or check that its value fits the data."""
        configured_value = fields.get(name)
        if configured_value is None and value is not None:
            fields[name] = value
        elif configured_value is None:
            fields.pop(name, None)
            if field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(
                    f"model.{name} is not set, and data.objective={self.data.objective!r} does not "
                    f"determine it; is model.name={self.model.name!r} a model for this objective?"
                )
        elif value is not None and name in _MUST_EQUAL and configured_value != value:
            raise ValueError(
                f"model.{name}={configured_value} must equal {FROM_DATA[name].format(value)}; "
                f"do not set model.{name}, set the key of the section images"
            )
        elif value is not None and configured_value < value:
            raise ValueError(
                f"model.{name}={configured_value} is less than {FROM_DATA[name].format(value)}"
            )


#: Section of the config -> the dataclass that validates it.
SECTIONS: dict[str, type[Section]] = {
    each.name: each.type
    for each in dataclasses.fields(RunConfig)
    if isinstance(each.type, type) and issubclass(each.type, Section)
}


def validate_config(config: Any) -> RunConfig:
    """Validate a config.

    Args:
        config: ConfigDict, as `config_files.load` returns it.

    Raises:
        ValueError: a key is unknown (the message has the nearest known one) or missing, or a value
            is not valid.
    """
    known = [*SECTIONS, "rules", "init_from"]
    for name in config:
        if name not in known:
            raise ValueError(f"config.{name} is unknown{nearest(name, known)}")
        if name != "init_from" and not isinstance(config[name], ConfigDict):
            raise ValueError(f"config.{name}={shown(config[name])} must be a section of keys")
    fields = {name: config[name].to_dict() for name in config if name != "init_from"}
    init_from = config.get("init_from", "")
    if not isinstance(init_from, str):
        raise ValueError(f"config.init_from={shown(init_from)} must be a path, or '' for none")
    if not fields.get("model", {}).get("name"):
        raise ValueError(
            f"config.model.name is missing; choose {', '.join(MODELS)}, or an import path, or set "
            "config.init_from to a checkpoint"
        )
    if fields.get("data", {}).get("tokenizer") == "init_from":
        raise ValueError(
            "data.tokenizer='init_from' needs config.init_from, the checkpoint to start from"
        )
    model_class = find_model(fields["model"]["name"])
    fields["model"], model_fields = split_model_keys(fields["model"], model_class)
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        values = fields.get(name, {})
        check_keys(section, values, f"config.{name}")
        sections[name] = section(**values)
    are_open = check_keys(model_class.Config, model_fields, "config.model", may_be_open=FROM_DATA)
    check_types(model_class.Config, model_fields, "model", exclude=are_open)
    return RunConfig(
        **sections,
        rules=fields.get("rules", {}),
        init_from=init_from,
        model_class=model_class,
        model_fields=model_fields,
    )


def checked_value(config: Any, key: str) -> Any:
    """Return a value of a config that is needed before the config is complete.

    Args:
        config: ConfigDict.
        key: declared key, `section.name`.

    Raises:
        ValueError: the value is not valid.
    """
    section, _, name = key.partition(".")
    section_class: Any = SECTIONS[section]
    fields = {field.name: field for field in dataclasses.fields(section_class)}
    return check_value(fields[name], config[section][name], key)
