"""One device's chunks: stacks one after another, each made ready for where it begins.

A model has one stack or several, such as an encoder and a decoder. A chunk has layers of any of
them, in their order; `before[stack]` runs ahead of a stack's first layer, wherever that lies.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from sharding.estimate import counted_as
from sharding.logical import runs_alone
from sharding.pipeline.layers import Layers
from sharding.pipeline.trees import add, read, write, zeros

Tree = Any
Kept = dict[str, dict]


class Chunks:
    """What runs between embedding and head.

    Args:
      layers: of every stack.
      before: stack -> `before(ends, x, microbatch) -> x`.
      begins: stack -> bool[chunks], whether its first layer lies there.
      ends: parameters outside the stacks.
      x: what travels from chunk to chunk: arrays or ShapeDtypeStructs.
    """

    def __init__(
        self,
        layers: Mapping[str, Layers],
        before: Mapping[str, Callable[[Tree, Tree, Tree], Tree]],
        begins: Mapping[str, jax.Array],
        ends: Tree,
        x: Tree,
        *,
        splits: bool,
    ):
        self._layers, self._begins = dict(layers), begins
        self._before = {name: _alone(name, function) for name, function in before.items()}
        self._ends, self._x, self._splits = ends, x, splits

    def no_gradients(self) -> dict[str, Tree]:
        """Returns, per stack, zeros of its layers' gradients on this device."""
        return {name: layers.no_gradients() for name, layers in self._layers.items()}

    def kept(self, depths: Mapping[str, int]) -> Kept:
        """Returns empty buffers of these depths for what the backward reads."""
        kept: Kept = {name: dict(layers.buffers(depths)) for name, layers in self._layers.items()}
        for name in self._before if "saved" in depths else ():
            kept[name]["before"] = zeros(self._x, depths["saved"])
        return counted_as("activations", kept)

    def evaluate(self, chunk: jax.Array, x: Tree, microbatch: Tree) -> Tree:
        """Returns x after the chunk; nothing is kept."""
        for name, layers in self._layers.items():
            x = self._made_ready(name, chunk, x, microbatch)
            x = layers.evaluate(chunk, x, microbatch)
        return x

    def forward(self, chunk, x: Tree, microbatch: Tree, kept: Kept, slots) -> tuple[Tree, Kept]:
        """Returns x after the chunk, and the buffers with what its backward reads."""
        kept = dict(kept)
        for name, layers in self._layers.items():
            if name in self._before:
                inputs = write(kept[name]["before"], slots["saved"], x)
                kept[name] = kept[name] | {"before": inputs}
            x = self._made_ready(name, chunk, x, microbatch)
            x, buffers = layers.forward(chunk, x, microbatch, kept[name], slots)
            kept[name] = kept[name] | buffers
        return x, kept

    def backward(
        self, chunk, dx: Tree, microbatch: Tree, kept: Kept, slots, grads: dict[str, Tree]
    ) -> tuple[Tree, dict[str, Tree], Kept]:
        """Returns the gradient of what went in, `grads` with those of the parameters added, kept.

        Where backwards are split, this is the first half, and what the second reads is in `kept`.
        """
        kept, ends, of_layers = dict(kept), grads["ends"], dict(grads["layers"])
        for name, layers in reversed(self._layers.items()):
            args = (chunk, dx, microbatch, kept[name], slots, of_layers[name])
            if self._splits:
                dx, of_layers[name], handed = layers.input_gradient(*args)
                kept[name] = kept[name] | {"handed": handed}
            else:
                dx, of_layers[name] = layers.backward(*args)
            if name in self._before:
                x = read(kept[name]["before"], slots["saved"])
                ends, dx = self._through_before(name, chunk, x, dx, microbatch, ends)
        return dx, {"ends": ends, "layers": of_layers}, kept

    def weight_gradient(
        self, chunk, microbatch: Tree, kept: Kept, slots, grads: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Returns `grads` with what the first half of the backward left out added."""
        of_layers = dict(grads["layers"])
        for name, layers in self._layers.items():
            args = (chunk, microbatch, kept[name], slots, of_layers[name])
            of_layers[name] = layers.weight_gradient(*args)
        return grads | {"layers": of_layers}

    def _made_ready(self, name: str, chunk, x: Tree, microbatch: Tree) -> Tree:
        if name not in self._before:
            return x
        return jax.lax.cond(
            self._begins[name][chunk],
            lambda: self._before[name](self._ends, x, microbatch),
            lambda: x,
        )

    def _through_before(self, name: str, chunk, x: Tree, dx: Tree, microbatch: Tree, ends: Tree):
        def through():
            before = self._before[name]
            _, vjp = jax.vjp(lambda ends, x: before(ends, x, microbatch), self._ends, x)
            gradient, dx_before = vjp(dx)
            return add(ends, gradient), dx_before

        return jax.lax.cond(self._begins[name][chunk], through, lambda: (ends, dx))


def _alone(stack: str, before: Callable[[Tree, Tree, Tree], Tree]) -> Callable:
    """Returns `before`, which the stage runs where the stack begins, and no other."""

    def run(ends: Tree, x: Tree, microbatch: Tree) -> Tree:
        with runs_alone(f"before_{stack}"):
            return before(ends, x, microbatch)

    return run
