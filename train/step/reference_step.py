"""The step that evaluates the initial model, before any training, on a batch.

    batch [M·B, ...] -> microbatches [M, B, ...] -> forward passes -> arrays [M·B, ...]

M microbatches of B examples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from models.functions import ModelFunctions
from pipeline.runtime.gather import ParamSharding
from sharding.logical import Rules, axis_rules
from train.step.train_step import Batch, StepConfig, make_teacher, to_microbatches


def make_reference_step(
    functions: ModelFunctions,
    config: StepConfig,
    param_sharding: ParamSharding,
    rules: Rules,
) -> Callable[[Any, Batch], Batch]:
    """Build the function `reference_step(params, batch) -> arrays [M·B, ...]`.

    The arrays are the outputs of `functions.reference` for every example of the batch.

    Args:
        functions: model's functions; they have `reference`.
        config: settings of the step.
        param_sharding: how the parameters are sharded over the mesh.
        rules: sharding rules.
    """
    teaching = dataclasses.replace(functions, teach=functions.reference)
    teach = make_teacher(teaching, config, param_sharding)
    assert teach is not None

    def reference_step(params: Any, batch: Batch) -> Batch:
        with axis_rules(rules), config.traced():
            outputs = teach(params, to_microbatches(batch, config))
        return {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in outputs.items()}

    return reference_step
