"""The run's own record of its config, and the check that a resumed run is the same run."""

import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

from train.config import SECTIONS, differences, load, save_yaml
from train.setup import Run

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"

#: A checkpoint fits only a run that agrees on these.
FIXED = ("model", "data", "train.seed", "optimizer.name")
#: Where things lie and how fast they are read may change.
FREE = ("data.cache_dir", "data.num_threads")


def check(workdir: Path, run: Run) -> None:
    """Checks that `workdir` holds no checkpoint of another run.

    Raises:
        ValueError: it holds one of another model or other data; the keys that differ are named.
    """
    path = workdir / CONFIG_FILE
    if not path.exists() or not has_checkpoint(workdir):
        return
    lines = differences(load(str(path)), resolved(run), FIXED)
    lines = [line for line in lines if line.partition(":")[0] not in FREE]
    if lines:
        raise ValueError(
            f"{workdir} holds checkpoints of another run; these keys differ (saved -> now): "
            f"{'; '.join(lines)}. Set them back, or choose another --workdir"
        )


def claim(workdir: Path, run: Run) -> None:
    """Writes `workdir/config.yaml`."""
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        save_yaml(resolved(run), workdir / CONFIG_FILE)


def has_checkpoint(workdir: Path) -> bool:
    return any(path.name.isdigit() for path in (workdir / CHECKPOINTS).glob("*"))


def resolved(run: Run) -> ConfigDict:
    """Returns every key of the run with the value that it has, whatever the config left open."""
    config = run.config
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    del sections["data"]["seed"]  # it is train.seed
    model = {"name": config.model_name, **dataclasses.asdict(run.model_config)}
    return ConfigDict({"model": model, **sections, "rules": dict(config.rules)})
