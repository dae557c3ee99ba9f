"""Labels of a traced step: kinds of arrays, and how often loops are expected to run."""

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


def counted_as(label: str, tree: Any) -> Any:
    """Count arrays of a traced function under `label`, one of LABELS, and return them unchanged."""
    assert label in LABELS
    return jax.tree.map(lambda x: checkpoint_name(x, label), tree)


def expected_trips(label: str, count: int) -> AbstractContextManager[Any]:
    """Return a scope for a loop whose number of iterations the program does not know.

    Args:
        label: label of the loop.
        count: number of iterations that predictions are made for.
    """
    return jax.named_scope(f"{label}_expected_{count}")


def expected_trips_of(label: str) -> int | None:
    """Return the count of a scope of `expected_trips`; None for another label."""
    match = re.fullmatch(r"\w+_expected_(\d+)", label)
    return int(match[1]) if match else None
