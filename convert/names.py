"""Where each tensor of a Hugging Face model lies in one of ours: one row a weight, both ways."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from checkpoint.lazy import Index
from data.checks import listed

#: How a tensor of theirs is ours:
#: linear: [prod(outputs), prod(inputs)] is [*inputs, *outputs];
#: conv1d: [prod(inputs), prod(outputs)] is [*inputs, *outputs];
#: conv2d: [outputs, channels, rows, columns] is [rows, columns, channels, outputs];
#: flat: [prod(shape)] is [*shape];
#: vocab: [vocab, ...] are the first rows of ours, and those that are left are zeros;
#: same: as it is.
Kind = Literal["linear", "conv1d", "conv2d", "flat", "vocab", "same"]

#: Of ours, the dims of theirs.
_CONV2D = (3, 2, 0, 1)
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
      first, step: the number of theirs that layer 0 is, and from one layer to the next.
      without: the row holds only for models that lack this parameter.
    """

    ours: str
    theirs: str
    kind: Kind | None = None
    num_inputs: int = 1
    tied: tuple[str, ...] = ()
    first: int = 0
    step: int = 1
    without: str | None = None


def linear(ours: str, theirs: str, num_inputs: int = 1, **options: Any) -> tuple[Row, Row]:
    """Returns the rows of a linear layer."""
    kernel = Row(f"{ours}.kernel", f"{theirs}.weight", num_inputs=num_inputs, **options)
    return kernel, Row(f"{ours}.bias", f"{theirs}.bias", **options)


def norm(ours: str, theirs: str, **options: Any) -> tuple[Row, Row]:
    """Returns the rows of a norm."""
    scale = Row(f"{ours}.scale", f"{theirs}.weight", **options)
    return scale, Row(f"{ours}.bias", f"{theirs}.bias", **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """A tensor of theirs, and the parameter, or the layer of one, that it is."""

    theirs: str
    tied: tuple[str, ...]
    ours: str
    layer: int | None
    shape: tuple[int, ...]  # of ours, without layers
    kind: Kind
    num_inputs: int
    vocab_size: int | None  # None if there is no vocab

    @property
    def their_shape(self) -> tuple[int, ...]:
        if self.kind == "conv2d":
            return tuple(self.shape[dim] for dim in _CONV2D)
        if self.kind == "vocab":
            return self.vocab_size or 0, *self.shape[1:]
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        return {
            "linear": (math.prod(outputs), math.prod(inputs)),
            "conv1d": (math.prod(inputs), math.prod(outputs)),
            "flat": (math.prod(self.shape),),
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
        if self.kind == "conv2d":
            return theirs.transpose(np.argsort(_CONV2D))
        if self.kind != "linear":
            return theirs.reshape(self.shape)
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        view, num = theirs.reshape(*outputs, *inputs), len(outputs)
        return view.transpose(*range(num, view.ndim), *range(num))


def tensor_mappings(
    rows: Iterable[Row], shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int | None
) -> list[TensorMapping]:
    """Returns the places of all parameters, layer by layer as they run.

    Args:
      rows: of two for one parameter the first that holds is used; those of parameters that are
        not in `shapes` are left out.
      shapes: path of a parameter -> its shape, with a leading layers dimension in stacks.
      vocab_size: rows of theirs, where ours are padded; None if there is no vocab.
    """
    by_ours: dict[str, Row] = {}
    for row in rows:
        if row.ours in shapes and row.without not in shapes:
            by_ours.setdefault(row.ours, row)
    assert by_ours.keys() == shapes.keys(), shapes.keys() ^ by_ours.keys()
    used = list(by_ours.values())
    names = {row.theirs for row in used}
    found: list[TensorMapping] = []
    first: dict[tuple[str, int], int] = {}
    for row in used:
        shape, is_stacked = shapes[row.ours], "{layer}" in row.theirs
        name = row.theirs, row.first
        start = first.get(name, 0)
        layers = range(shape[0]) if is_stacked else (None,)
        for layer in layers:
            number = 0 if layer is None else row.first + row.step * (start + layer)
            tied = (name.format(layer=number) for name in row.tied)
            found.append(
                TensorMapping(
                    theirs=row.theirs.format(layer=number),
                    tied=tuple(name for name in tied if name not in names),
                    ours=row.ours,
                    layer=layer,
                    shape=shape[1:] if is_stacked else shape,
                    kind=row.kind or _KIND_BY_NAME.get(row.ours.rpartition(".")[2], "same"),
                    num_inputs=row.num_inputs,
                    vocab_size=vocab_size,
                )
            )
        first[name] = start + len(layers)
    return found


def match(
    found: Iterable[str],
    tensor_mappings: Sequence[TensorMapping],
    *,
    prefix: str,
    buffers: Sequence[str],
    other_heads: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Returns (name in the mappings -> name in the file, names of weights that the model lacks).

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
    wanted = {place.theirs for place in tensor_mappings} | {
        name for p in tensor_mappings for name in p.tied
    }
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
    missing = [p.theirs for p in tensor_mappings if not matched.keys() & {p.theirs, *p.tied}]
    problems = {"lacks": missing, "has unknown": unknown, "has twice": twice}
    if any(problems.values()):
        said = (
            f"{what} {len(names)} tensor(s): {listed(names, most=8)}"
            for what, names in problems.items()
            if names
        )
        raise ValueError(
            f"the checkpoint does not fit its config.json: it {'; it '.join(said)}; "
            "the two must be of one model"
        )
    return matched, left_out
