"""Starts a model with experts from one without: each expert is a copy of the dense MLP.

    ours                          dense
    decoder.layers.mlp.up         decoder.layers.mlp.up.kernel    [L, E, D, F] from [L, D, F]
    decoder.layers.mlp.router     -                               new

If the scores of a token's experts sum to 1, the model computes the same as the dense one.

Source: Komatsuzaki et al. 2022 (arXiv:2212.05055), section 3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoint.lazy import Index, LazyArray
from convert.model_on_disk import Shapes, Source
from models.layers.experts import ExpertsConfig

#: Fields that say which layers have experts.
_WHERE = ("dense_layers", "sparse_step", "decoder_sparse_step")
#: Fields of the config of a model with experts, which mean nothing for a dense model.
FIELDS = (*(field.name for field in dataclasses.fields(ExpertsConfig)), *_WHERE)
#: Names of the new parameters of a layer.
NEW = ("router", "router_bias", "balance")
#: Part of a linear layer -> end of the name that the weight of experts has in its place.
_ENDS = {"kernel": "", "bias": "_bias"}


def upcycles(ours: Any, theirs: Any) -> bool:
    """Return whether a model has experts, and the one that it starts from could have some.

    Args:
        ours: `num_experts` of the config of the run.
        theirs: config of the model on disk.
    """
    return ours is not None and getattr(theirs, "num_experts", ours) is None


def check_fields(fields: Mapping[str, Any], theirs: Any, path: object) -> None:
    """Check that all MLPs of a dense model can become experts of a run.

    Args:
        fields: section `model` of the run.
        theirs: config of the dense model.
        path: dense model, for the message of the ValueError.
    """
    has_bias = fields.get("mlp_bias", False)
    allowed = {
        "expert_dim": (None, fields.get("mlp_dim")),
        "expert_bias": (has_bias,),
        "shared_expert_dim": (None,),
        "dense_layers": (0,),
        "sparse_step": (1,),
        "decoder_sparse_step": (1,),
        "gate_limit": (None,),
    }
    for name, values in allowed.items():
        value = fields.get(name, getattr(theirs, name, values[-1]))
        if value not in values:
            raise ValueError(
                f"model.{name}={value}, but all experts start as copies of the MLPs of "
                f"init_from={str(path)!r}, which needs {values[-1]}; set it to that"
            )


def with_experts(source: Source, ours: Any) -> Source:
    """Return a dense model with experts; routers have no values.

    Args:
        ours: config of the run's model, which has experts.
    """

    def open_arrays(shapes: Shapes) -> Mapping[str, LazyArray]:
        dense_shapes = source.shapes()
        copied = {
            name: mlp
            for name in shapes
            if name not in dense_shapes and (mlp := _dense_name(name, dense_shapes))
        }
        unchanged = {name: shape for name, shape in shapes.items() if name not in copied}
        dense = {name: dense_shapes[name] for name in copied.values()}
        arrays = source.open({**unchanged, **dense})
        return {
            name: _Copies(arrays[copied[name]], ours.num_experts)
            if name in copied
            else arrays[name]
            for name in shapes
        }

    fields = {
        **source.fields,
        **{name: getattr(ours, name) for name in FIELDS if hasattr(ours, name)},
    }
    return dataclasses.replace(source, fields=fields, open=open_arrays)


def _dense_name(name: str, dense: Mapping[str, Any]) -> str | None:
    """Return the name of the parameter of the dense model that experts copy."""
    names = (
        f"{name.removesuffix(end)}.{part}" for part, end in _ENDS.items() if name.endswith(end)
    )
    return next((each for each in names if each in dense), None)


class _Copies(LazyArray):
    """Weights of experts, `[layers, E, ...]`: the same MLP, `[layers, ...]`, for each expert."""

    def __init__(self, dense: LazyArray, num_experts: int):
        self._dense = dense
        self.shape = (dense.shape[0], num_experts, *dense.shape[1:])
        self.dtype = dense.dtype

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of the smallest part that is read at once."""
        first, *sizes = self._dense.chunk_shape
        return (first, 1, *sizes)

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the weights."""
        layers, experts, *dims = index
        part = self._dense.read((layers, *dims))[:, None]
        return np.repeat(part, experts.stop - experts.start, axis=1)
