"""Model FLOPs, the numerator of MFU.

Convention (PaLM, arXiv:2204.02311, appendix B, with causal attention at half): a multiply-add is 2
FLOPs; only matrix products count; the backward is twice the forward; recomputation does not count;
causal attention counts the half of its products that is not masked; embedding lookups are free; the
head counts the vocab without padding.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params


def dense_flops(*sizes: int) -> int:
    """Returns forward FLOPs per token of a matrix product whose kernel has these sizes."""
    product = 2
    for size in sizes:
        product *= size
    return product


def attention_flops(sequence_length: int, num_heads: int, head_dim: int, *, is_causal: bool) -> int:
    """Returns forward FLOPs per query token of q·kᵀ and weights·v."""
    full = 2 * dense_flops(sequence_length, num_heads, head_dim)
    return full // 2 if is_causal else full


def train_flops_per_token(model: object, sequence_length: int, num_params: int) -> int:
    """Returns forward and backward FLOPs per token.

    Args:
        model: its method `forward_flops_per_token(sequence_length)` is asked if it has one;
            otherwise every parameter counts as one multiply-add.
        num_params: number of parameters.
    """
    count = getattr(model, "forward_flops_per_token", None)
    return 3 * (count(sequence_length) if count else dense_flops(num_params))


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
