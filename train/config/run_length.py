"""The length of a run: `train.num_steps`, or `train.num_epochs` passes over its data.

The number of steps of an epoch is known when the data has been read. Until then a run with
`num_epochs` has the default number of steps.
"""

import math
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from fields.field import declarations
from fields.numbers import shown
from train.config.overrides import store
from train.config.schema import RunConfig
from train.config.train_config import TrainConfig

_STEPS = "train.num_steps"
_EPOCHS = "train.num_epochs"
_DEFAULT_STEPS = declarations(TrainConfig)["num_steps"].default


def choose_length(config: Any, overridden: Collection[str] = (), *, is_saved: bool = False) -> None:
    """Let only one of the two keys set the length of a run.

    Args:
        config: ConfigDict, changed in place.
        overridden: keys set on top of the file; if one of the two is among them, it counts.
        is_saved: whether the file may be the config of a run, which has the number of steps of its
            epochs too. `with_num_steps` compares them.

    Raises:
        ValueError: the same source sets both.
    """
    train = config.train
    if train.get("num_epochs") is None:
        return
    both = f"{_STEPS}={shown(train.num_steps)} and {_EPOCHS}={shown(train.num_epochs)}"
    if _STEPS in overridden and _EPOCHS in overridden:
        raise ValueError(f"{both} both set the length of the run; set only one of them")
    if _STEPS in overridden:
        store(train, "num_epochs", None)
    elif _EPOCHS in overridden:
        store(train, "num_steps", _DEFAULT_STEPS)
    elif train.num_steps != _DEFAULT_STEPS and not is_saved:
        raise ValueError(
            f"{both} both set the length of the run; remove one of them from the config file"
        )


def with_num_steps(config: RunConfig, epoch_elements: Fraction) -> RunConfig:
    """Return the config with the number of steps of its epochs, if it counts epochs.

    Args:
        epoch_elements: exact length of an epoch in elements of the train stream, maybe a fraction.

    Raises:
        ValueError: the config is the one of a run that had another number of steps, or its
            learning-rate schedule does not fit into the run.
    """
    train = config.train
    if train.num_epochs is None:
        return config
    # Rounded up, so that no example is left out.
    num_elements = Fraction(str(train.num_epochs)) * epoch_elements
    num_steps = math.ceil(config.data.batch_sizes.num_steps(num_elements))
    if train.num_steps not in (_DEFAULT_STEPS, num_steps):
        raise ValueError(
            f"{_STEPS}={train.num_steps}, but {_EPOCHS}={train.num_epochs} of this data are "
            f"{num_steps} steps; set --config.{_EPOCHS}={train.num_epochs} or "
            f"--config.{_STEPS}={train.num_steps}"
        )
    config.optimizer.check_length(num_steps)
    config.log.check_length(num_steps)
    return config.with_values({"train.num_steps": num_steps})
