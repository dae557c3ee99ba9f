"""The mapping between Hugging Face tensors and the parameters of Taibai's models.

A family declares one `Row` per weight. The same table imports and exports a model. Throughout this
package, `ours` is a parameter in Taibai, and `theirs` is a tensor in the Hugging Face files. A
stack of L layers is one parameter in Taibai but L tensors in the files:

    ours                                    theirs
    decoder.layers.mlp.up.kernel [L,D,F]    model.layers.0.mlp.up_proj.weight   [F,D]
                                            ...
                                            model.layers.L-1.mlp.up_proj.weight [F,D]
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from checkpoint.lazy import Index, LazyArray, blocks
from data.checks import first_names
from models.stack import number_in_period

#: How the shape of a tensor (left) becomes the shape of a parameter (right):
#: linear: [prod(outputs), prod(inputs)] -> [*inputs, *outputs];
#: conv1d: [prod(inputs), prod(outputs)] -> [*inputs, *outputs];
#: conv2d: [outputs, channels, rows, columns] -> [rows, columns, channels, outputs];
#: interleaved: [..., 2 * last] -> [..., last], every second element of the last dim, from `part`;
#: flat: [prod(shape)] -> [*shape];
#: vocab: [vocab, ...] -> [padded vocab, ...], whose additional rows are zeros;
#: scalar: [] -> [1];
#: one: [...] -> [1, ...];
#: same: unchanged.
Kind = Literal[
    "linear", "conv1d", "conv2d", "interleaved", "flat", "vocab", "scalar", "one", "same"
]

#: For conv2d: for each dimension of theirs, the number of the dimension of ours.
_CONV2D = (3, 2, 0, 1)
_KIND_BY_NAME: dict[str, Kind] = {"kernel": "linear", "bias": "flat", "scale": "flat"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One weight, or the same weight of all layers of a stack."""

    ours: str  # path of the parameter, such as `decoder.layers.mlp.up.kernel`
    # name of the tensor, with `{layer}` in place of the number of a layer, and `{head}` or
    # `{expert}` in place of the number of a head or an expert if each of these has a tensor. If two
    # stacks have the same name, the numbers of the second stack continue after the first
    theirs: str
    kind: Kind | None = None  # see `Kind`; None derives it from the last word of `ours`
    num_inputs: int = 1  # for a kernel, how many of the dimensions of `ours` are inputs
    tied: tuple[str, ...] = ()  # other names under which a file may contain the same values
    first: int = 0  # number in `theirs` of layer 0
    step: int = 1  # difference in `theirs` between the numbers of successive layers
    without: str | None = None  # row applies only to models that do not have this parameter
    # stack whose layers each have a copy of this parameter, which is outside of all stacks
    copied_in: str | None = None
    # number of this parameter among those whose tensors are stored as one, below each other:
    # [q; k; v] or [gate; up], of which each has a row with the name of the whole in `theirs`; or
    # among two that are interleaved
    part: int = 0


def linear(ours: str, theirs: str, num_inputs: int = 1, **options: Any) -> tuple[Row, Row]:
    """Return the rows of a linear layer: its kernel and its bias.

    Args:
        num_inputs: how many of the dimensions of the kernel are inputs.
        **options: other fields of both rows.
    """
    kernel = Row(f"{ours}.kernel", f"{theirs}.weight", num_inputs=num_inputs, **options)
    return kernel, Row(f"{ours}.bias", f"{theirs}.bias", **options)


def norm(ours: str, theirs: str, **options: Any) -> tuple[Row, Row]:
    """Return the rows of a norm: its scale and its bias.

    Args:
        **options: other fields of both rows.
    """
    scale = Row(f"{ours}.scale", f"{theirs}.weight", **options)
    return scale, Row(f"{ours}.bias", f"{theirs}.bias", **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """A Hugging Face tensor, and the parameter (or the part of a parameter) that it maps to."""

    theirs: str  # name of the tensor
    tied: tuple[str, ...]  # other names under which a file may contain the same values
    ours: str  # path of the parameter
    # index of the tensor in the first axes of the parameter: (), (layer,), (layer, head or expert)
    place: tuple[int, ...]
    shape: tuple[int, ...]  # shape of the parameter without these axes
    kind: Kind  # see `Kind`
    num_inputs: int  # for a kernel, how many dimensions of `shape` are inputs
    vocab_size: int | None  # vocabulary size without padding; None if the model has no vocabulary
    part: int = 0  # see `Row.part`
    first_row: int = 0  # of the tensor that belongs to this parameter
    num_rows: int | None = None  # of the tensor, if it has several parts; None if it has one

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        if self.num_rows is None:
            return self.part_shape
        return (self.num_rows, *self.part_shape[1:])

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part of the tensor that belongs to this parameter."""
        if self.kind == "conv2d":
            return tuple(self.shape[dim] for dim in _CONV2D)
        if self.kind == "vocab":
            return self.vocab_size or 0, *self.shape[1:]
        inputs = self.shape[: self.num_inputs]
        outputs = self.shape[self.num_inputs :]
        return {
            "linear": (math.prod(outputs), math.prod(inputs)),
            "conv1d": (math.prod(inputs), math.prod(outputs)),
            "interleaved": (*self.shape[:-1], 2 * self.shape[-1]),
            "flat": (math.prod(self.shape),),
            "scalar": (),
            "one": self.shape[1:],
            "same": self.shape,
        }[self.kind]

    def read(self, theirs: np.ndarray, index: Index) -> np.ndarray:
        """Read a part of the parameter from the tensor.

        Args:
            theirs: whole tensor.
            index: part of the parameter, without the axes of `place`.

        Returns:
            The values, with zeros for padding of the vocabulary.
        """
        part = self._as_ours(theirs)[index]
        missing = index[0].stop - index[0].start - len(part)
        if missing:
            return np.pad(part, [(0, missing), *[(0, 0)] * (part.ndim - 1)])
        return np.ascontiguousarray(part)

    def write(self, theirs: np.ndarray, index: Index, part: np.ndarray) -> None:
        """Write a part of the parameter to the tensor.

        Args:
            theirs: whole tensor; modified in place.
            index: part of the parameter, without the axes of `place`.
            part: values; padding of the vocabulary is dropped.
        """
        target = self._as_ours(theirs)[index]
        target[...] = part[: len(target)]

    def _as_ours(self, theirs: np.ndarray) -> np.ndarray:
        """Return a view of the tensor, or of its part, with the dimensions of the parameter."""
        if self.num_rows is not None:
            theirs = theirs[self.first_row : self.first_row + self.part_shape[0]]
        if self.kind == "vocab":
            return theirs
        if self.kind == "interleaved":
            return theirs[..., self.part :: 2]
        if self.kind == "conv2d":
            return theirs.transpose(np.argsort(_CONV2D))
        if self.kind == "same":
            return theirs
        if self.kind != "linear":
            return theirs.reshape(self.shape)
        # linear: [prod(outputs), prod(inputs)] -> [*outputs, *inputs] -> [*inputs, *outputs].
        inputs = self.shape[: self.num_inputs]
        outputs = self.shape[self.num_inputs :]
        view = theirs.reshape(*outputs, *inputs)
        num = len(outputs)
        return view.transpose(*range(num, view.ndim), *range(num))


def tensor_mappings(
    rows: Iterable[Row], shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int | None
) -> list[TensorMapping]:
    """Return the mappings of all tensors of a model; the layers of a stack are in order.

    Args:
        rows: rows of the architecture. If two rows have the same parameter, the first one that
            applies is used. Rows of parameters that are not in `shapes` are ignored. The blocks of
            a `models.stack.Period` have the rows of a stack without periods.
        shapes: path of a parameter -> its shape, with a leading layers axis in stacks.
        vocab_size: vocabulary size without padding, which is the number of rows of vocabulary
            tensors; None if the model has no vocabulary.
    """
    # path without the number of a block in its period -> paths with it, in order
    paths: dict[str, list[str]] = {}
    for path in sorted(shapes, key=_number_in_period):
        paths.setdefault(_PERIOD_BLOCK.sub("", path), []).append(path)
    sizes = _stack_sizes(shapes)
    by_ours: dict[str, Row] = {}
    copies: list[Row] = []
    for row in rows:
        if row.ours in paths and row.without not in paths:
            if row.copied_in is None:
                by_ours.setdefault(row.ours, row)
            elif row.copied_in in sizes:
                copies.append(row)
    assert by_ours.keys() == paths.keys(), paths.keys() ^ by_ours.keys()
    names = {row.theirs for row in by_ours.values()}
    mappings: list[TensorMapping] = []
    starts = _first_layers(by_ours.values(), sizes)
    for row in by_ours.values():
        in_period = paths[row.ours]
        shape = shapes[in_period[0]]
        num_axes = row.theirs.count("{")  # layers, and heads or experts
        for place, path in itertools.product(np.ndindex(*shape[:num_axes]), in_period):
            numbers: dict[str, Any] = {}
            if place:
                _, size = sizes[_stack(path)]
                layer = starts[row.ours] + place[0] * size + _number_in_period(path)
                numbers = {"layer": row.first + row.step * layer, "head": place[-1]} | {
                    "expert": place[-1]
                }
            tied = (name.format(**numbers) for name in row.tied)
            mappings.append(
                TensorMapping(
                    theirs=row.theirs.format(**numbers),
                    tied=tuple(name for name in tied if name not in names),
                    ours=path,
                    place=place,
                    shape=shape[num_axes:],
                    kind=row.kind or _KIND_BY_NAME.get(row.ours.rpartition(".")[2], "same"),
                    num_inputs=row.num_inputs,
                    vocab_size=vocab_size,
                    part=row.part,
                )
            )
    mappings += _copies(copies, mappings, starts, sizes)
    return _with_rows(mappings)


def _copies(
    rows: Iterable[Row],
    mappings: Iterable[TensorMapping],
    starts: Mapping[str, int],
    sizes: Mapping[str, tuple[int, int]],
) -> list[TensorMapping]:
    """Return the mappings of copies in the layers of a stack; files may lack them.

    Args:
        rows: rows with `copied_in`.
        mappings: mappings of all parameters.
        starts: path -> number of the first layer of its stack.
        sizes: as from `_stack_sizes`.
    """
    originals = {mapping.ours: mapping for mapping in mappings}
    copies = []
    for row in rows:
        stack = row.copied_in
        assert stack is not None
        first = next(start for path, start in starts.items() if _stack(path) == stack)
        original = originals[row.ours]
        for number in range(math.prod(sizes[stack])):
            theirs = row.theirs.format(layer=first + number)
            copies.append(
                dataclasses.replace(original, theirs=theirs, tied=(original.theirs, *original.tied))
            )
    return copies


#: Part of the path of a parameter that belongs to a block of a period.
_PERIOD_BLOCK = re.compile(r"(?<=\.layers\.)block_\d+\.")


def _stack(path: str) -> str:
    return path.partition(".layers.")[0]


def _stack_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return stack -> (its number of periods, the number of blocks of a period)."""
    sizes: dict[str, tuple[int, int]] = {}
    for path, shape in shapes.items():
        if ".layers." in path:
            stack = _stack(path)
            _, size = sizes.get(stack, (0, 1))
            sizes[stack] = shape[0], max(size, _number_in_period(path) + 1)
    return sizes


def _first_layers(rows: Iterable[Row], sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return path -> the number of layers in earlier stacks whose names begin in the same way.

    The numbers of a stack continue after them, also if their layers lack this parameter.
    """
    starts: dict[tuple[str, int], dict[str, int]] = {}
    first_layers = {}
    for row in rows:
        beginning, is_stacked, _ = row.theirs.partition("{layer}")
        if is_stacked:
            of_stacks = starts.setdefault((beginning, row.first), {})
            earlier = sum(math.prod(sizes[stack]) for stack in of_stacks)
            first_layers[row.ours] = of_stacks.setdefault(_stack(row.ours), earlier)
    return first_layers


def _number_in_period(path: str) -> int:
    return number_in_period(path.split("."))


def _with_rows(mappings: Sequence[TensorMapping]) -> list[TensorMapping]:
    """Set the rows of tensors that have several parts."""
    parts: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        parts.setdefault(mapping.theirs, []).append(mapping)
    with_rows = []
    for mapping in mappings:
        together = parts[mapping.theirs]
        if len(together) > 1 and mapping.kind != "interleaved":
            first = sum(m.part_shape[0] for m in together if m.part < mapping.part)
            num_rows = sum(m.part_shape[0] for m in together)
            mapping = dataclasses.replace(mapping, first_row=first, num_rows=num_rows)
        with_rows.append(mapping)
    return with_rows


def match(
    found: Iterable[str],
    tensor_mappings: Sequence[TensorMapping],
    *,
    prefix: str,
    buffers: Sequence[str],
    other_heads: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Match the names of tensors in the files with the names that a model needs.

    Files may omit the prefix of the base model, or have it although the model has none, and may
    call the parameters of norms gamma and beta.

    Returns:
        {name in the mappings: name in the files}, and the names of the weights in the files that
        belong to other models and are left out.

    Raises:
        ValueError: Names are missing, unknown or duplicated; the message lists them.
    """
    wanted = {mapping.theirs for mapping in tensor_mappings}
    wanted |= {name for mapping in tensor_mappings for name in mapping.tied}
    matched: dict[str, str] = {}
    left_out = []
    unknown = []
    duplicated = []
    for name in found:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        candidates = (modern, prefix + modern, modern.removeprefix(prefix))
        known = next((c for c in candidates if c in wanted), None)
        if known in matched:
            duplicated.append(f"{matched[known]} and {name}")
        elif known is not None:
            matched[known] = name
        elif any(re.search(pattern, name) for pattern in buffers):
            continue
        elif any(re.match(pattern, modern) for pattern in other_heads):
            left_out.append(name)
        else:
            unknown.append(name)
    missing = [p.theirs for p in tensor_mappings if not matched.keys() & {p.theirs, *p.tied}]
    check_names({"lacks": missing, "has unknown": unknown, "has twice": duplicated})
    return matched, left_out


def check_names(
    problems: Mapping[str, Sequence[str]],
    *,
    what: str = "the checkpoint does not match its config.json",
) -> None:
    """Raise a ValueError if there are names with problems.

    Args:
        problems: problem, in words that follow "it" -> the names that have it.
        what: beginning of the message.
    """
    descriptions = [
        f"{problem} {len(names)} tensor(s): {first_names(names, most=8)}"
        for problem, names in problems.items()
        if names
    ]
    if descriptions:
        raise ValueError(f"{what}: it {'; it '.join(descriptions)}; both must be of the same model")


def assemble(
    parts: Sequence[TensorMapping], arrays: Mapping[str, LazyArray], dtype: np.dtype
) -> np.ndarray:
    """Assemble a Hugging Face tensor from the chunks of parameters on disk.

    Args:
        parts: all mappings of the tensor.
        arrays: path of a parameter -> its values.

    Raises:
        ValueError: A value is too large for `dtype`.
    """
    values = np.empty(parts[0].their_shape, dtype)
    for mapping in parts:
        array = arrays[mapping.ours]
        first = tuple(slice(number, number + 1) for number in mapping.place)
        for index in blocks(mapping.shape, array.chunk_shape[len(first) :]):
            part = array.read((*first, *index))
            part = part.reshape(part.shape[len(first) :])
            mapping.write(values, index, _cast(part, dtype, mapping.theirs))
    return values


def _cast(part: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = part.astype(dtype, copy=False)
    if cast is not part and not np.array_equal(np.isfinite(cast), np.isfinite(part)):
        raise ValueError(f"tensor {name} has values too large for {dtype}; choose another --dtype")
    return cast
