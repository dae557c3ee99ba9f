"""Counts the FLOPs of a compiled step, with all iterations of loops."""

import jax

from predict.program.instruction import executions
from predict.program.instruction_work import product_flops
from predict.program.parse import parse_modules, text_of


def matmul_flops(compiled: jax.stages.Compiled) -> float | None:
    """Return the FLOPs of all matrix products and convolutions of one device in one step.

    Unlike XLA's own count, this includes every iteration of a loop. Every branch of a conditional
    counts as if it were always taken, so for a pipeline this is the work of stages that are never
    idle.
    `product_flops` defines which instructions count as products.

    Returns:
        The sum, or None if the trip count of a loop around a product is unknown.
    """
    return matmul_flops_in_text(text_of(compiled))


def matmul_flops_in_text(text: str) -> float | None:
    """Like `matmul_flops`, from a program's text."""
    total = 0.0
    for module in parse_modules(text):
        for product, loops in module.under_loops(lambda i: product_flops(i) is not None):
            count = executions(loops)
            if count is None:
                return None
            total += (product_flops(product) or 0) * count
    return total
