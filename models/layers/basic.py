"""Layers that several models share: linear, normalization, embedding lookup.

Every layer computes in the dtype of its parameters, so the place where parameters are cast decides
the precision. A parameter's `out_sharding` metadata holds the names of its logical axes.

Flax's layers are not used here. Its `Embed` and `BatchNorm` cannot sum over mesh axes that are
manual in a pipeline stage, and `BatchNorm` keeps running averages. Its `LinearGeneral` does not
flatten the batch dims (see `Linear`). Its norms round in another order.

B batch, T seq, D embed, V vocab.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fields.numbers import MAX_INT
from models.layers import float8
from models.layers.flops import declare_flops
from sharding.logical import automatic_axes, manual_axes, offset, sum_over, sum_over_batch
from sharding.ops.rows import rows_of

#: cuBLASLt multiplies float8 matrices only if their numbers of rows and columns are multiples.
_FLOAT8_MULTIPLE = 16

# The whole train state is sharded when it is built, rather than each parameter on creation.
nnx.use_eager_sharding(False)


def fits_float8(*sizes: int) -> bool:
    """Return whether a product can be in float8 with these numbers of inputs and outputs."""
    return all(size % _FLOAT8_MULTIPLE == 0 for size in sizes)


def recomputed(
    function: Callable[..., jax.Array], *, stores_gradient: bool = False
) -> Callable[..., jax.Array]:
    """Make the backward pass recompute a cheap function, such as a norm or an activation.

    Only the arguments of the function are saved. Its result is not saved for the functions that
    read it either (models/stack.py): a scan over layers would have to write the result to memory
    and read it back, which takes longer than computing it again.

    Args:
        function: function of floating arrays, to one floating array.
        stores_gradient: whether no kernel both computes the gradient and sums it, as for a bias.
            With the threads of such a sum, a GPU computes an activation's gradient at half the
            speed, by XLA's costs for an H100.
    """

    @jax.custom_vjp
    def run(*args: jax.Array) -> jax.Array:
        return function(*args)

    def forward(*args):
        return function(*args), args

    def backward(args, gradient):
        gradients = jax.vjp(function, *args)[1](gradient)
        return jax.lax.optimization_barrier(gradients) if stores_gradient else gradients

    # optimize_remat makes `forward` one operation of the trace, `remat_opt`, which the policies of
    # models/stack.py recognize. Otherwise they would save its intermediate values.
    run.defvjp(forward, backward, optimize_remat=True)
    return run


def param(init, rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str | None]) -> nnx.Param:
    """Return a float32 parameter with a logical axis name per dim.

    Raises:
        ValueError: a dim is too large for the int32 indices of a step.
    """
    if any(size > MAX_INT for size in shape):
        raise ValueError(
            f"the model has a parameter of the shape {[*shape]}, but no dim may be more than "
            f"{MAX_INT}; reduce the sizes in the section model"
        )
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), out_sharding=tuple(axes))


class Linear(nnx.Module):
    """y = x · kernel + bias, over one or more trailing dims of x.

    Args:
        inputs: logical name -> size of the dims that are contracted, e.g. `{"embed": 64}`.
        outputs: logical name -> size of the output dims, e.g. `{"heads": 4, "head_dim": 16}`. Dims
            whose name starts with `_` are not split over the mesh.
        stddev: standard deviation of the kernel's normal initialization.
        use_bias: whether there is a bias.
        can_use_float8: whether `use_float8` may apply to it, if its sizes allow it.
        rngs: random keys for the initialization.

    Attributes:
        float8_weights: name of the kernel, if its product can be in float8.
        in_float8: whether its product is in float8.
        scaling: its scales; None: current scaling. See models/layers/float8.py.
        lora: its adapter, if it has one: (x·kernel, x, kernel) -> the adapted output without bias.
            See models/layers/lora.py.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        stddev: float,
        use_bias: bool = True,
        can_use_float8: bool = True,
        rngs: nnx.Rngs,
    ):
        axes = [None if name.startswith("_") else name for name in (*inputs, *outputs)]
        init = jax.nn.initializers.normal(stddev)
        self.kernel = param(init, rngs, (*inputs.values(), *outputs.values()), axes)
        zeros = jax.nn.initializers.zeros
        sizes = tuple(outputs.values())
        self.bias = param(zeros, rngs, sizes, axes[len(inputs) :]) if use_bias else None
        self.num_inputs = len(inputs)
        self.outputs = tuple(axes[len(inputs) :])
        counts = (math.prod(inputs.values()), math.prod(outputs.values()))
        self.float8_weights = ("kernel",) if can_use_float8 and fits_float8(*counts) else ()
        self.in_float8 = False
        self.scaling: float8.Scaling | None = nnx.data(None)
        self.lora: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = nnx.data(None)

    def use_float8(self, name: str, scaling: float8.Scaling | None) -> None:
        """Compute in float8 from now on; see `use_float8` below."""
        self.in_float8 = True
        self.scaling = scaling

    def __call__(self, x: jax.Array, split: jax.Array | None = None) -> jax.Array:
        """Apply the layer.

        Args:
            x: `[*batch, *inputs]`.
            split: x before `gather_tokens`; `x` by default. An adapter reads it, so that the
                gradients of x from several layers are still summed over devices at once.

        Returns:
            `[*batch, *outputs]`.
        """
        kernel = self.kernel[...]
        outputs = kernel.shape[self.num_inputs :]
        # A GPU's product adds a bias of one dim without a pass over y. If dims after the first are
        # split over the mesh, they cannot be merged without communication.
        merges = not any(name and automatic_axes(name) for name in self.outputs[1:])
        if merges:
            kernel = kernel.reshape(*kernel.shape[: self.num_inputs], -1)
        batch = x.shape[: x.ndim - self.num_inputs]
        # Flatten to one batch dim: with two of them, XLA on CPU writes a transposed copy of the
        # cotangent for the weight gradient.
        flat = x.reshape(math.prod(batch), *x.shape[len(batch) :])
        contracted = tuple(range(self.num_inputs))
        if self.in_float8:
            y = float8.product(flat, kernel, self.num_inputs, self.scaling)
        else:
            y = jax.lax.dot_general(
                flat, kernel, ((tuple(i + 1 for i in contracted), contracted), ((), ()))
            )
        if self.lora is not None:
            # Adapters are not the model's work; see models/flops.py.
            y = declare_flops(0, self.lora, y, x if split is None else split, kernel)
        if self.bias is not None:
            bias = self.bias[...]
            y = y + (bias.reshape(-1) if merges else bias)[None]
        return y.reshape(*batch, *outputs)


def float8_kernels(block: nnx.Module) -> dict[tuple, Any]:
    """Return the kernels of a block whose products can be in float8: path -> their module.

    A module names them in `float8_weights`. The order is the same for every block of a stack.
    """
    return {
        (*path, name): module
        for path, module in nnx.iter_modules(block)
        for name in getattr(module, "float8_weights", ())
    }


def use_float8(block: nnx.Module, scaling: jax.Array | None) -> None:
    """Make the products of a block with its `float8_kernels` compute in float8.

    Args:
        block: block; it is changed.
        scaling: scales of its `float8_kernels`, float[n, 3, NUM_BINS]; None: current
            scaling. See models/layers/float8.py. Kernels of the same input, as a module says in
            `same_input`, use the scale of the first of them for it.
    """
    kernels = float8_kernels(block)
    numbers = {path: number for number, path in enumerate(kernels)}
    of_input = dict(numbers)
    for path, module in nnx.iter_modules(block):
        # They are weights of this module, or the kernels of linear layers.
        names = ((*path, name) for name in getattr(module, "same_input", ()))
        sharing = [each for name in names for each in (name, (*name, "kernel")) if each in numbers]
        of_input |= {each: numbers[sharing[0]] for each in sharing}
    for path, module in kernels.items():
        rows = None
        if scaling is not None:
            rows = (scaling[of_input[path], 0], scaling[numbers[path], 1:])
        module.use_float8(path[-1], rows)


class LayerNorm(nnx.Module):
    """Normalizes the last dim to mean 0 and variance 1, then applies scale and bias.

    Args:
        features: size of the last dim, or sizes and logical axes of several last dims. Statistics
            are always of the last one; with several, the scale and the bias differ in the others.
        epsilon: added to the variance.
        start: initial value of the scale.
        offset: added to the parameter to get the scale.
        use_bias: whether there is a bias.
        rngs: random keys for the initialization.

    Source: Ba et al. 2016 (arXiv:1607.06450).
    """

    def __init__(
        self,
        features: int | Mapping[str, int],
        *,
        epsilon: float,
        start: float = 1.0,
        offset: float = 0.0,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        initial = jax.nn.initializers.constant(start - offset)
        sizes = {None: features} if isinstance(features, int) else features
        shape = tuple(sizes.values())
        self.scale = param(initial, rngs, shape, tuple(sizes))
        zeros = jax.nn.initializers.zeros
        self.bias = param(zeros, rngs, shape, tuple(sizes)) if use_bias else None
        self.offset = offset
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an array of the shape and dtype of `x`; statistics are float32 or wider."""
        biases = () if self.bias is None else (self.bias[...],)
        return recomputed(self._normalize)(x, self.scale[...], *biases)

    def _normalize(self, x: jax.Array, scale: jax.Array, *biases: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        centred = wide - mean
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scaled = normal * _plus(scale, self.offset, wide.dtype)
        return sum(biases, scaled).astype(x.dtype)


class BatchNorm(nnx.Module):
    """Normalizes every feature to mean 0 and variance 1 over a batch, then applies scale and bias.

    Statistics always come from the current batch, even in evaluations. There are no running
    averages.

    Args:
        features: size of the last dim.
        axis: logical axis of the features, if they are split over the mesh.
        learns: whether there are a scale and a bias.
        rngs: random keys for the initialization.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167).
    """

    def __init__(
        self, features: int, axis: str | None = None, *, learns: bool = True, rngs: nnx.Rngs
    ):
        ones = jax.nn.initializers.ones
        zeros = jax.nn.initializers.zeros
        shape = (features,)
        self.scale = param(ones, rngs, shape, (axis,)) if learns else None
        self.bias = param(zeros, rngs, shape, (axis,)) if learns else None

    def __call__(self, x: jax.Array, weights_B: jax.Array) -> jax.Array:
        """Return an array of the shape and dtype of `x`; statistics are float32 or wider.

        Args:
            x: `[B, ..., features]`. Statistics are taken over the examples of all devices. Each
                position in the dims between batch and features has statistics of its own.
            weights_B: weight of each example in the statistics.
        """
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        weights = weights_B.astype(wide.dtype).reshape(-1, *[1] * (x.ndim - 1))
        total = sum_over_batch(jnp.sum(weights))
        total = jnp.where(total > 0, total, 1)
        mean = sum_over_batch(jnp.sum(wide * weights, axis=0)) / total
        variance = sum_over_batch(jnp.sum(jnp.square(wide - mean) * weights, axis=0)) / total
        normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
        if self.scale is not None and self.bias is not None:
            normal = normal * self.scale[...] + self.bias[...]
        return normal.astype(x.dtype)


class RMSNorm(LayerNorm):
    """Divides the last dims by their root mean square, then applies a scale.

    Args:
        features: size of the last dim, or sizes and logical axes of several last dims, which have
            one mean square together.
        **options: `epsilon`, added to the mean square, `offset` and `rngs`, as for `LayerNorm`.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, features: int | Mapping[str, int], **options: Any):
        super().__init__(features, use_bias=False, **options)
        self.dims = (-1,) if isinstance(features, int) else tuple(range(-len(features), 0))

    def _normalize(self, x: jax.Array, scale: jax.Array, *biases: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=self.dims, keepdims=True)
        scale = _plus(scale, self.offset, wide.dtype)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


#: Kinds of norms by their names in configs. "1p": the scale is 1 plus the parameter.
NORM_KINDS: dict[str, Callable[..., nnx.Module]] = {
    "rms": RMSNorm,
    "rms_1p": partial(RMSNorm, offset=1.0),
    "layer": LayerNorm,
    "layer_1p": partial(LayerNorm, offset=1.0),
    "layer_no_bias": partial(LayerNorm, use_bias=False),
}


def _plus(scale: jax.Array, offset: float, dtype: jnp.dtype) -> jax.Array:
    return scale if offset == 0.0 else scale.astype(dtype) + offset


def unit_length(x: jax.Array) -> jax.Array:
    """Divide the last dim by its Euclidean norm, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def lookup(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows of an embedding table selected by ids.

    If the pipeline stages share the vocab, each stage looks up the ids in its own rows, uses zeros
    for all others, and the stages sum their results.

    Args:
        table_VD: table, or this stage's rows of it; V is the logical axis "vocab".
        ids: int32, of any shape.

    Returns:
        Embeddings `[*ids, D]`.
    """
    if not manual_axes("vocab"):
        return rows_of(table_VD, ids)
    here = ids - offset("vocab", table_VD.shape[0])
    is_here = (here >= 0) & (here < table_VD.shape[0])
    rows = jnp.where(is_here[..., None], rows_of(table_VD, jnp.where(is_here, here, 0)), 0)
    return sum_over("vocab", rows)
