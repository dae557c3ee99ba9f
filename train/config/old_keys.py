"""Translates keys that configs had in earlier versions, wherever a config is read.

    pipeline.remat=full with train.remat=dots  ->  train.remat=stage,dots
    pipeline.remat=none with train.remat=dots  ->  train.remat=dots

Every config that an earlier version stored has both keys.
"""

import functools
import logging
from typing import Any

from fields.numbers import shown
from train.config.remat import Remat

#: Old key -> the key that has its meaning now.
NEW_KEYS = {"pipeline.remat": "train.remat"}

_log = logging.getLogger(__name__)


def replace_old_keys(config: Any) -> None:
    """Replace old keys in a config, and warn about them.

    Args:
        config: dict of sections or an unlocked ConfigDict, changed in place.

    Raises:
        ValueError: an old key has a value that it could not have.
    """
    pipeline = config.get("pipeline", {})
    if "remat" not in pipeline:
        return
    old = pipeline["remat"]
    if old not in ("full", "none"):
        raise ValueError(
            f"pipeline.remat={shown(old)} must be full or none; write train.remat=stage for full, "
            "and train.remat=none for none"
        )
    if "train" not in config:
        config["train"] = {}
    train = config["train"]
    layers = Remat.parse(str(train.get("remat", "none"))).layers
    new = str(Remat(recomputes_stages=old == "full", layers=layers))
    del pipeline["remat"]
    train["remat"] = new
    _warn(f"pipeline.remat={old} is now a part of train.remat; write train.remat={new} instead")


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once, although a run may read several configs."""
    _log.warning("%s", message)
