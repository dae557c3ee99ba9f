"""Counts the FLOPs of traced functions, and lets layers declare the FLOPs of a region.

Every matrix product of a trace counts, with all iterations of a scan. For some layers that is not
the model's work: a kernel for attention also computes masked scores, or is not a matrix product at
all; a loss multiplies by the padding of the vocabulary; the number of iterations of a loop may
depend on the data. Such a layer declares its work:

    y = declare_flops(flops, function, *args)        the same as function(*args)

While `model_flops` traces a model, the region counts as `flops`, whatever is in it:

    attend                 half of the products if it is causal, and only those in a window
    chunked_vocab_loss     the vocabulary and the tokens without their padding
    adapters               nothing
    experts                those that each token is sent to

In all other traces, `declare_flops` leaves no mark.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching

from sharding.jaxprs import convolution_flops, dot_general_flops, walk

Results = TypeVar("Results")

#: Whether regions count as they declare. jax traces a function again if this differs, so that no
#: step gets a function without its regions, not even one with `jax.jit` inside the model.
_uses_declared = jax.make_user_context(default_value=False)

#: Takes the inputs of a region, and has its results' types and its FLOPs as parameters.
_declared = Primitive("declared_flops")
_declared.multiple_results = True
_declared.def_abstract_eval(lambda *inputs, flops, types: types)


def dense_flops(*sizes: int) -> int:
    """Return the forward FLOPs per token of a matrix product with a kernel of these sizes."""
    product = 2
    for size in sizes:
        product *= size
    return product


def attention_flops(
    num_keys: int,
    num_heads: int,
    head_dim: int,
    *,
    is_causal: bool,
    window: int | None = None,
    value_dim: int | None = None,
) -> int:
    """Return the forward FLOPs per query token of q·kᵀ and weights·v.

    Args:
        num_keys: S. If `is_causal`, or if there is a window, also the number of queries T.
        num_heads: number of attention heads.
        head_dim: size of one head.
        is_causal: whether queries see no later keys.
        window: queries see only keys that are nearer than this; None for all.
        value_dim: size of one head's values; `head_dim` if None.
    """
    value_dim = head_dim if value_dim is None else value_dim
    full = dense_flops(num_keys, num_heads, head_dim + value_dim)
    # Of the T² products, (T - seen)² / 2 are beyond the window on either side of the diagonal. A
    # diagonal counts half, as everywhere in this project.
    seen = num_keys if window is None else min(window, num_keys)
    within = full * (2 * num_keys - seen) * seen
    return within // ((2 if is_causal else 1) * num_keys**2)


def declare_flops(flops: int, function: Callable[..., Results], *args: Any) -> Results:
    """Return `function(*args)`, which counts as `flops` in `model_flops`.

    Args:
        flops: forward FLOPs of the region; 0 for work that is not the model's, such as computing
            something a second time.
        function: region.
        *args: trees of arrays that it reads.
    """
    if not _uses_declared.value:
        return function(*args)
    with _uses_declared(False):
        results = jax.eval_shape(function, *args)
    leaves, structure = jax.tree.flatten(results)
    types = tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
    outputs = _declared.bind(*jax.tree.leaves(args), flops=flops, types=types)
    return jax.tree.unflatten(structure, outputs)


def _batched_region(inputs: Sequence, dims: Sequence, *, flops: int, types: Sequence) -> Any:
    """Return a region under `jax.vmap`: it runs once per example."""
    size = next(x.shape[dim] for x, dim in zip(inputs, dims, strict=True) if dim is not None)
    types = tuple(ShapedArray((size, *type_.shape), type_.dtype) for type_ in types)
    outputs = _declared.bind(*inputs, flops=size * flops, types=types)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_declared] = _batched_region


def traced_flops(function: Callable, *args: Any) -> int:
    """Return the FLOPs of all matrix products in a function, with every scan iteration counted.

    Args:
        function: function, which is only traced.
        *args: its arguments, or their ShapeDtypeStructs.
    """
    total = 0
    for eqn, times in walk(jax.make_jaxpr(function)(*args).jaxpr.eqns):
        name = eqn.primitive.name
        if name == "dot_general":
            left = eqn.invars[0].aval.shape
            total += times * dot_general_flops(eqn.params, left, eqn.outvars[0].aval.shape)
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            total += times * convolution_flops(eqn.params, kernel, eqn.outvars[0].aval.shape)
        elif eqn.primitive is _declared:
            total += times * eqn.params["flops"]
    return total


def model_flops(function: Callable, *args: Any) -> int:
    """Like `traced_flops`, but regions count as they declare."""
    with _uses_declared(True):
        return traced_flops(function, *args)
