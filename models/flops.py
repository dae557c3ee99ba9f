"""Model FLOPs, the numerator of MFU.

Convention (PaLM, arXiv:2204.02311, appendix B, with causal attention at half): a multiply-add is 2
FLOPs; only matrix products count; the backward is twice the forward; recomputation does not count;
causal attention counts the half of its products that is not masked; embedding lookups are free; the
head counts the vocab without padding.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params


def dense_flops(*sizes: int) -> int:
    """Returns forward FLOPs per token of a matrix product whose kernel has these sizes."""
    product = 2
    for size in sizes:
        product *= size
    return product


def attention_flops(
    num_keys: int, num_heads: int, head_dim: int, *, is_causal: bool, window: int | None = None
) -> int:
    """Returns forward FLOPs per query token of q·kᵀ and weights·v.

    Args:
        num_keys: S; also T, the queries, if `is_causal`.
        window: a query sees at most so many keys, if `is_causal`.
    """
    full = 2 * dense_flops(num_keys, num_heads, head_dim)
    if not is_causal:
        return full
    seen = num_keys if window is None else min(window, num_keys)
    # Of T² products, those of a triangle of side `seen` above the band are masked, as are all
    # beyond the band; as everywhere here, a diagonal counts half.
    return full * (2 * num_keys - seen) * seen // (2 * num_keys**2)


def train_flops(model: object, shapes: Mapping[str, Any], num_params: int) -> int:
    """Returns forward and backward FLOPs of a batch.

    Args:
        model: its method `forward_flops(shapes)` is asked if it has one; otherwise every parameter
            counts as one multiply-add of each token. What an average of the parameters computes
            without a backward, for `teach`, is `teach_flops(shapes)`.
        shapes: the batch's arrays, or ShapeDtypeStructs of them, by name.
        num_params: number of parameters.
    """
    count = getattr(model, "forward_flops", None)
    forward = count(shapes) if count else dense_flops(num_params, num_tokens(shapes))
    teacher_outputs = getattr(model, "teach_flops", lambda shapes: 0)
    return 3 * forward + teacher_outputs(shapes)


def num_tokens(shapes: Mapping[str, Any]) -> int:
    """Returns how many tokens a batch feeds to a model, padding included."""
    return sum(leaf.size for name, leaf in shapes.items() if name.endswith("tokens"))


def traced_flops(function: Callable, *args: Any) -> int:
    """Returns FLOPs of all matrix products that a function runs, loops counted by their length.

    Args:
      *args: its arguments, or ShapeDtypeStructs of them.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[dim] for dim in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(_flops, jaxprs_in_params(eqn.params)))
    return total
