"""Selects the parameters to evaluate: their moving average, if the run keeps one."""

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


def params_to_evaluate(state: TrainState, *, teaches: bool) -> tuple[Tree, Tree | None]:
    """Return (parameters to evaluate, teacher's parameters or None).

    That is (average, None), or (parameters, average) for a model that learns from its average.

    Args:
        state: as for `averaged`.
        teaches: whether the model has `teach`; see models/stack.py.
    """
    average = average_of(state)
    return (state.params, average) if teaches else (average, None)
