"""Dtypes of a run, loss scaling for float16, and stochastic rounding for bfloat16 weights.

Products in float8 are in models/layers/float8.py.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from fields.field import field
from fields.section import Section

_ROUNDING_TAG = 0x5E0D

#: Largest `precision.float8_history`: float32 counts steps exactly up to here.
MAX_HISTORY = 2**24

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section, section="precision"):
    """Dtypes and loss scaling.

    The optimizer state is float32, or float64 if the master weights are. bfloat16 master weights
    are rounded stochastically after every update, so that small updates are not lost. The loss
    scale is used with `precision.compute=float16` only. See docs/precision.md.
    """

    compute: str = field(
        "float32",
        "dtype of activations, and of the copy of the parameters that layers compute with. "
        "float8: bfloat16, but linear layers and experts of the stacks multiply in float8.",
        choices=("bfloat16", "float16", "float32", "float64", "float8"),
        required=True,
    )
    params: str = field(
        "float32",
        "dtype of the master weights.",
        choices=("bfloat16", "float32", "float64"),
        required=True,
    )
    frozen: str | None = field(
        None,
        "dtype of parameters that are not trained (`optimizer.frozen`, `lora`). None: that of "
        "`params`.",
        choices=("bfloat16", "float16", "float32"),
    )
    reduce: str | None = field(
        None,
        "dtype in which gradients are summed over devices. None: the one in which they were "
        "accumulated, float32 or wider.",
        choices=("bfloat16", "float16", "float32"),
    )
    loss_scale: float = field(
        65536.0, "For `compute=float16`: initial scale of the mean loss.", gt=0
    )
    loss_scale_window: int = field(
        2000, "Finite steps after which the loss scale doubles; 0: it never changes.", ge=0
    )
    loss_scale_hysteresis: int = field(
        1, "Steps with NaN or infinity after which the loss scale is halved.", ge=1
    )
    loss_scale_min: float = field(1.0, "Lower bound of the loss scale.", gt=0)
    float8_scaling: str = field(
        "delayed",
        "For `compute=float8`: scale a tensor by its largest values in earlier steps (delayed), or "
        "by its own (current), which is slower. Evaluations always use current.",
        choices=("delayed", "current"),
    )
    float8_history: int = field(
        1024, "For `float8_scaling=delayed`: number of earlier steps.", ge=1, le=MAX_HISTORY
    )

    def __post_init__(self):
        super().__post_init__()
        both = f"precision.compute={self.compute!r} and precision.params={self.params!r}"
        if (self.compute == "float64") != (self.params == "float64"):
            raise ValueError(f"{both}: set both to float64, or neither")
        if self.reduce == "float16" != self.compute:
            raise ValueError(
                f"precision.reduce='float16' and precision.compute={self.compute!r}: sums over "
                "tokens exceed the range of float16 unless the loss is scaled, which is done only "
                "with compute='float16'; set precision.reduce=bfloat16"
            )
        if (self.compute, self.params) == ("float16", "bfloat16"):
            raise ValueError(
                f"{both}: bfloat16 master weights have fewer digits than the computation; set "
                "precision.params=float32, or precision.compute=bfloat16"
            )
        if self.loss_scale_min > self.loss_scale:
            raise ValueError(
                f"precision.loss_scale_min={self.loss_scale_min} must not be more than "
                f"precision.loss_scale={self.loss_scale}; lower it, or raise precision.loss_scale"
            )

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations, and of the parameters' copy."""
        return "bfloat16" if self.in_float8 else self.compute

    @property
    def in_float8(self) -> bool:
        """Whether linear layers and experts of the stacks multiply in float8."""
        return self.compute == "float8"

    @property
    def keeps_amax_history(self) -> bool:
        """Whether the state has the largest values of earlier steps, for delayed scaling."""
        return self.in_float8 and self.float8_scaling == "delayed"

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled."""
        return self.compute == "float16"

    @property
    def update(self) -> Any:
        """The dtype of the optimizer state, and of updated parameters before they are rounded."""
        return jnp.promote_types(self.params, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """State of dynamic loss scaling: the factor of the loss, and counters for its next change.

    All zeros is the initial state; the scale is then `precision.loss_scale`.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the names are
    taken from DeepSpeed's `fp16` section.
    """

    scale: Any  # float32[]; 0 until it first changes
    num_finite: Any  # int32[], finite steps since the last change or the last nonfinite step
    num_tolerated: Any  # int32[], nonfinite steps that did not halve the scale (hysteresis)
    num_stuck: Any  # int32[], nonfinite steps in a row that could not halve it any further

    @classmethod
    def initial(cls) -> "LossScale":
        """Return the initial state, all zeros."""
        zero = jnp.zeros((), jnp.int32)
        scale = jnp.zeros((), jnp.float32)
        return cls(scale=scale, num_finite=zero, num_tolerated=zero, num_stuck=zero)

    def value(self, config: PrecisionConfig) -> jax.Array:
        """Return the scale, float32[]."""
        is_at_start = (self.scale == 0) | (config.loss_scale_window == 0)
        return jnp.where(is_at_start, jnp.float32(config.loss_scale), self.scale)

    def can_fall(self, config: PrecisionConfig) -> jax.Array:
        """Return whether a nonfinite step can still halve the scale, bool[]."""
        is_above = self.value(config) / 2 >= config.loss_scale_min
        return is_above & (config.loss_scale_window > 0)

    def after(self, finite: jax.Array, config: PrecisionConfig) -> "LossScale":
        """Return the state after a step.

        Args:
            finite: bool[], whether the step's loss and gradients were finite.
        """
        is_stuck = ~finite & ~self.can_fall(config)
        num_stuck = jnp.where(finite, 0, self.num_stuck + is_stuck)
        if config.loss_scale_window == 0:
            return dataclasses.replace(self, num_stuck=num_stuck)
        num_finite = jnp.where(finite, self.num_finite + 1, 0)
        grows = num_finite >= config.loss_scale_window
        num_tolerated = self.num_tolerated + jnp.where(finite, 0, 1)
        falls = ~finite & (num_tolerated >= config.loss_scale_hysteresis)
        falls &= self.can_fall(config)
        factor = jnp.where(grows, 2, jnp.where(falls, 0.5, 1)).astype(jnp.float32)
        # After the scale has been halved, every further nonfinite step halves it again, until it
        # grows: the hysteresis is not reset.
        tolerated = jnp.minimum(num_tolerated, config.loss_scale_hysteresis - 1)
        return LossScale(
            scale=self.value(config) * factor,
            num_finite=jnp.where(grows, 0, num_finite),
            num_tolerated=jnp.where(grows, 0, tolerated),
            num_stuck=num_stuck,
        )


def rounded_at_random(tree: Tree, like: Tree, row_ids: Tree, seed: int, step: jax.Array) -> Tree:
    """Cast float32 parameters to the dtypes of `like`, with stochastic rounding for bfloat16.

    A value is rounded to one of its two bfloat16 neighbours, to the nearer one with higher
    probability, so that the expected value is exact. The random bits depend only on the seed, the
    step, the name of the parameter and the number of its layer or row, and are the same on every
    mesh.

    Args:
        tree: updated parameters. Some of them may be None, or slices along the first dimension.
        like: the same tree with the target dtypes.
        row_ids: the same tree, int32 of the length of the first dimension: the number of each
            layer or row.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015), section 3.
    """
    base = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _ROUNDING_TAG), step)

    def rounded(path, x, target, row_ids):
        if target.dtype != jnp.bfloat16:
            return x.astype(target.dtype)
        key = jax.random.fold_in(base, zlib.crc32(jax.tree_util.keystr(path).encode()))
        if not x.ndim:
            return to_bfloat16(x, key)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(row_ids))
        return jax.vmap(to_bfloat16)(x, keys)

    return jax.tree_util.tree_map_with_path(rounded, tree, like, row_ids)


def to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 values to bfloat16 stochastically, to the nearer neighbour more often."""
    # bfloat16 is the upper 16 bits of float32. Adding 16 uniform random bits to the lower half
    # carries into the upper half, which rounds up, with probability lower half / 2**16.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = ((bits + noise) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
