"""From a config file and command-line overrides to the frozen dataclasses that components own."""

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import pkgutil
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from checkpoint.manager import CheckpointConfig
from data.config import DataConfig
from models.stack import REMAT_POLICIES
from sharding.mesh import MeshConfig
from sharding.pipeline.config import PipelineConfig
from train.metrics import LogConfig
from train.optimizer import OptimizerConfig

#: `model.name` -> import path of the class.
MODELS = {"gpt2": "models.gpt2:GPT2"}

#: Keys of a model's config that may be left open (absent or None): the data gives them a value.
FROM_DATA = ("vocab_size", "max_positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, division and randomness of a run."""

    num_steps: int
    num_microbatches: int
    seed: int
    remat: str

    def __post_init__(self):
        for name in ("num_steps", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"train.seed={self.seed} must lie in 0 .. 2**32 - 1")
        if self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"train.remat={self.remat!r} is unknown; choose {', '.join(REMAT_POLICIES)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When to evaluate, and on how much of the validation split."""

    every_steps: int
    num_batches: int | None

    def __post_init__(self):
        if self.every_steps < 0:
            raise ValueError(f"eval.every_steps={self.every_steps} must not be negative")
        if self.num_batches is not None and self.num_batches < 1:
            raise ValueError(
                f"eval.num_batches={self.num_batches} must be at least 1, or None for all"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of the computation and of the master weights."""

    compute: str
    params: str

    def __post_init__(self):
        for name, dtypes in (
            ("compute", ("bfloat16", "float32", "float64")),
            ("params", ("float32", "float64")),
        ):
            if getattr(self, name) not in dtypes:
                value, choices = getattr(self, name), ", ".join(dtypes)
                raise ValueError(f"precision.{name}={value!r} is unknown; choose {choices}")
        if (self.compute == "float64") != (self.params == "float64"):
            raise ValueError(
                f"precision.compute={self.compute!r} and precision.params={self.params!r}: "
                "float64 must be chosen for both or for neither"
            )


SECTIONS = {
    "mesh": MeshConfig,
    "pipeline": PipelineConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "precision": PrecisionConfig,
    "log": LogConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, checked: one dataclass per section, the model's class and its fields."""

    mesh: MeshConfig
    pipeline: PipelineConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    precision: PrecisionConfig
    log: LogConfig
    rules: Mapping[str, Any]
    model_name: str
    model_class: type
    model_fields: Mapping[str, Any]

    def __post_init__(self):
        mesh, batch, parts = self.mesh, self.data.global_batch_size, self.train.num_microbatches
        if -1 in (mesh.data, mesh.fsdp):
            return  # checked when the number of devices is known
        if batch % (parts * mesh.data * mesh.fsdp):
            raise ValueError(
                f"train.num_microbatches={parts} × mesh.data={mesh.data} × mesh.fsdp={mesh.fsdp} "
                f"must divide data.global_batch_size={batch}; the next batch size that fits is "
                f"{-(-batch // (parts * mesh.data * mesh.fsdp)) * parts * mesh.data * mesh.fsdp}"
            )
        if mesh.context > 0 and self.data.sequence_length % mesh.context:
            raise ValueError(
                f"mesh.context={mesh.context} must divide "
                f"data.sequence_length={self.data.sequence_length}"
            )

    def model_config(self, *, vocab_size: int) -> Any:
        """Returns the model's own config, with what it leaves open taken from the data.

        Args:
            vocab_size: of the tokenizer.

        Raises:
            ValueError: the tokenizer has more tokens than the model.
        """
        fields = dict(self.model_fields)
        known = {field.name for field in dataclasses.fields(self.model_class.Config)}
        values = (vocab_size, self.data.sequence_length)
        for name, value in zip(FROM_DATA, values, strict=True):
            if name in known and fields.get(name) is None:
                fields[name] = value
            if name in known and fields[name] < value:
                raise ValueError(
                    f"model.{name}={fields[name]} is less than the "
                    + (f"tokenizer's {value} tokens" if name == "vocab_size" else "")
                    + (f"data.sequence_length={value}" if name == "max_positions" else "")
                )
        return self.model_class.Config(**fields)


def load(path: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Returns the config of a file with overrides applied.

    Args:
        path: `file.py`, `file.py:argument` (passed to its `get_config`), or `config.yaml`.
        overrides: strings `section.key=value`.

    Raises:
        ValueError, FileNotFoundError: what is wrong, in one sentence.
    """
    file, _, argument = path.partition(":")
    if not Path(file).is_file():
        raise FileNotFoundError(f"--config={path}: there is no file {file}")
    if file.endswith((".yaml", ".yml")):
        config = _load_yaml(file)
    else:
        config = _load_python(file, argument)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--config.{override} lacks a value; write --config.{key}=value")
        _set(config, key, text)
    return config


def resolve(config: Any) -> RunConfig:
    """Returns the run that a config describes.

    Raises:
        ValueError: an unknown or missing key (with the nearest known one), a bad value.
    """
    known = [*SECTIONS, "model", "rules"]
    for name in config:
        if name not in known:
            raise ValueError(f"config.{name} is unknown{_nearest(name, known)}")
        if not isinstance(config[name], ConfigDict):
            raise ValueError(f"config.{name}={config[name]!r} must be a section of keys")
    fields = {name: config[name].to_dict() for name in config}
    if "name" not in fields.get("model", {}):
        raise ValueError(f"config.model.name is missing; choose {', '.join(MODELS)}, or a path")
    model_name = fields["model"].pop("name")
    model_class = _model_class(model_name)
    if "seed" in fields.get("data", {}):
        raise ValueError("config.data.seed: unknown key; train.seed is that of the data too")
    sections = {
        name: _build(section, fields.get(name, {}), name) for name, section in SECTIONS.items()
    }
    sections["data"] = dataclasses.replace(sections["data"], seed=sections["train"].seed)
    _check_fields(model_class.Config, fields["model"], "model", may_be_open=FROM_DATA)
    return RunConfig(
        **sections,
        rules=fields.get("rules", {}),
        model_name=model_name,
        model_class=model_class,
        model_fields=fields["model"],
    )


def overrides(arguments: Sequence[str]) -> list[str]:
    """Returns `section.key=value` of every `--config.section.key=value` on a command line.

    Raises:
        ValueError: an argument that is none.
    """
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--config."):
            raise ValueError(
                f"unknown argument {argument!r}; config keys are set as --config.section.key=value"
            )
        if "=" not in argument and rest and not rest[0].startswith("--"):
            argument += "=" + rest.pop(0)
        found.append(argument.removeprefix("--config."))
    return found


def shorten(config: Any) -> None:
    """Makes the run a try: 3 steps, each logged, and one batch of evaluation."""
    config.train.num_steps = 3
    config.log.every_steps = 1
    config.eval.every_steps = 0
    config.eval.num_batches = 1


def save_yaml(config: ConfigDict, path: Path) -> None:
    """Writes the config so that `load` gives it back; the file appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(yaml.safe_dump(_plain(config.to_dict()), sort_keys=False))
    temporary.replace(path)


def differences(saved: ConfigDict, config: ConfigDict, keys: Sequence[str]) -> list[str]:
    """Returns a line per key below the given ones whose value differs: `key: saved -> now`."""
    old, new = _flat(saved.to_dict()), _flat(config.to_dict())
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old | new)
        if any(key == k or key.startswith(k + ".") for k in keys) and old.get(key) != new.get(key)
    ]


def _load_python(file: str, argument: str) -> ConfigDict:
    spec = importlib.util.spec_from_file_location("run_config", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config={file} is neither a .py nor a .yaml file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ValueError(f"--config={file} defines no function get_config()")
    if argument and not inspect.signature(get_config).parameters:
        raise ValueError(f"--config={file}:{argument}: its get_config() takes no argument")
    return get_config(argument) if argument else get_config()


def _load_yaml(file: str) -> ConfigDict:
    try:
        tree = yaml.safe_load(Path(file).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config={file} is no valid YAML: {error}") from None
    if not isinstance(tree, dict) or not all(isinstance(v, dict) for v in tree.values()):
        raise ValueError(f"--config={file} must hold sections of keys, as a run's config.yaml does")
    return ConfigDict(_tuples(tree))


def _set(config: Any, key: str, text: str) -> None:
    section, _, name = key.partition(".")
    keys = [f"{s}.{k}" for s in config if isinstance(config[s], ConfigDict) for k in config[s]]
    if section == "rules" and name and "rules" in config:
        config.rules[name] = _parse(text)
        return
    if key not in keys:
        raise ValueError(f"--config.{key}: unknown key{_nearest(key, keys)}")
    default, value = config[section][name], _parse(text)
    if isinstance(default, str):
        value = text
    elif isinstance(default, tuple):
        parts = text.split(",") if isinstance(value, str) else value
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        value = tuple(part for part in parts if part != "")
    elif isinstance(default, float) and type(value) is int:
        value = float(value)
    numbers = section == "model" and {type(default), type(value)} == {int, float}
    # None and the kind of number are left to `resolve`, which knows what each key takes.
    if None not in (default, value) and type(value) is not type(default) and not numbers:
        kind = type(default).__name__
        raise ValueError(f"--config.{key}={text}: must be of type {kind}, such as {default!r}")
    with config.ignore_type():
        config[section][name] = value


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _build(section: type, values: dict[str, Any], name: str) -> Any:
    _check_fields(section, values, name)
    return section(**values)


def _check_fields(
    section: type, values: dict[str, Any], name: str, *, may_be_open: Sequence[str] = ()
) -> None:
    """Refuses unknown and missing keys and wrong types; whole numbers become floats in place."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    for key in values:
        if key not in fields:
            keys = [f"{name}.{k}" for k in fields]
            raise ValueError(f"config.{name}.{key}: unknown key{_nearest(f'{name}.{key}', keys)}")
    for key, field in fields.items():
        if values.get(key) is None and key in may_be_open:
            continue
        if key not in values:
            if field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"config.{name}.{key} is missing")
            continue
        value = values[key]
        kinds: tuple[Any, ...] = typing.get_args(field.type) or (field.type,)
        if float in kinds and type(value) is int:
            values[key] = value = float(value)
        # Other annotations than these are the section's own to check.
        if {*kinds} <= {int, float, str, bool, type(None)} and type(value) not in kinds:
            kind = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(f"{name}.{key}={value!r} must be of type {kind}")


def _model_class(name: str) -> type:
    path = MODELS.get(name, name)
    try:
        model_class = pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"model.name={name!r} is neither {' nor '.join(MODELS)} nor an import path "
            f"'package.module:Class': {error}"
        ) from None
    if not dataclasses.is_dataclass(getattr(model_class, "Config", None)):
        raise ValueError(f"model.name={name!r}: the class has no dataclass `Config`")
    return model_class


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    close = close or [k for k in known if k.endswith("." + key.rpartition(".")[2])][:1]
    return f"; the nearest known key is {close[0]}" if close else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
