"""Loads and saves config files, and applies command-line overrides to them."""

import contextlib
import importlib.util
import inspect
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from convert.runs import CONFIG_FILE
from fields.numbers import shown
from fields.paths import check_local
from train.config.defaults import default_config
from train.config.old_keys import replace_old_keys
from train.config.overrides import Overrides, store
from train.config.run_length import choose_length
from untrusted.documents import read_yaml
from untrusted.imports import (
    allow_imports,
    allow_imports_in,
    check_imports,
    record_received,
)

_PROJECT_CONFIGS = Path(__file__).parents[2] / "configs"

_log = logging.getLogger(__name__)


def load(
    path: str, overrides: Overrides | Sequence[str] = (), *, allow_import: Sequence[str] = ()
) -> Any:
    """Load a config file and apply overrides; `validate_config` checks the values.

    Args:
        path: `file.py`, `file.py:argument` (the argument is passed to its `get_config`), or
            `config.yaml`. A config of the project, such as `configs/gpt2.py` or `gpt2`, is found
            from any folder that has no such file.
        overrides: parsed, or strings `section.key=value`.
        allow_import: import paths, packages and modules that a `config.yaml` may import from.
            Import paths in overrides need no permission.

    Returns:
        A ConfigDict.

    Raises:
        ValueError: the file is not a config, an override has no value or an unknown key, or a
            `config.yaml` would import code that is not allowed.
        FileNotFoundError: the file does not exist.
    """
    check_local("--config", path)
    file, argument = _split(path)
    if not Path(file).is_file():
        raise FileNotFoundError(
            f"--config={path}: file {file} does not exist; correct the path, or choose a config of "
            f"the project: {', '.join(_project_configs())}"
        )
    if Path(file).parent == _PROJECT_CONFIGS and not path.startswith(str(_PROJECT_CONFIGS)):
        _log.info("config  %s", file)
    is_data = is_data_file(path)
    allow_imports(allow_import)
    if is_data:
        tree = load_data(Path(file))
        record_received(tree, Path(file))
        config = complete(tree)
    else:
        config = _load_python(file, argument)
        allow_imports_in(config.to_dict())
    overrides = Overrides.of(overrides)
    overrides.apply(config)
    choose_length(config, overrides.command_line_keys, is_saved=is_data)
    if is_data:
        check_imports(config.to_dict())  # Now, not after hours of tokenizing.
    return config


def is_data_file(path: str) -> bool:
    """Return whether a config is a file of data, such as a config.yaml, and not the user's code."""
    return _split(path)[0].endswith((".yaml", ".yml"))


def _split(path: str) -> tuple[str, str]:
    """Split `file.py:argument` into the file and the argument, which is "" if there is none.

    A config of the project is only taken if there is no such file. Only a `.py` file has an
    argument. The name of any file or folder may contain colons, such as a
    time: `runs/2026-11-28T10:00:00/config.yaml`.
    """
    if Path(path).is_file():
        return path, ""
    splits = [(path[: end.start() + 3], path[end.end() :]) for end in re.finditer(r"\.py:", path)]
    existing = [split for split in splits if Path(split[0]).is_file()]
    name, _, argument = path.removeprefix(f"{_PROJECT_CONFIGS.name}/").partition(":")
    name = name.removesuffix(".py")
    if not existing and name in _project_configs():
        return str(_PROJECT_CONFIGS / f"{name}.py"), argument
    return next(iter(existing or splits), (path, ""))


def _project_configs() -> list[str]:
    """Return the names of the project's configs, such as `gpt2`."""
    files = sorted(_PROJECT_CONFIGS.glob("*.py"))
    return [file.stem for file in files if "def get_config(" in file.read_text(encoding="utf-8")]


def complete(tree: Mapping[str, Any]) -> ConfigDict:
    """Return a config in which missing keys have their defaults.

    Args:
        tree: some sections with some of their keys.
    """
    config = default_config()
    with config.unlocked(), config.ignore_type():
        for name, section in tree.items():
            if name in config and isinstance(config[name], ConfigDict):
                defaults: Any = config[name]
                for key, value in section.items():
                    store(defaults, key, value)
            else:
                config[name] = section
    return config


def load_data(file: Path) -> dict[str, Any]:
    """Load a YAML file with a config, and import nothing.

    Args:
        file: file, such as the `config.yaml` of a run.

    Raises:
        ValueError: the file is not a config.
        OSError: the file cannot be read.
    """
    tree = read_yaml(file)
    _check_sections(tree, str(file))
    replace_old_keys(tree)
    return _tuples(tree)


def _check_sections(tree: Mapping[Any, Any], where: str) -> None:
    """Check that a config consists of sections with strings as keys, and of `init_from`."""
    for name, value in tree.items():
        if name == "init_from":
            if not isinstance(value, str):
                raise ValueError(
                    f"{where}: init_from={shown(value)} must be a path, or '' for none"
                )
        elif not isinstance(value, Mapping):
            raise ValueError(
                f"{where} must contain sections of keys, like a run's config.yaml, but {name} is "
                f"{shown(value)}"
            )
        keys = [name, *(value if isinstance(value, Mapping) else ())]
        for key in keys:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {shown(key)}, but keys must be strings")


def default_workdir(path: str) -> Path:
    """Return the workdir to use without --workdir: `runs/<config>`.

    `configs/llama.py:3-8b` becomes `runs/llama_3-8b`. A run's `config.yaml` is named after its
    directory: `anywhere/gpt2/config.yaml` becomes `runs/gpt2`.

    Args:
        path: the same as for `load`.
    """
    file, argument = _split(path)
    name = Path(file).stem
    if Path(file).name == CONFIG_FILE:
        name = Path(file).resolve().parent.name
    # An argument may contain slashes, a directory name may not.
    return Path("runs") / "_".join(filter(None, [name, argument.replace("/", "_")]))


def shorten(config: Any) -> None:
    """Shorten the run for --fast_dev_run: 3 steps, each logged, and one evaluation batch.

    Trackers do not record it.
    """
    with config.ignore_type():  # The values in the file may have any type.
        config.train.num_steps = 3
        config.train.num_epochs = None
        if isinstance(config.optimizer.decay_steps, int):
            config.optimizer.decay_steps = min(config.optimizer.decay_steps, 1)
        config.log.every_steps = 1
        config.log.trackers = ()
        config.log.profile_steps = ()
        config.train.early_stopping = None
        config.checkpoint.keep_best = 0  # it needs evaluations before the last step
        config.eval.every_steps = 0
        config.eval.num_batches = 1


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return the config as text that `load` can read from a YAML file."""
    return yaml.safe_dump(_plain(config), sort_keys=False)


def differences(
    saved: Mapping[str, Any], config: Mapping[str, Any], keys: Sequence[str] | None = None
) -> list[str]:
    """Compare two configs.

    Args:
        saved: config in the workdir.
        keys: sections (`model`) or single keys (`train.seed`) to compare; None: all.

    Returns:
        A line `key: saved -> now` for each key that differs.
    """
    old = flat_config(saved)
    new = flat_config(config)
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
        and (keys is None or any(key == k or key.startswith(k + ".") for k in keys))
    ]


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as key -> value, with keys such as "train.seed", and tuples as lists."""
    return _flat(_plain(config))


def _load_python(file: str, argument: str) -> ConfigDict:
    spec = importlib.util.spec_from_file_location("run_config", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config={file} must be a .py or a .yaml file")
    module = importlib.util.module_from_spec(spec)
    with _naming_line(file):
        spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ValueError(f"--config={file} defines no function get_config()")
    if argument and not inspect.signature(get_config).parameters:
        raise ValueError(f"--config={file}:{argument}: its get_config() takes no argument")
    with _naming_line(file):
        config = get_config(argument) if argument else get_config()
    if not isinstance(config, Mapping | ConfigDict):
        raise ValueError(
            f"--config={file}: get_config() returned {shown(config)}, but must return a ConfigDict "
            "or a dict; does it end without a return?"
        )
    is_whole = isinstance(config, ConfigDict)
    _check_sections(config.to_dict() if is_whole else config, f"--config={file}: get_config()")
    config = config if is_whole else complete(config)
    with config.unlocked(), config.ignore_type():
        replace_old_keys(config)
    return config


@contextlib.contextmanager
def _naming_line(file: str) -> Iterator[None]:
    """Report any error of a config file in one sentence, with the line of the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            line = error.lineno
            what = error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == file]
            line = lines[-1] if lines else None
            what = str(error)
        where = file if line is None else f"{file}, line {line}"
        name = type(error).__name__
        raise ValueError(f"--config={where}: {name}: {' '.join(what.split())}") from error


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
            flat[f"{prefix}{key}"] = value
    return flat
