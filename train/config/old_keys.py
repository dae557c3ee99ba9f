"""Translates keys of earlier versions and of Colossal-AI, wherever a config is read.

    pipeline.remat=full with train.remat=dots  ->  train.remat=stage,dots
    pipeline.remat=none with train.remat=dots  ->  train.remat=dots
    model.first_windowed_layer=2 of 4 layers   ->  model.layer_types=[full, full, window, window]

Every config that an earlier version stored has both keys of the first two lines.
"""

import functools
import logging
from typing import Any

from fields.numbers import shown
from train.config.colossal_ai import replace_parallel
from train.config.remat import AUTO_REMAT, Remat

#: Old key -> the key that has its meaning now.
NEW_KEYS = {"pipeline.remat": "train.remat"}

_log = logging.getLogger(__name__)


def replace_old_keys(config: Any) -> None:
    """Replace the section of Colossal-AI in a config, and old keys, with a warning.

    Args:
        config: dict of sections or an unlocked ConfigDict, changed in place.

    Raises:
        ValueError: an old key has a value that it could not have.
    """
    replace_parallel(config)
    _replace_first_windowed_layer(config.get("model", {}))
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
    if layers == AUTO_REMAT:  # configs had `dots` where they have `auto` now
        layers = "dots"
    new = str(Remat(recomputes_stages=old == "full", layers=layers))
    del pipeline["remat"]
    train["remat"] = new
    _warn(f"pipeline.remat={old} is now a part of train.remat; write train.remat={new} instead")


def _replace_first_windowed_layer(model: Any) -> None:
    """Replace the number of layers before those with a sliding window by the types of layers."""
    if "first_windowed_layer" not in model:
        return
    num_full = model["first_windowed_layer"]
    num_layers = model.get("num_layers", 0)
    del model["first_windowed_layer"]
    if num_full == 0:
        return  # as today by default
    if type(num_full) is not int or not 0 < num_full < num_layers:
        raise ValueError(
            f"model.first_windowed_layer={shown(num_full)} must be from 0 to "
            f"model.num_layers={num_layers} - 1; write model.layer_types instead"
        )
    model["layer_types"] = ("full",) * num_full + ("window",) * (num_layers - num_full)
    _warn(
        f"model.first_windowed_layer={num_full} is now model.layer_types, which has full "
        f"{num_full} times and then window"
    )


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once, although a run may read several configs."""
    _log.warning("%s", message)
