"""The run's own record of its config, and the check that a resumed run is the same run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from train.config import differences, load, save_yaml
from train.setup import Run

CONFIG_FILE = "config.yaml"

#: A checkpoint fits only a run that agrees on these.
FIXED = ("model", "data", "train.seed", "optimizer.name")
#: Where things lie and how fast they are read may change.
FREE = ("data.cache_dir", "data.num_threads")


def claim(workdir: Path, run: Run) -> None:
    """Writes `workdir/config.yaml`, after checking that it is no other run's workdir.

    Raises:
        ValueError: a checkpoint lies there that was trained with another model or other data.
    """
    config = resolved(run)
    path = workdir / CONFIG_FILE
    if path.exists() and (workdir / "checkpoints").exists():
        lines = differences(load(str(path)), config, FIXED)
        lines = [line for line in lines if line.partition(":")[0] not in FREE]
        if lines:
            raise ValueError(
                f"{workdir} holds checkpoints of another run; these keys differ (saved -> now): "
                f"{'; '.join(lines)}. Set them back, or choose another --workdir"
            )
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        save_yaml(config, path)


def resolved(run: Run) -> ConfigDict:
    """Returns the run's config with the values that the model took from the data filled in."""
    config: Any = run.config.source.copy_and_resolve_references()
    with config.unlocked(), config.ignore_type():
        for name, value in dataclasses.asdict(run.model_config).items():
            config.model[name] = value
    return config
