"""The moving average of the parameters, if the run keeps one."""

from typing import Any

from train.optim.ema import find_average
from train.state.train_state import TrainState, merge

Tree = Any


def average_of(state: TrainState) -> Tree:
    """Return the average of the parameters, or the parameters if the run keeps no average.

    The average has the shapes and shardings of the parameters and is float32 or wider, so a model
    runs with either. The average of a frozen parameter is the parameter itself.

    Args:
        state: state in the form that the step takes; arrays or ShapeDtypeStructs.
    """
    average = find_average(state.opt_state)
    return state.params if average is None else merge(average, state.params)
