"""Labels of a traced step: kinds of arrays, unrolled layers, and how often loops run."""

import math
import re
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

#: Labels that `counted_as` accepts; then the label of all arrays that are not inputs and have none.
LABELS = ("parameters", "gradients", "activations")
TEMPORARIES = "temporaries"
#: Label of the memory that a step needs beyond the arrays that are counted here.
GAPS = "gaps"
#: Name that `begins_layer` gives to an array.
LAYER = "unrolled_layer"


def counted_as(label: str, tree: Any) -> Any:
    """Count arrays of a traced function under `label`, one of LABELS, and return them unchanged."""
    assert label in LABELS
    return jax.tree.map(lambda x: checkpoint_name(x, label), tree)


def begins_layer(x: Any) -> Any:
    """Mark the place in a traced function where the next unrolled layer begins, or the last ends.

    Returns:
        x, the value that layers hand to each other, unchanged.
    """
    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(structure, [checkpoint_name(leaves[0], LAYER), *leaves[1:]])


def expected_trips(
    label: str, *, experts: int, mean: int, first: int, size: int, parts: int
) -> AbstractContextManager[Any]:
    """Return a scope for a loop over blocks of rows, whose number the program does not know.

    Predictions are made for a *load*: how many rows the experts of the busiest device have, as a
    multiple of the mean.

    Args:
        label: label of the loop.
        experts: number of experts of a device that can have rows.
        mean: mean number of rows of an expert.
        first: number of rows that come before the blocks.
        size: number of rows in a block.
        parts: number of devices that the experts are divided over.
    """
    scope = f"{label}_of_{experts}_with_{mean}_after_{first}_by_{size}_on_{parts}"
    return jax.named_scope(scope)


def expected_trips_of(label: str, load: float = 1.0) -> float | None:
    """Return the mean number of iterations of a loop in a scope of `expected_trips`.

    Args:
        label: label of a loop.
        load: rows of the most loaded experts as a multiple of the mean. As many experts of the
            device as possible have so many, and the others none.

    Returns:
        The number, which is whole for a load of 1; None for another label.
    """
    match = re.fullmatch(r"\w+_of_(\d+)_with_(\d+)_after_(\d+)_by_(\d+)_on_(\d+)", label)
    if match is None:
        return None
    experts, mean, first, size, parts = map(int, match.groups())
    blocks = experts * math.ceil(max(0.0, load * mean - first) / size)
    return blocks * min(1, parts / load)  # with all rows on one device, loads cannot differ more
