"""Metrics of a model's head that are not scalars; see models/stack.py."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extremes:
    """Sums of which a run reports the least and the largest mean: `<name>_min` and `<name>_max`.

    It is a part of the structure of a head's results, so the names are known before any values.

    Attributes:
        sums: array of sums with the same weight.
    """

    sums: jax.Array
