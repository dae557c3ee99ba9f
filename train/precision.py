"""Dtypes of a run, and what narrow ones need: a scale for gradients in float16, and rounding."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

_ROUNDING_TAG = 0x5E0D

Tree = Any

_CHOICES = {
    "compute": ("bfloat16", "float16", "float32", "float64"),
    "params": ("bfloat16", "float32", "float64"),
    "reduce": (None, "bfloat16", "float16", "float32"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of the computation, of the master weights, and of sums over devices.

    The optimizer's state is float32, or float64 if the master weights are. Master weights of
    bfloat16 are rounded up or down at random after every update, so that small updates are not
    lost. The fields of the loss scale are for `compute="float16"` alone.
    """

    compute: str
    params: str
    reduce: str | None = None  # of gradients; None: as they were added up, float32 or wider
    loss_scale: float = 65536.0  # of the mean loss, at the start
    loss_scale_window: int = 2000  # finite steps after which it doubles; 0: it never changes
    loss_scale_hysteresis: int = 1  # steps that are not finite until it is halved
    loss_scale_min: float = 1.0  # it is not halved below this

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                named = ", ".join(str(choice) for choice in choices)
                raise ValueError(
                    f"precision.{name}={getattr(self, name)!r} is unknown; choose {named}"
                )
        both = f"precision.compute={self.compute!r} and precision.params={self.params!r}"
        if (self.compute == "float64") != (self.params == "float64"):
            raise ValueError(f"{both}: float64 must be chosen for both or for neither")
        if self.reduce == "float16" != self.compute:
            raise ValueError(
                f"precision.reduce='float16' and precision.compute={self.compute!r}: sums over "
                "tokens leave the range of float16 unless their loss is scaled, as it is for "
                "compute='float16'; set precision.reduce=bfloat16"
            )
        if (self.compute, self.params) == ("float16", "bfloat16"):
            raise ValueError(
                f"{both}: bfloat16 has fewer digits than the computation; set "
                "precision.params=float32, or precision.compute=bfloat16"
            )
        if not 0 < self.loss_scale_min <= self.loss_scale < math.inf:
            raise ValueError(
                f"precision.loss_scale_min={self.loss_scale_min} and precision.loss_scale="
                f"{self.loss_scale} must be positive, and the former not the larger one"
            )
        if self.loss_scale_window < 0 or self.loss_scale_hysteresis < 1:
            raise ValueError(
                f"precision.loss_scale_window={self.loss_scale_window} must not be negative, and "
                f"precision.loss_scale_hysteresis={self.loss_scale_hysteresis} must be at least 1"
            )

    @property
    def scales_loss(self) -> bool:
        return self.compute == "float16"

    @property
    def update(self) -> Any:
        """The dtype of the optimizer's state, and of an update before it is rounded."""
        return jnp.promote_types(self.params, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by before its gradients are computed; zeros are the start.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the names are
    those of DeepSpeed's `fp16` section.
    """

    scale: Any  # float32[]; 0 before it first changes
    num_finite: Any  # int32[], steps since the last change, or since one that was not finite
    num_tolerated: Any  # int32[], steps that were not finite and did not halve it (hysteresis)
    num_stuck: Any  # int32[], steps in a row that were not finite and could not halve it

    @classmethod
    def initial(cls) -> "LossScale":
        zero = jnp.zeros((), jnp.int32)
        scale = jnp.zeros((), jnp.float32)
        return cls(scale=scale, num_finite=zero, num_tolerated=zero, num_stuck=zero)

    def value(self, config: PrecisionConfig) -> jax.Array:
        """Returns the scale, float32[]."""
        is_at_start = (self.scale == 0) | (config.loss_scale_window == 0)
        return jnp.where(is_at_start, jnp.float32(config.loss_scale), self.scale)

    def can_fall(self, config: PrecisionConfig) -> jax.Array:
        """Returns, bool[], whether a step that is not finite says no more than to halve it."""
        is_above = self.value(config) / 2 >= config.loss_scale_min
        return is_above & (config.loss_scale_window > 0)

    def after(self, finite: jax.Array, config: PrecisionConfig) -> "LossScale":
        """Returns the scale after a step.

        Args:
            finite: bool[], whether the step's loss and gradients were.
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
        # Once it has fallen each further one counts, until it has grown again.
        tolerated = jnp.minimum(num_tolerated, config.loss_scale_hysteresis - 1)
        return LossScale(
            scale=self.value(config) * factor,
            num_finite=jnp.where(grows, 0, num_finite),
            num_tolerated=jnp.where(grows, 0, tolerated),
            num_stuck=num_stuck,
        )


def rounded_at_random(tree: Tree, like: Tree, numbers: Tree, seed: int, step: jax.Array) -> Tree:
    """Returns float32 parameters in the dtypes of `like`; on average bfloat16 loses nothing.

    A value goes to one of its two neighbours, to the nearer one more often, by bits that depend on
    the seed, the step, the parameter, and its layer or row alone: the same on every mesh.

    Args:
        tree: updated parameters, or some of them and None for the others, or slices of them.
        numbers: likewise int32 of their first dim, each layer's or row's number.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015), section 3.
    """
    base = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _ROUNDING_TAG), step)

    def rounded(path, x, target, numbers):
        if target.dtype != jnp.bfloat16:
            return x.astype(target.dtype)
        key = jax.random.fold_in(base, zlib.crc32(jax.tree_util.keystr(path).encode()))
        if not x.ndim:
            return to_bfloat16(x, key)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(numbers))
        return jax.vmap(to_bfloat16)(x, keys)

    return jax.tree_util.tree_map_with_path(rounded, tree, like, numbers)


def to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 `x` rounded to one of its neighbours at random, to the nearer more often."""
    # bfloat16 is the upper half of float32: a carry out of the lower half rounds up.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = ((bits + noise) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
