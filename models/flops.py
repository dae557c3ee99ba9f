"""Counts model FLOPs, the numerator of model FLOPs utilization (MFU), from the trace of a model.

Convention (PaLM, arXiv:2204.02311, appendix B, but with causal attention at half): a multiply-add
is 2 FLOPs. Only matrix products count. The backward pass costs twice the forward pass.
Recomputation does not count. Causal attention counts only the half of its products that is not
masked. Embedding lookups are free. The head counts the vocab without padding.

A model states nothing: its parts are traced with the shapes of a batch, one block of each stack.
Only a layer whose trace is not its work declares it, as attention does; see `declare_flops` in
models/layers/flops.py.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from models.functions import ModelFunctions, one_layer
from models.layers.flops import model_flops

Tree = Any


def train_flops(
    functions: ModelFunctions, params: Tree, batch: dict[str, Any], *, has_adapters: bool = False
) -> int:
    """Return the FLOPs of a batch, forward and backward. A teacher has no backward pass.

    Args:
        functions: model's functions.
        params: its parameters; ShapeDtypeStructs suffice.
        batch: whole batch, as the model receives it; ShapeDtypeStructs suffice.
        has_adapters: whether only adapters are trained. Then the gradients of kernels, half of the
            backward pass, do not count; nor do the adapters.
    """
    parts = functions.split(params)
    non_stack = parts["non_stack"]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    stacks = model_flops(functions.embed, non_stack, batch)
    x = None
    for name, (before, x) in functions.activation_types(non_stack, batch).items():
        if name in functions.before:
            stacks += model_flops(functions.before[name], non_stack, before, batch)
        layer = one_layer(parts["stacks"][name])
        block = model_flops(functions.blocks[name], layer, x, batch, number)
        stacks += functions.num_layers[name] * block
    head_batch = functions.with_teacher_output_types(non_stack, x, batch)
    head = model_flops(functions.head, non_stack, x, head_batch)
    student = (2 if has_adapters else 3) * (stacks + head)
    if functions.teach is None:
        return student
    return student + stacks + model_flops(functions.teach, non_stack, x, batch)


def num_tokens(shapes: Mapping[str, Any]) -> int:
    """Return the number of tokens in a batch that a model processes, including padding."""
    return sum(leaf.size for name, leaf in shapes.items() if name.endswith("tokens"))
