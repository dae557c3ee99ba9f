"""The value of `train.remat`: which activations stay in memory until the backward pass.

    stage,dots  between the passes of a microbatch, a pipeline stage keeps only its input; while its
                backward pass runs, each layer keeps its matrix products
    dots        each layer keeps its matrix products until the microbatch's backward pass

`stage` alone stands for `stage,none`. With `auto`, a run takes the first of `levels` that fits.
"""

import dataclasses
from collections.abc import Collection

from models.stack import REMAT_POLICIES

#: A run chooses the value for itself.
AUTO_REMAT = "auto"

_STAGE = "stage"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """A parsed value of `train.remat`; `str` returns the value.

    Attributes:
        recomputes_stages: whether the backward pass of a stage first runs its forward pass again.
        layers: activations that a layer keeps: a key of REMAT_POLICIES, or names of activations,
            separated by commas; AUTO_REMAT if they are not chosen yet.
    """

    recomputes_stages: bool
    layers: str

    @classmethod
    def parse(cls, text: str) -> "Remat":
        """Parse a value of `train.remat`.

        Raises:
            ValueError: a word is empty or repeated, or `stage` is not the first word.
        """
        first, *others = words = text.split(",")
        problem = None
        if not all(words):
            problem = "contains an empty name"
        elif _STAGE in others:
            problem = f"must contain {_STAGE!r} only as its first word"
        elif len({*words}) < len(words):
            problem = "contains a word twice"
        elif AUTO_REMAT in words and len(words) > 1:
            problem = f"must not add to {AUTO_REMAT!r}, which chooses all of it"
        if problem:
            values = ", ".join([AUTO_REMAT, *REMAT_POLICIES])
            raise ValueError(
                f"train.remat={text!r} {problem}; choose {values}, or names of activations "
                f"separated by commas, with or without {_STAGE!r} before them"
            )
        if first != _STAGE:
            return cls(recomputes_stages=False, layers=text)
        return cls(recomputes_stages=True, layers=",".join(others) or "none")

    def __str__(self) -> str:
        if not self.recomputes_stages:
            return self.layers
        return _STAGE if self.layers == "none" else f"{_STAGE},{self.layers}"


#: Activations that a layer stops keeping, one more at each level. The MLP's take the most memory,
#: so they are the first. Attention takes the longest to recompute, so its output is kept longest.
_DROPPED = ("mlp", "attention_out", "qkv")


def levels(activation_names: Collection[str]) -> list[str]:
    """Return what layers may keep, from all activations to only their inputs.

    Each level takes less memory and more time than the one before.

    Args:
        activation_names: names of the activations of a model's blocks.
    """
    names = {*activation_names}
    values = ["none", "dots"]
    for name in _DROPPED:
        names.discard(name)
        values.append(",".join(sorted(names)))
    return [*dict.fromkeys(filter(None, values)), "full"]
