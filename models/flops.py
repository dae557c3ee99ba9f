"""Counts model FLOPs, the numerator of model FLOPs utilization (MFU).

Convention (PaLM, arXiv:2204.02311, appendix B, but with causal attention at half): a multiply-add
is 2 FLOPs. Only matrix products count. The backward pass costs twice the forward pass.
Recomputation does not count. Causal attention counts only the half of its products that is not
masked. Embedding lookups are free. The head counts the vocab without padding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from sharding.jaxprs import dot_general_flops, walk


def dense_flops(*sizes: int) -> int:
    """Return the forward FLOPs per token of a matrix product with a kernel of these sizes."""
    product = 2
    for size in sizes:
        product *= size
    return product


def attention_flops(
    num_keys: int, num_heads: int, head_dim: int, *, is_causal: bool, window: int | None = None
) -> int:
    """Return the forward FLOPs per query token of q·kᵀ and weights·v.

    Args:
        num_keys: S. If `is_causal`, also the number of queries T.
        num_heads: number of attention heads.
        head_dim: size of one head.
        is_causal: whether queries see no later keys.
        window: maximum number of keys that a query sees, up to its own, and if not `is_causal`
            also from its own; None for all.
    """
    full = 2 * dense_flops(num_keys, num_heads, head_dim)
    if not is_causal and window is None:
        return full
    seen = num_keys if window is None else min(window, num_keys)
    # Each of the T queries sees `seen` keys, but the first ones see fewer: T·seen - seen²/2 of the
    # T² products are not masked. A diagonal counts half, as everywhere in this project.
    return full * (2 * num_keys - seen) * seen // ((2 if is_causal else 1) * num_keys**2)


def train_flops(
    model: object, shapes: Mapping[str, Any], num_params: int, *, has_adapters: bool = False
) -> int:
    """Return the FLOPs of a batch, forward and backward.

    Args:
        model: if it has a method `forward_flops(shapes)`, that counts the forward pass; otherwise
            every parameter counts as one multiply-add per token. If it has a method
            `teach_flops(shapes)`, that counts the teacher, which has no backward pass.
        shapes: batch's arrays, or their ShapeDtypeStructs, by name.
        num_params: number of parameters.
        has_adapters: whether only adapters are trained. Then the gradients of kernels, half of the
            backward pass, do not count; nor do the adapters.
    """
    count = getattr(model, "forward_flops", None)
    forward = count(shapes) if count else dense_flops(num_params, num_tokens(shapes))
    teacher_outputs = getattr(model, "teach_flops", lambda shapes: 0)
    return (2 if has_adapters else 3) * forward + teacher_outputs(shapes)


def num_tokens(shapes: Mapping[str, Any]) -> int:
    """Return the number of tokens in a batch that a model processes, including padding."""
    return sum(leaf.size for name, leaf in shapes.items() if name.endswith("tokens"))


def traced_flops(function: Callable, *args: Any) -> int:
    """Return the FLOPs of all matrix products in a function, with every scan iteration counted.

    Args:
        function: function, which is only traced.
        *args: its arguments, or their ShapeDtypeStructs.
    """
    total = 0
    for eqn, times in walk(jax.make_jaxpr(function)(*args).jaxpr.eqns):
        if eqn.primitive.name == "dot_general":
            left = eqn.invars[0].aval.shape
            output = eqn.outvars[0].aval.shape
            total += times * dot_general_flops(eqn.params, left, output)
    return total
