"""Layers of several types in one model: attention to all tokens, within a window, or in chunks.

A model repeats a pattern of types, such as five layers with a window and one without. Blocks of a
stack are identical, so such a pattern is one block of a stack, `models.stack.Period`.

B batch, T seq, D embed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from fields.numbers import shown
from models.field_checks import check_choices
from models.layers.masks import segments
from models.layers.rope import PAIRS, HashableScaling, check_scaling, rope_frequencies, rotate
from models.layers.transformer import identity
from models.stack import Stack, periods
from models.text.common import VocabConfig, positions_by_count, positions_by_index
from sharding.ops.sequence import whole_length

#: Values of `model.layer_types`: attention to all tokens that a model sees, to those within
#: `model.sliding_window`, or to those of the same chunk of `model.attention_chunk` positions;
#: "no_positions" is "full" without rotary positions.
LAYER_TYPES = ("full", "window", "chunked", "no_positions")
#: Types of layers -> the field that they need.
_SIZES = {"window": "sliding_window", "chunked": "attention_chunk"}


def layer_pattern(types: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest value of `model.layer_types` that gives layers these types, in order."""
    lengths = range(1, len(types) + 1)
    repeats = (n for n in lengths if all(a == b for a, b in zip(types, types[n:], strict=False)))
    pattern = tuple(types[: next(repeats, 0)])
    return () if pattern in (("full",), ("window",)) else pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTypesConfig(VocabConfig):
    """The types of a model's layers, and their rotary positions."""

    max_positions: int  # longest sequence that the model supports
    num_layers: int
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: Mapping[str, Any] | None = None  # see models/layers/rope.py
    rotary_pairs: str = "halves"  # halves | neighbours; see models/layers/rope.py
    sliding_window: int | None = None  # distance from which tokens do not see each other: Mistral
    attention_chunk: int | None = None  # tokens of a chunk, which only see each other: LLaMA 4
    layer_types: Sequence[str] = ()  # repeated over the layers; see LAYER_TYPES, and `types`
    window_rope_theta: float | None = None  # rope_theta of windowed layers, which have no scaling

    def __post_init__(self):
        super().__post_init__()
        for field in _SIZES.values():
            if (size := getattr(self, field)) is not None and size < 1:
                raise ValueError(f"model.{field}={size} must be at least 1, or None")
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if unknown := [name for name in self.layer_types if name not in LAYER_TYPES]:
            raise ValueError(
                f"model.layer_types: {shown(unknown[0])} is unknown; choose "
                f"{', '.join(LAYER_TYPES)}"
            )
        if len(self.layer_types) > self.num_layers:
            raise ValueError(
                f"model.layer_types has {len(self.layer_types)} entries, for "
                f"model.num_layers={self.num_layers}; give each layer one, or fewer to be repeated"
            )
        for name, field in _SIZES.items():
            if (getattr(self, field) is not None) != (name in self.types):
                or_empty = " or is empty" if name == "window" else ""
                raise ValueError(
                    f"model.{field}={getattr(self, field)} must be set if, and only if, "
                    f"model.layer_types={list(self.layer_types)} has {name}{or_empty}"
                )
        object.__setattr__(self, "layer_types", layer_pattern(self.types))

    def check_rotation(self) -> None:
        """Check the fields of rotary positions, after those that `rotary_dim` depends on."""
        check_choices(self, rotary_pairs=PAIRS)
        check_scaling(self.rope_scaling, self.rotary_dim)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", HashableScaling(self.rope_scaling))

    @property
    def types(self) -> tuple[str, ...]:
        """The type of each layer: `layer_types`, repeated; by default all window, or all full."""
        default = "full" if self.sliding_window is None else "window"
        types = itertools.cycle(self.layer_types or (default,))
        return tuple(itertools.islice(types, self.num_layers))

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        raise NotImplementedError

    def masks(self, layer_type: str, batch: dict) -> dict[str, Any]:
        """Return the arguments of `attend` that tell which tokens a layer of a type sees."""
        size = self.attention_chunk
        if layer_type != "chunked" or size is None:
            window = self.sliding_window if layer_type == "window" else None
            return {"window": window, "segments": segments(batch)}
        if whole_length(batch["tokens"].shape[1]) <= size:  # all tokens are in one chunk
            return {"chunk": size, "segments": segments(batch)}
        # Chunks count from the first token of a row, as in transformers; padding has chunk -1.
        ids_BT = positions_by_count(batch) // size
        if "segment_ids" in batch:
            ids_BT += (self.max_positions // size + 1) * batch["segment_ids"]
        return {"chunk": size, "segments": (ids_BT, ids_BT)}

    def rotation(
        self, layer_type: str, x_BTD: jax.Array, batch: dict
    ) -> Callable[[jax.Array], jax.Array]:
        """Return the function that gives queries and keys their positions."""
        if layer_type == "no_positions":
            return identity
        theta, scaling = self.rope_theta, self.rope_scaling
        if layer_type == "window" and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, None
        length = whole_length(x_BTD.shape[1])
        numbers = {"num_positions": length, "max_positions": self.max_positions}
        frequencies, factor = rope_frequencies(self.rotary_dim, theta, scaling, **numbers)
        rotation = {"frequencies": frequencies, "factor": factor, "pairs": self.rotary_pairs}
        return partial(rotate, positions_BT=positions_by_index(batch), **rotation)


def stacks_of(
    types: Sequence[Hashable], make_block: Callable[..., nnx.Module], *, rngs: nnx.Rngs
) -> tuple[Stack, Stack | None]:
    """Return the stacks of a model's layers, the second of which may be None; see `periods`.

    Args:
        types: type of each layer, or anything else that its block depends on.
        make_block: returns the block of a layer, given its type and `rngs`.
        rngs: random keys for the initialization.
    """

    def of_type(layer_type: Hashable) -> Callable[[nnx.Rngs], nnx.Module]:
        return lambda rngs: make_block(layer_type, rngs=rngs)

    def stack(types: Sequence[Hashable], num_periods: int) -> Stack:
        return Stack([of_type(layer_type) for layer_type in types], num_periods, rngs=rngs)

    first, last = periods(types)
    return stack(*first), stack(*last) if last else None
