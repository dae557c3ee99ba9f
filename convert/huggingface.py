"""Open a Hugging Face model on disk, and read its tensors as parameters of a Taibai model."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoint.lazy import Index, LazyArray
from convert.architecture import Architecture
from convert.files import preprocessor
from convert.keys import read
from convert.model_on_disk import Shapes, Source, check_known, read_config
from convert.names import TensorMapping, match
from convert.options import ReadOptions
from convert.quantized import dequantized
from convert.registry import find
from convert.tensor_files import Tensor, open_tensors, same_values
from data.checks import first_names
from data.text.tokenization.file_tokenizer import find_tokenizer
from fields.types import check_types
from models.vision.common import ImageInputConfig

_log = logging.getLogger(__name__)


def open_huggingface(path: Path, options: ReadOptions) -> Source:
    """Open a Hugging Face model.

    Raises:
        ValueError: The architecture or a key of config.json is not supported, or tensors are
            missing, unknown or of the wrong shape.
    """
    hf = read_config(path / "config.json", within=path)

    def open_all() -> dict[str, Tensor]:
        tensors = open_tensors(path, allow_pickle_weights=options.allow_pickle_weights)
        return dequantized(hf, tensors)

    return open_weights(path, hf, open_all, options)


def open_weights(
    path: Path,
    hf: dict[str, Any],
    open_all: Callable[[], Mapping[str, Tensor]],
    options: ReadOptions,
) -> Source:
    """Open a model whose config.json has been read.

    Args:
        path: directory of the model, with the files of its tokenizer.
        hf: content of config.json.
        open_all: returns the tensors by name; called after config.json has been checked.

    Raises:
        ValueError: see `open_huggingface`.
    """
    architecture = find(hf)
    fields = read(hf, architecture.keys, harmless=architecture.harmless, options=options)
    check_types(architecture.model_class.Config, fields, "config.json gives model")
    fields |= architecture.fields
    tensors = open_all()
    if architecture.detect is not None:
        fields |= architecture.detect(tensors, hf)
    if issubclass(architecture.model_class.Config, ImageInputConfig):
        fields |= preprocessor.read(path, fields, options)
    _check_depth(fields, tensors, path)
    source = Source(
        path=path,
        model=architecture.model,
        model_class=architecture.model_class,
        architecture=architecture,
        fields=fields,
        hf_files=path,
        hf_config=hf,
        tokenizer=find_tokenizer(path),
        open=lambda shapes: {},
        dtypes={},
    )
    model_shapes = source.shapes()
    tensor_mappings = architecture.tensor_mappings(
        model_shapes, vocab_size=fields.get("vocab_size")
    )
    by_name = _tensors_of(architecture, fields, tensor_mappings, tensors)

    def open_arrays(shapes: Shapes) -> Mapping[str, LazyArray]:
        check_known(path, shapes, model_shapes)
        tensor_mappings = architecture.tensor_mappings(
            {**model_shapes, **shapes}, vocab_size=fields.get("vocab_size")
        )
        return convert_arrays(shapes, tensor_mappings, by_name)

    dtypes = {name: tensor.dtype.name for name, tensor in by_name.items()}
    return dataclasses.replace(source, open=open_arrays, dtypes=dtypes)


def _check_depth(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check that the model has no more layers than there are tensors, before listing its layers."""
    depths = {name: value for name, value in fields.items() if name.endswith(("layers", "depths"))}
    num_layers = sum(sum(value) if isinstance(value, tuple) else value for value in depths.values())
    if num_layers > len(tensors):
        raise ValueError(
            f"{path / 'config.json'} has {num_layers:,} layers, but the files have only "
            f"{len(tensors):,} tensors; weights and config.json must be of the same model"
        )


def _tensors_of(
    architecture: Architecture,
    fields: Mapping[str, Any],
    tensor_mappings: Sequence[TensorMapping],
    tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return {name in the mappings: tensor}, and log which tensors of the files are left out."""
    names, left_out = match(
        tensors,
        tensor_mappings,
        prefix=architecture.prefix,
        buffers=architecture.buffers,
        other_heads=[
            pattern.replace("{num_layers}", str(fields.get("num_layers")))
            for pattern in architecture.other_heads
        ],
    )
    if left_out:
        _log.warning(
            "These weights are left out, because %s does not have them: %s.",
            architecture.name,
            first_names(left_out, most=8),
        )
    by_name = {name: tensors[theirs] for name, theirs in names.items()}
    return {place.theirs: _tensor_at(place, by_name) for place in tensor_mappings}


def _tensor_at(place: TensorMapping, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of a mapping; if the files have it under several names, compare them."""
    copies = [tensors[name] for name in (place.theirs, *place.tied) if name in tensors]
    for tensor in copies:
        check_shape(place, tensor)
    for tensor in copies[1:]:
        if not same_values(copies[0], tensor):
            raise ValueError(
                f"tensors {copies[0].name} and {tensor.name} differ, but this model has one weight "
                "for both; set tie_word_embeddings to false in config.json if the architecture "
                "supports it"
            )
    return copies[0]


def check_shape(place: TensorMapping, tensor: Tensor) -> None:
    """Check that a tensor is a weight of the shape that a mapping expects.

    Raises:
        ValueError: It has another shape, or a dtype that weights cannot have.
    """
    if tensor.dtype == np.dtype(np.void):
        tensor.map()  # Raises an error with the reason.
    if tensor.shape != place.their_shape:
        raise ValueError(
            f"tensor {tensor.name} in {tensor.file} has the shape {list(tensor.shape)}, but "
            f"{list(place.their_shape)} is expected for {place.ours}; weights and config.json must "
            "be of the same model"
        )


def convert_arrays(
    shapes: Shapes, tensor_mappings: Iterable[TensorMapping], tensors: Mapping[str, Tensor]
) -> dict[str, LazyArray]:
    """Return the parameters of `shapes` that have mappings, read from the tensors these name."""
    parts: dict[str, list[tuple[TensorMapping, Tensor]]] = {}
    for place in tensor_mappings:
        if place.ours in shapes:
            check_shape(place, tensors[place.theirs])
            parts.setdefault(place.ours, []).append((place, tensors[place.theirs]))
    return {name: _ConvertedArray(shapes[name], part) for name, part in parts.items()}


class _ConvertedArray(LazyArray):
    """A parameter that is read from the tensors of its layers or heads, or from its single tensor.

    Its dtype is the smallest one that can represent the values of all these tensors.

    Args:
        shape: shape of the parameter, with a leading layers axis in stacks.
        parts: mapping and tensor of each layer, or of each head of each layer.
    """

    def __init__(self, shape: tuple[int, ...], parts: Sequence[tuple[TensorMapping, Tensor]]):
        self._parts = {mapping.place: (mapping, tensor) for mapping, tensor in parts}
        self._num_axes = len(parts[0][0].place)
        self.shape = shape
        dtype = parts[0][1].dtype
        for _, tensor in parts:
            dtype = jnp.promote_types(dtype, tensor.dtype)
        self.dtype = np.dtype(dtype)

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the parameter."""
        if not self._num_axes:
            return self._read((), index)
        sizes = [part.stop - part.start for part in index]
        values = np.empty(sizes, self.dtype)
        for local in np.ndindex(*sizes[: self._num_axes]):
            place = tuple(part.start + i for part, i in zip(index, local, strict=False))
            values[local] = self._read(place, index[self._num_axes :])
        return values

    def _read(self, place: tuple[int, ...], index: Index) -> np.ndarray:
        mapping, tensor = self._parts[place]
        if tensor.map_rows is None or mapping.kind not in ("same", "interleaved"):
            return mapping.read(tensor.map(), index).astype(self.dtype, copy=False)
        # The first dim of the parameter is the tensor's, so only these rows are needed.
        rows = tensor.map_rows(index[0])
        part = mapping.read(rows, (slice(0, len(rows)), *index[1:]))
        return part.astype(self.dtype, copy=False)
