"""The two halves of a Transformer block: attention and the feed-forward network.

B batch, T query seq, S key seq, D embed, F mlp, N heads, K key-value heads, H head_dim.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.layers.activations import ACTIVATIONS
from models.layers.attention import attend
from models.layers.basic import Linear, param, recomputed
from models.layers.masks import Segments
from sharding.logical import (
    constrain,
    constrain_branch,
    gather_branch,
    gather_tokens,
    scatter_tokens,
)

Norm = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """Return `x`."""
    return x


class Attention(nnx.Module):
    """Multi-head self-attention or cross-attention.

    Args:
        embed_dim: D.
        num_heads: N.
        head_dim: H.
        num_kv_heads: K; N by default.
        use_bias: whether queries, keys and values have a bias.
        use_key_bias: whether keys have a bias; `use_bias` by default.
        use_out_bias: whether the output has a bias; `use_bias` by default.
        stddevs: standard deviations for initializing the kernels of (queries, keys and values,
            output).
        make_head_norms: returns norms for each head's (queries, keys); None for no norms.
        has_sinks: whether heads have sinks; see `models.layers.attention.attend`.
        rngs: random keys for the initialization.
    """

    same_input = ("q", "k", "v")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        use_bias: bool,
        use_key_bias: bool | None = None,
        use_out_bias: bool | None = None,
        stddevs: tuple[float, float, float],
        make_head_norms: Callable[[], tuple[nnx.Module, nnx.Module]] | None = None,
        has_sinks: bool = False,
        rngs: nnx.Rngs,
    ):
        embed = {"embed": embed_dim}
        heads = {"heads": num_heads, "head_dim": head_dim}
        kv_heads = {"kv_heads": num_kv_heads or num_heads, "head_dim": head_dim}
        options: dict[str, Any] = {"use_bias": use_bias, "rngs": rngs}
        of_keys: dict[str, Any] = {**options}
        if use_key_bias is not None:
            of_keys["use_bias"] = use_key_bias
        self.q = Linear(embed, heads, stddev=stddevs[0], **options)
        self.k = Linear(embed, kv_heads, stddev=stddevs[1], **of_keys)
        self.v = Linear(embed, kv_heads, stddev=stddevs[1], **options)
        of_out: dict[str, Any] = {**options}
        if use_out_bias is not None:
            of_out["use_bias"] = use_out_bias
        self.out = Linear(heads, embed, stddev=stddevs[2], **of_out)
        self.q_norm, self.k_norm = make_head_norms() if make_head_norms else (None, None)
        normal = jax.nn.initializers.normal(stddevs[0])
        self.sinks = param(normal, rngs, (num_heads,), ("heads",)) if has_sinks else None

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        source_BSD: jax.Array | None = None,
        rotate: Callable[[jax.Array], jax.Array] = identity,
        **mask_options: Any,
    ) -> jax.Array:
        """Apply attention, naming activations "qkv" and "attention_out" for rematerialization.

        Args:
            x_BTD: activations that queries are computed from.
            source_BSD: activations that keys and values are computed from; `x_BTD` by default.
            rotate: applied to queries and keys; see models/layers/rope.py.
            **mask_options: keyword arguments of `models.layers.attention.attend`.

        Returns:
            `[B, T, D]`.
        """
        whole_BTD = gather_tokens(x_BTD)
        whole_BSD = whole_BTD if source_BSD is None else gather_tokens(source_BSD)
        source_BSD = x_BTD if source_BSD is None else source_BSD
        q = self.q(whole_BTD, x_BTD)
        k = self.k(whole_BSD, source_BSD)
        v = self.v(whole_BSD, source_BSD)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q_BTNH = constrain_branch(rotate(q), "batch", "seq", "heads", "head_dim")
        k_BSKH, v_BSKH = (
            constrain_branch(x, "batch", "seq", "kv_heads", "head_dim") for x in (rotate(k), v)
        )
        qkv = (checkpoint_name(x, "qkv") for x in (q_BTNH, k_BSKH, v_BSKH))
        sinks_N = None if self.sinks is None else self.sinks[...]
        return projected(self.out, attend(*qkv, sinks_N=sinks_N, **mask_options))


class FusedQKVAttention(nnx.Module):
    """Causal multi-head self-attention, with one matrix for queries, keys and values.

    Args:
        sizes: D, N and H.
        stddevs: standard deviations for initializing the kernels of (qkv, out).
        rngs: random keys for the initialization.
    """

    def __init__(self, *sizes: int, stddevs: tuple[float, float], rngs: nnx.Rngs):
        embed = {"embed": sizes[0]}
        heads = {"heads": sizes[1], "head_dim": sizes[2]}
        self.qkv = Linear(embed, {"_qkv": 3, **heads}, stddev=stddevs[0], rngs=rngs)
        self.out = Linear(heads, embed, stddev=stddevs[1], rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, segments: Segments | None, scale: float | None = None
    ) -> jax.Array:
        """Apply attention, naming activations as `Attention` does; returns `[B, T, D]`.

        Args:
            x_BTD: activations.
            segments: as for `models.layers.attention.attend`.
            scale: factor of queries · keys; 1 / √H by default.
        """
        qkv = self.qkv(gather_tokens(x_BTD), x_BTD)
        qkv = constrain_branch(qkv, "batch", "seq", None, "heads", "head_dim")
        qkv = checkpoint_name(qkv, "qkv")
        q_BTNH = qkv[:, :, 0]
        k_BTNH = qkv[:, :, 1]
        v_BTNH = qkv[:, :, 2]
        options = {"is_causal": True, "segments": segments, "scale": scale}
        return projected(self.out, attend(q_BTNH, k_BTNH, v_BTNH, **options))


def projected(out: Linear, y_BTNH: jax.Array) -> jax.Array:
    """Return the output projection of attention, `[B, T, D]`."""
    out_BTD = out(constrain(y_BTNH, "batch", "seq", "heads", "head_dim"))
    return checkpoint_name(scatter_tokens(out_BTD), "attention_out")


class MLP(nnx.Module):
    """Two linear layers with an activation between them, optionally gated.

    Args:
        embed_dim: D.
        mlp_dim: F.
        activation: key of ACTIVATIONS.
        is_gated: multiplies the activation by a third linear layer (Shazeer 2020,
            arXiv:2002.05202).
        use_bias: whether the layers have a bias.
        stddevs: standard deviations for initializing the kernels of (up and gate, down).
        rngs: random keys for the initialization.
    """

    same_input = ("gate", "up")

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        activation: str,
        is_gated: bool = False,
        use_bias: bool,
        stddevs: tuple[float, float],
        rngs: nnx.Rngs,
    ):
        embed = {"embed": embed_dim}
        mlp = {"mlp": mlp_dim}
        options: dict[str, Any] = {"use_bias": use_bias, "rngs": rngs}
        self.gate = Linear(embed, mlp, stddev=stddevs[0], **options) if is_gated else None
        self.up = Linear(embed, mlp, stddev=stddevs[0], **options)
        self.down = Linear(mlp, embed, stddev=stddevs[1], **options)
        self.activation = activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the network to `x_BTD`; names the input of the activation "mlp"."""
        activation = ACTIVATIONS[self.activation]
        whole_BTD = gather_tokens(x_BTD)
        h_BTF = self._project(self.up, whole_BTD, x_BTD)
        if self.gate is None:
            activated_BTF = recomputed(activation, stores_gradient=True)(h_BTF)
            return self._projected(activated_BTF)
        gate_BTF = self._project(self.gate, whole_BTD, x_BTD)
        product_BTF = recomputed(lambda gate, h: activation(gate) * h)(gate_BTF, h_BTF)
        return self._projected(product_BTF)

    def _projected(self, h_BTF: jax.Array) -> jax.Array:
        return scatter_tokens(self.down(gather_branch(h_BTF, "batch", "seq", "mlp")))

    def _project(self, linear: Linear, whole_BTD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        h_BTF = constrain_branch(linear(whole_BTD, x_BTD), "batch", "seq", "mlp")
        return checkpoint_name(h_BTF, "mlp")


def across_tokens(layer: Linear, x_BTD: jax.Array) -> jax.Array:
    """Apply a linear layer to `x_BTD` along the tokens instead of the dims; returns `[B, T, D]`."""
    mixed_BTD = layer(gather_tokens(x_BTD).swapaxes(1, 2)).swapaxes(1, 2)
    return scatter_tokens(mixed_BTD)
