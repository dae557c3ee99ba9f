"""Low-rank adapters of linear layers and experts: LoRA, rank-stabilized LoRA and DoRA.

    LoRA    y = x·W + scale · x·A·B
    DoRA    y = (x·W + scale · x·A·B) · m / ‖W + scale · A·B‖

W is the layer's kernel, and only A, B and m are trained. The norm is over the inputs, for each
output; it has no gradient. Experts have plain LoRA, which models/layers/experts.py computes.

r is the rank of an adapter.

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; rank-stabilized: Kalajdzievski 2023
(arXiv:2312.03732), section 3; DoRA: Liu et al. 2024 (arXiv:2402.09353), sections 4.1 and 4.3.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fields.field import field
from fields.section import Section
from models.layers.dropout import dropout
from sharding.logical import gather_tokens

#: Number of the first adapter's dropout among the dropouts of a block (models/layers/dropout.py).
FIRST_SITE = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Section, section="lora"):
    """Adapters: low-rank matrices that are trained in place of the model. See docs/lora.md."""

    rank: int | None = field(None, "Rank of the adapters. None: train the model itself.", ge=1)
    alpha: float = field(
        16.0,
        "An adapter's output is multiplied by `alpha / rank`, or by `alpha / √rank` with "
        "`use_rslora`.",
        gt=0,
    )
    dropout: float = field(
        0.0, "Dropout of the adapters' inputs; for layers in stacks only.", ge=0, lt=1
    )
    targets: tuple = field(
        ("attention.*", "mlp.*"),
        "Linear layers, experts and routers that get an adapter: names, or the ends of names, in "
        "which `*` matches anything. `*`: all of them.",
        nonempty=True,
        splits=True,
        remedy="write for example ('attention.*',)",
    )
    also_trained: tuple = field(
        (),
        "Parameters that are trained besides the adapters: names, in which `*` matches anything, "
        "such as `classifier.*`.",
        nonempty=True,
        splits=True,
        remedy="write for example ('classifier.*',)",
    )
    use_rslora: bool = field(False, "Rank-stabilized LoRA.")
    use_dora: bool = field(False, "DoRA: the size of each output of a layer is trained as well.")

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        rank = self.rank or 1
        return self.alpha / (math.sqrt(rank) if self.use_rslora else rank)


class Lora(nnx.Module):
    """The adapter of one linear layer, or of that layer in all blocks of a stack.

    All experts of a layer have one such module too, with the experts as a second dim of layers.

    Args:
        kernel: W, `[*inputs, *outputs]`, or `[layers, *inputs, *outputs]` in a stack.
        axes: logical axes of `kernel`.
        num_inputs: number of dims that are inputs.
        keys: key[layers], key[layers, experts], or key[] outside of stacks.
        config: rank and variant.

    Attributes:
        a: A, `[*inputs, r]`, uniform between ± 1 / √(number of inputs).
        b: B, `[r, *outputs]`, zeros.
        magnitude: m, `[*outputs]`, the norm of W; None without DoRA.
        dropout_keys: key per example; None: no dropout.
        site: number of its dropout; see models/layers/dropout.py.
    """

    def __init__(
        self,
        kernel: jax.Array,
        axes: Sequence[str | None],
        num_inputs: int,
        *,
        keys: jax.Array,
        config: LoraConfig,
    ):
        assert config.rank is not None
        rank = config.rank
        num_layers = keys.ndim
        layers, shape = axes[:num_layers], kernel.shape[num_layers:]
        axes = axes[num_layers:]
        inputs, outputs = shape[:num_inputs], shape[num_inputs:]
        bound = 1.0 / math.sqrt(math.prod(inputs))

        def draw(key: jax.Array) -> jax.Array:
            a_shape = (*inputs, rank)
            return jax.random.uniform(key, a_shape, jnp.float32, minval=-bound, maxval=bound)

        for _ in range(num_layers):
            draw = jax.vmap(draw)
        sizes = kernel.shape[:num_layers]
        self.a = nnx.Param(draw(keys), out_sharding=(*layers, *axes[:num_inputs], None))
        b = jnp.zeros((*sizes, rank, *outputs), jnp.float32)
        self.b = nnx.Param(b, out_sharding=(*layers, None, *axes[num_inputs:]))
        self.magnitude = nnx.data(None)
        if config.use_dora:
            norm = norms(kernel, num_inputs, num_layers=num_layers).astype(jnp.float32)
            of_outputs = (*layers, *axes[num_inputs:])
            self.magnitude = nnx.Param(norm, out_sharding=of_outputs)
        self.scale = config.scale
        self.rate = config.dropout
        self.site = FIRST_SITE
        self.dropout_keys: jax.Array | None = nnx.data(None)

    def __call__(self, y: jax.Array, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return the output of the layer with its adapter, without bias.

        Args:
            y: x·W, `[n, *outputs]`, where n is the product of the dims of the batch.
            x: `[*batch, *inputs]`; its tokens may be split over the axes of `act_tokens`.
            kernel: W, `[*inputs, *outputs]`; the outputs may be merged, as in `y`.
        """
        a = self.a[...]
        num_inputs = a.ndim - 1
        b = self.b[...].reshape(a.shape[-1], *kernel.shape[num_inputs:])
        if self.dropout_keys is not None:
            x = self._dropped(x)
        batch = x.shape[: x.ndim - num_inputs]
        flat = x.reshape(len(y), *x.shape[len(batch) :])
        narrow = jnp.tensordot(flat, a, num_inputs).reshape(*batch, -1)
        narrow = gather_tokens(narrow) if len(batch) > 1 else narrow
        y = y + self.scale * jnp.tensordot(narrow.reshape(len(y), -1), b, 1)
        if self.magnitude is None:
            return y
        adapted = jax.lax.stop_gradient(kernel + self.scale * jnp.tensordot(a, b, 1))
        magnitude = self.magnitude[...].reshape(kernel.shape[num_inputs:])
        return y * (magnitude / norms(adapted, num_inputs)).astype(y.dtype)

    def _dropped(self, x: jax.Array) -> jax.Array:
        """Apply dropout to x, whose first dim is examples × anything."""
        keys: Any = self.dropout_keys
        if len(x) % len(keys):
            raise ValueError(
                f"lora.dropout={self.rate}: a layer with an adapter has {len(x)} inputs for "
                f"{len(keys)} examples, so its dropout cannot be drawn per example; set "
                "lora.dropout=0, or leave the layer out of lora.targets"
            )
        by_example = x.reshape(len(keys), -1, *x.shape[1:])
        return dropout(by_example, self.rate, keys, self.site).reshape(x.shape)


def norms(kernel: jax.Array, num_inputs: int, *, num_layers: int = 0) -> jax.Array:
    """Return the Euclidean norm over the inputs of a kernel, for each output.

    Args:
        kernel: `[*layers, *inputs, *outputs]`.
        num_inputs: number of dims that are inputs.
        num_layers: number of dims that are layers.

    Returns:
        `[*layers, *outputs]`, float32, or float64 if jax uses it.
    """
    wide = kernel.astype(jax.dtypes.canonicalize_dtype(jnp.float64))
    inputs = tuple(range(num_layers, num_layers + num_inputs))
    return jnp.sqrt(jnp.sum(jnp.square(wide), axis=inputs))


def use_dropout(block: nnx.Module, keys: jax.Array | None) -> None:
    """Make the adapters of a block draw their dropout.

    Args:
        block: block; it is changed.
        keys: key[B], one per example; None: no dropout.
    """
    adapters = [m for _, m in nnx.iter_modules(block) if isinstance(m, Lora) and m.rate]
    for number, adapter in enumerate(adapters):
        adapter.site = FIRST_SITE + number
        adapter.dropout_keys = keys
