"""The parameters that an evaluation uses: their moving average, if a run keeps one."""

from typing import Any

from train.optim.ema import find_average
from train.state.train_state import TrainState, merged

Tree = Any


def averaged(state: TrainState) -> Tree:
    """Returns the average of the parameters, laid out as these are.

    A model runs with either alike: arrays have the same shapes and shardings, and are float32 or
    wider. What is frozen is its own average; the parameters are, where a run keeps none.

    Args:
      state: of arrays or ShapeDtypeStructs, as the step takes it.
    """
    average = find_average(state.opt_state)
    return state.params if average is None else merged(average, state.params)


def evaluated(state: TrainState, *, teaches: bool) -> tuple[Tree, Tree | None]:
    """Returns the parameters that an evaluation is of, and those of the teacher, if there is one.

    That is the average, or, of a model that learns from it, the parameters and the average.

    Args:
      state: as for `averaged`.
      teaches: whether the model has `teach`; see models/stack.py.
    """
    average = averaged(state)
    return (state.params, average) if teaches else (average, None)
