"""The state of delayed scaling for float8: which scales recent steps needed, and its way.

    TrainState.amax_history           stack -> float32[slots, n, 2, NUM_BINS], counts of steps
      -> with_scaling                 each slot's scales become a parameter of its layer
      -> the block                    models/layers/float8.py
      -> without_scaling              their "gradient" says which scales this step would have needed
      -> updated                      TrainState.amax_history

A stack with n kernels in float8 per block has a history for 2·n tensors per layer: the input and
the gradient of each. The bins of microbatches and devices are summed like gradients, by the same
code, so all meshes have the same scales.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.functions import ModelFunctions
from models.layers import float8
from pipeline.runtime.gather import ParamSharding
from sharding.gather_modes import GatherMode
from sharding.memory import is_on_host, to_device

#: A history is split over the pipeline stages, like the layers that it belongs to.
HISTORY_SPEC = PartitionSpec("pipeline")

Tree = Any
History = dict[str, jax.Array]


def empty_history(functions: ModelFunctions) -> History:
    """Return the history of a new run, float32[layers, n, 2, NUM_BINS] per stack.

    Stacks without kernels in float8 are left out.
    """
    return {
        stack: jnp.zeros(
            (functions.num_layers[stack], len(kernels), len(float8.WITH_HISTORY), float8.NUM_BINS),
            jnp.float32,
        )
        for stack, kernels in functions.float8_kernels.items()
        if kernels
    }


def with_scaled_blocks(functions: ModelFunctions) -> ModelFunctions:
    """Return functions whose blocks take `{"layer": ..., "scaling": ...}` as their parameters."""

    def scaled(block: Callable) -> Callable:
        def run(params, x, microbatch, number):
            return block(params["layer"], x, microbatch, number, params["scaling"])

        return run

    blocks = {
        stack: scaled(block) if functions.float8_kernels[stack] else block
        for stack, block in functions.blocks.items()
    }
    frozen = functions.frozen
    if frozen is not None:
        scaled_stacks = [stack for stack, kernels in functions.float8_kernels.items() if kernels]
        frozen = _with(frozen, dict.fromkeys(scaled_stacks, False))
    return dataclasses.replace(functions, blocks=blocks, frozen=frozen)


def with_scaling(params: Tree, history: History, functions: ModelFunctions, dtype: Any) -> Tree:
    """Return the parameters of `with_scaled_blocks`: the model's, and the scales of this step.

    Args:
        params: `{"non_stack": ..., "stacks": {stack: layers}}`, as from `ModelFunctions.split`.
        dtype: dtype in which layers receive their parameters.
    """
    scaling = {}
    for stack, bins in history.items():
        layers = params["stacks"][stack]
        kernels = [_leaf(layers, path) for path in functions.float8_kernels[stack]]
        of_kernels = jnp.stack([_kernel_scales(kernel, dtype) for kernel in kernels], axis=1)
        scaling[stack] = float8.scaling_of(bins, of_kernels)
    return _with(params, scaling)


def without_scaling(grads: Tree, history: History) -> tuple[Tree, History]:
    """Split the gradients of `with_scaling(params, history, ...)`.

    Returns:
        (gradients of params, bins of the scales that this step needed, shaped like `history`).
    """
    stacks = grads["stacks"]
    rows = len(float8.WITH_HISTORY)
    seen = {stack: stacks[stack]["scaling"][:, :, :rows] for stack in history}
    layer_grads = {stack: stacks[stack]["layer"] for stack in history}
    return grads | {"stacks": stacks | layer_grads}, seen


def with_scaling_specs(sharding: ParamSharding, functions: ModelFunctions) -> ParamSharding:
    """Return how the parameters of `with_scaled_blocks` are sharded: scales like their layers."""
    scaled = [stack for stack, kernels in functions.float8_kernels.items() if kernels]
    return dataclasses.replace(
        sharding,
        specs=_with(sharding.specs, dict.fromkeys(scaled, HISTORY_SPEC)),
        gather_modes=_with(sharding.gather_modes, dict.fromkeys(scaled, GatherMode.ONCE)),
        kept_axes=_with(sharding.kept_axes, dict.fromkeys(scaled, frozenset())),
    )


def update_history(history: History, seen: History, length: int, finite: jax.Array) -> History:
    """Return the history after a step; see models.layers.float8.updated_history.

    Args:
        seen: bins of the scales that the step needed, as from `without_scaling`.
        finite: bool[], whether the step was finite; otherwise the history stays as it is.
    """

    def after(bins: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(finite, float8.updated_history(bins, seen, length), bins)

    return jax.tree.map(after, history, seen)


def misfit_metrics(history: History, seen: History) -> dict[str, jax.Array]:
    """Return the metrics that count the tensors whose scale did not fit in a step, int32[].

    `float8_overflows`: the largest values of a tensor were clipped. `float8_underflows`: all values
    of a tensor were so small for its scale that they lost digits.
    """
    counts = [float8.count_misfits(history[stack], seen[stack]) for stack in history]
    overflows, underflows = (jnp.stack(numbers) for numbers in zip(*counts, strict=True))
    return {"float8_overflows": jnp.sum(overflows), "float8_underflows": jnp.sum(underflows)}


def _kernel_scales(kernels: jax.Array, dtype: Any) -> jax.Array:
    """Return the scale of each layer's kernel, float32[slots]; kernels may be in host memory."""
    if not is_on_host(kernels):
        return float8.kernel_scales(kernels, dtype)

    # Slot by slot: the device may have no room for all.
    def of_slot(slot: jax.Array) -> jax.Array:
        kernel = to_device(jax.lax.dynamic_index_in_dim(kernels, slot))
        return float8.kernel_scales(kernel, dtype)[0]

    return jax.lax.map(of_slot, jnp.arange(len(kernels), dtype=jnp.int32))


def _leaf(tree: Tree, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(params: Tree, scaling: Mapping[str, Any]) -> Tree:
    stacks = {
        stack: {"layer": layers, "scaling": scaling[stack]} if stack in scaling else layers
        for stack, layers in params["stacks"].items()
    }
    return params | {"stacks": stacks}
