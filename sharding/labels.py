"""Labels under which arrays of a traced step are counted."""

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
