"""Writes the config of a run, and keeps the configs that the run had at earlier starts.

    WORKDIR/config.yaml         the newest config
    WORKDIR/configs/0001.yaml   the config of the first start, if a later start changed it
    WORKDIR/configs/0002.yaml   the next one

A start with an unchanged config adds no file.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convert.runs import CONFIG_FILE
from train.config.config_files import as_yaml, differences, load_data
from untrusted.files import read_text, write_text
from untrusted.messages import shortened

#: The folder of earlier configs.
CONFIGS = "configs"

_FILE_NAME = re.compile(r"(\d{4,})\.yaml")

_log = logging.getLogger(__name__)


def write_config(
    workdir: Path,
    config: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> None:
    """Write `config.yaml`, keep earlier configs that differ from it, and log the changes.

    Args:
        saved: config of the newest checkpoint, which the changes refer to; None: the
            present `config.yaml` decides.
        completed: adds the defaults of keys that an earlier config does not have.

    Raises:
        OSError: a file cannot be read or written.
    """
    file = workdir / CONFIG_FILE
    old = _read(file)
    before = saved
    if old is not None and saved is None:
        try:
            before = load_data(file)
        except ValueError as error:
            _log.warning("the config may have changed since the last start: %s", error)
    new = as_yaml(config)
    # Anyone can edit `config.yaml`, so it may differ from the config of the checkpoint.
    for earlier in (None if saved is None else as_yaml(saved), old):
        if earlier not in (None, new):
            _keep(workdir / CONFIGS, earlier)
    if old != new:
        write_text(file, new)
    if before is not None and (lines := differences(completed(before), config)):
        listed = "\n".join(f"  {shortened(line)}" for line in lines)
        _log.info("the config has changed; %s has earlier ones:\n%s", workdir / CONFIGS, listed)


def _read(path: Path) -> str | None:
    """Return the text of a config; None if there is none, or something that is not a text."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        _log.warning("%s", error)
        return None


def _keep(directory: Path, text: str) -> None:
    """Write a config under the next free number, unless the directory has it already."""
    directory.mkdir(exist_ok=True)
    matches = [_FILE_NAME.fullmatch(path.name) for path in directory.iterdir()]
    names = {int(match[1]): match[0] for match in matches if match}
    if not any(_read(directory / name) == text for name in names.values()):
        write_text(directory / f"{max(names, default=0) + 1:04d}.yaml", text)
