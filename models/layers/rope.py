"""Rotary position embeddings (RoPE), and published methods to extend them to longer sequences.

Two features of a head form a pair: i and i + H/2, as in most of Hugging Face's checkpoints, or
neighbours. At position p, pair i is rotated by the angle p · frequency_i. So the product of a query
and a key depends only on the distance between their positions.

B batch, T seq, N heads, H head_dim.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Scaling = Mapping[str, Any]

#: `rope_type` -> (required keys, optional keys).
_KEYS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        (),
    ),
}

#: Largest accepted value of a number; real values are at most a few million.
_LARGEST = 1e15


#: Which features of a head form a pair: i and i + R/2, or 2 · i and 2 · i + 1, of R features.
PAIRS = ("halves", "neighbours")


def rotate(
    x_BTNH: jax.Array,
    positions_BT: jax.Array,
    frequencies: np.ndarray,
    factor: float,
    pairs: str = "halves",
) -> jax.Array:
    """Rotate each pair of features by position · frequency, keeping the dtype.

    Args:
        x_BTNH: queries or keys, of which the first R features are rotated.
        positions_BT: int32.
        frequencies: float64[R/2], radians per position; see `rope_frequencies`.
        factor: factor of the rotated features.
        pairs: one of PAIRS.
    """
    num_rotated = 2 * len(frequencies)
    if num_rotated < x_BTNH.shape[-1]:
        rotated = rotate(x_BTNH[..., :num_rotated], positions_BT, frequencies, factor, pairs)
        return jnp.concatenate([rotated, x_BTNH[..., num_rotated:]], axis=-1)
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    angles_BTH = positions_BT.astype(wide)[..., None] * jnp.asarray(frequencies, wide)[None, None]
    cos = jnp.cos(angles_BTH)[:, :, None] * factor
    sin = jnp.sin(angles_BTH)[:, :, None] * factor
    # (first, second) · cos + (second, first) · (-sin, sin). XLA computes this in one pass over x,
    # and would write a concatenation of the two halves piece by piece.
    pair_dim = -2 if pairs == "halves" else -1
    shape = (2, -1) if pairs == "halves" else (-1, 2)
    x = x_BTNH.astype(wide).reshape(*x_BTNH.shape[:-1], *shape)
    cos = jnp.expand_dims(cos, pair_dim)
    sin = jnp.stack([-sin, sin], axis=pair_dim)
    turned = x * cos + jnp.flip(x, pair_dim) * sin
    return turned.reshape(x_BTNH.shape).astype(x_BTNH.dtype)


class HashableScaling(dict):
    """A dict of numbers, strings and lists of numbers that is never modified, so it has a hash.

    A model that holds one can be an argument of `nnx.jit`.
    """

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(repr(sorted(self.items())))


def check_scaling(scaling: Scaling | None, head_dim: int) -> None:
    """Check a model's `rope_scaling`.

    Args:
        scaling: value of `model.rope_scaling`.
        head_dim: H.

    Raises:
        ValueError: if the head dim is odd, the type is unknown, a key is missing or unknown, or a
            value is out of range.
    """
    if head_dim % 2:
        raise ValueError(f"model.head_dim={head_dim} must be even: features are rotated in pairs")
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise ValueError(
            f"model.rope_scaling={scaling!r} must be a mapping such as "
            "{'rope_type': 'linear', 'factor': 2.0}, or None"
        )
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(
            f"model.rope_scaling: rope_type={kind!r} is unknown; choose {', '.join(_KEYS)}"
        )
    needed, further = _KEYS[kind]
    missing = [key for key in needed if scaling.get(key) is None]
    unknown = [key for key in scaling if key not in (*needed, *further, "rope_type")]
    if missing or unknown:
        raise ValueError(
            f"model.rope_scaling with rope_type={kind!r} lacks {missing or 'nothing'} and does "
            f"not know {unknown or 'nothing'}; it takes {', '.join((*needed, *further))}"
        )
    for key, value in scaling.items():
        if value is not None and key != "rope_type":
            _check_value(key, value, head_dim // 2)
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ValueError(
            f"model.rope_scaling: low_freq_factor={scaling['low_freq_factor']} must be less than "
            f"high_freq_factor={scaling['high_freq_factor']}"
        )
    if kind == "dynamic" and head_dim == 2:
        raise ValueError("model.rope_scaling: rope_type='dynamic' needs model.head_dim=4 or more")


def _check_value(key: str, value: Any, num_frequencies: int) -> None:
    """Check the value of a key of `rope_scaling`."""
    if key == "truncate":
        rule = "True or False"
        is_valid = isinstance(value, bool)
    elif key in ("short_factor", "long_factor"):
        rule = f"a list of positive numbers, model.head_dim / 2 = {num_frequencies} of them"
        is_list = isinstance(value, list | tuple) and len(value) == num_frequencies
        is_valid = is_list and all(_is_positive(each) for each in value)
    elif key == "original_max_position_embeddings":
        rule = "an integer of at least 2"
        is_valid = type(value) is int and value >= 2 and _is_positive(value)
    else:
        rule = "a positive number"
        is_valid = _is_positive(value) or (key.startswith("mscale") and value in (0, 0.0))
    if not is_valid:
        raise ValueError(f"model.rope_scaling.{key}={value!r} must be {rule}")


def _is_positive(value: Any) -> bool:
    """Return whether a value is a positive number that a float64 can represent."""
    return type(value) in (int, float) and 0 < value <= _LARGEST


def rope_frequencies(
    head_dim: int, theta: float, scaling: Scaling | None, *, num_positions: int, max_positions: int
) -> tuple[np.ndarray, float]:
    """Return (float64[H/2] radians per position, the factor for `rotate`).

    Args:
        head_dim: H, even.
        theta: base of the wavelengths.
        scaling: checked by `check_scaling`; has the keys of Hugging Face's `rope_scaling`.
        num_positions: T, which "dynamic" and "longrope" depend on.
        max_positions: longest sequence that the model supports.

    Source: "linear": Chen et al. 2023 (arXiv:2306.15595); "dynamic" and "yarn": Peng et al. 2023
    (arXiv:2309.00071), sections 3.1 to 3.4; "longrope": Ding et al. 2024 (arXiv:2402.13753);
    "llama3": Grattafiori et al. 2024 (arXiv:2407.21783), section 3.4.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "dynamic" and num_positions > max_positions:
        stretch = scaling["factor"] * num_positions / max_positions - (scaling["factor"] - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "yarn":
        return _yarn(frequencies, theta, scaling)
    if kind == "longrope":
        return _longrope(frequencies, scaling, num_positions, max_positions)
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return frequencies, 1.0


def _yarn(frequencies: np.ndarray, theta: float, scaling: Scaling) -> tuple[np.ndarray, float]:
    """Interpolate slow features, leave fast ones unchanged, and mix those in between."""
    dim = 2 * len(frequencies)
    factor = scaling["factor"]

    # The feature pair that makes this number of turns within the original context.
    def dim_of_turns(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dim_of_turns(scaling.get("beta_fast") or 32)
    high = dim_of_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    interpolated = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
    mixed = frequencies / factor * interpolated + frequencies * (1 - interpolated)
    return mixed, _yarn_factor(scaling)


def _yarn_factor(scaling: Scaling) -> float:
    def mscale(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope(frequencies, scaling: Scaling, num_positions: int, max_positions: int):
    length = scaling["original_max_position_embeddings"]
    key = "long_factor" if num_positions > length else "short_factor"
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        factor = scaling.get("factor") or max_positions / length
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
        )
    return frequencies / np.asarray(scaling[key], np.float64), attention_factor


def _llama3(frequencies: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Stretch wavelengths longer than the original context, keep short ones, mix the others."""
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies / scaling["factor"] * (1 - unscaled) + frequencies * unscaled
