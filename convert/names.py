"""Where each tensor of a Hugging Face model lies in one of ours: one row a weight, both ways."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from checkpoint.lazy import Index

#: How a tensor of theirs is ours:
#: linear: [prod(outputs), prod(inputs)] is [*inputs, *outputs];
#: conv1d: [prod(inputs), prod(outputs)] is [*inputs, *outputs];
#: flat: [prod(shape)] is [*shape];
#: vocab: [vocab, ...] are the first rows of ours, and those that are left are zeros;
#: same: as it is.
Kind = Literal["linear", "conv1d", "flat", "vocab", "same"]

_KIND_BY_NAME: dict[str, Kind] = {"kernel": "linear", "bias": "flat", "scale": "flat"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One weight, or the same weight of all layers of a stack.

    Attributes:
      ours: path of the parameter, such as `decoder.layers.mlp.up.kernel`.
      theirs: name of the tensor, with `{layer}` where layers have a number. If two stacks have
        one name, the numbers of the second go on where those of the first end.
      kind: see `Kind`; by the last word of `ours` if it is not given.
      num_inputs: of a kernel: how many of our dimensions are inputs.
      tied: further names under which a file may hold the same values.
      without: the row holds only for models that lack this parameter.
    """

    ours: str
    theirs: str
    kind: Kind | None = None
    num_inputs: int = 1
    tied: tuple[str, ...] = ()
    without: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor of theirs, and the parameter, or the layer of one, that it is."""

    theirs: str
    tied: tuple[str, ...]
    ours: str
    layer: int | None
    shape: tuple[int, ...]  # of ours, without layers
    kind: Kind
    num_inputs: int
    vocab_size: int

    @property
    def their_shape(self) -> tuple[int, ...]:
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        return {
            "linear": (math.prod(outputs), math.prod(inputs)),
            "conv1d": (math.prod(inputs), math.prod(outputs)),
            "flat": (math.prod(self.shape),),
            "vocab": (self.vocab_size, *self.shape[1:]),
            "same": self.shape,
        }[self.kind]

    def read(self, theirs: np.ndarray, index: Index) -> np.ndarray:
        """Returns a part of ours, of the whole of theirs."""
        part = self._as_ours(theirs)[index]
        missing = index[0].stop - index[0].start - len(part)
        if missing:
            return np.pad(part, [(0, missing), *[(0, 0)] * (part.ndim - 1)])
        return np.ascontiguousarray(part)

    def write(self, theirs: np.ndarray, index: Index, part: np.ndarray) -> None:
        """Writes a part of ours into the whole of theirs."""
        target = self._as_ours(theirs)[index]
        target[...] = part[: len(target)]

    def _as_ours(self, theirs: np.ndarray) -> np.ndarray:
        """Returns a view of theirs with our dimensions."""
        if self.kind == "vocab":
            return theirs
        if self.kind != "linear":
            return theirs.reshape(self.shape)
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        view, num = theirs.reshape(*outputs, *inputs), len(outputs)
        return view.transpose(*range(num, view.ndim), *range(num))


def places(
    rows: Iterable[Row], shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int
) -> list[Place]:
    """Returns the places of all parameters, layer by layer as they run.

    Args:
      rows: of two for one parameter the first that holds is used; those of parameters that are
        not in `shapes` are left out.
      shapes: path of a parameter -> its shape, with a leading layers dimension in stacks.
      vocab_size: rows of theirs, where ours are padded.
    """
    by_ours: dict[str, Row] = {}
    for row in rows:
        if row.ours in shapes and row.without not in shapes:
            by_ours.setdefault(row.ours, row)
    assert by_ours.keys() == shapes.keys(), shapes.keys() ^ by_ours.keys()
    used = list(by_ours.values())
    names = {row.theirs for row in used}
    found: list[Place] = []
    first: dict[str, int] = {}
    for row in used:
        shape, is_stacked = shapes[row.ours], "{layer}" in row.theirs
        start = first.get(row.theirs, 0)
        layers = range(shape[0]) if is_stacked else (None,)
        for layer in layers:
            name = row.theirs if layer is None else row.theirs.format(layer=start + layer)
            found.append(
                Place(
                    theirs=name,
                    tied=tuple(name for name in row.tied if name not in names),
                    ours=row.ours,
                    layer=layer,
                    shape=shape[1:] if is_stacked else shape,
                    kind=row.kind or _KIND_BY_NAME.get(row.ours.rpartition(".")[2], "same"),
                    num_inputs=row.num_inputs,
                    vocab_size=vocab_size,
                )
            )
        first[row.theirs] = start + len(layers)
    return found


def match(
    found: Iterable[str],
    places: Sequence[Place],
    *,
    prefix: str,
    buffers: Sequence[str],
    other_heads: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Returns (name in `places` -> name in the file, names of weights that the model lacks).

    A file may lack the prefix of the base model, or have it where the model has none, and may call
    norms' parameters gamma and beta.

    Args:
      found: the names in the file.
      prefix: of the base model's names, with its dot.
      buffers: patterns of names that are no weights.
      other_heads: patterns of names of weights that other models with this base have.

    Raises:
      ValueError: names are missing, unknown, or there twice; all of them are listed.
    """
    wanted = {place.theirs for place in places} | {name for p in places for name in p.tied}
    matched: dict[str, str] = {}
    left_out, unknown, twice = [], [], []
    for name in found:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        candidates = (modern, prefix + modern, modern.removeprefix(prefix))
        known = next((c for c in candidates if c in wanted), None)
        if known in matched:
            twice.append(f"{matched[known]} and {name}")
        elif known is not None:
            matched[known] = name
        elif any(re.search(pattern, name) for pattern in buffers):
            continue
        elif any(re.match(pattern, modern) for pattern in other_heads):
            left_out.append(name)
        else:
            unknown.append(name)
    missing = [p.theirs for p in places if not matched.keys() & {p.theirs, *p.tied}]
    problems = {"lacks": missing, "has unknown": unknown, "has twice": twice}
    if any(problems.values()):
        said = (f"{what} {_listed(names)}" for what, names in problems.items() if names)
        raise ValueError(
            f"the checkpoint does not fit its config.json: it {'; it '.join(said)}; "
            "the two must be of one model"
        )
    return matched, left_out


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} tensor(s): {', '.join(names[:most])}{more}"
