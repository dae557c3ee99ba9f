"""Losses over a vocabulary that never materialize the logits of the whole batch.

The loss is computed in chunks of tokens. The logits, loss and gradients of each chunk are computed
before the next chunk begins:

    x [N, D]  ->  chunks [C, D]  ->  logits [C, V]  ->  losses [C]  ->  one sum

N tokens, C tokens in a chunk, D embed, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from models.layers.activations import soft_capped
from models.layers.flops import declare_flops, dense_flops
from sharding import hardware
from sharding.logical import constrain, constrain_branch, manual_axes, max_over, offset, sum_over
from untrusted.imports import import_object

TokenLoss = Callable[[jax.Array, jax.Array], jax.Array]


def cross_entropy(logits_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """Return -log softmax(logits)[target] for every token, in nats.

    The target's logit is selected by comparison, not by indexing. If the vocab dim is split over
    the mesh, devices then exchange one scalar per token instead of all logits.

    Args:
        logits_CV: float[C, V]; if the vocab is manual in a `shard_map`, this device's part of it.
        targets_C: int32[C], in the whole vocab.

    Returns:
        Losses [C], in the dtype of the logits.
    """
    size = logits_CV.shape[1]
    vocab = offset("vocab", size) + jnp.arange(size, dtype=targets_C.dtype)
    is_target = vocab[None, :] == targets_C[:, None]
    target_logit = jnp.sum(jnp.where(is_target, logits_CV, 0), axis=1)
    largest = max_over("vocab", jnp.max(logits_CV, axis=1))
    total = sum_over("vocab", jnp.sum(jnp.exp(logits_CV - largest[:, None]), axis=1))
    return jnp.log(total) + largest - sum_over("vocab", target_logit)


def make_token_loss(name: str) -> TokenLoss:
    """Return the per-token loss function with a given name.

    Args:
        name: "cross_entropy", or the import path "package.module:function" of a function from
            (logits float[C, V], targets int32[C]) to losses float[C].

    Raises:
        ValueError: if the path does not lead to a function.
    """
    if name == "cross_entropy":
        return cross_entropy
    loss = import_object(name, "model.loss", ["cross_entropy"])
    if not callable(loss):
        raise ValueError(
            f"model.loss={name!r} is not a function; it must be (logits, targets) -> losses"
        )
    return cast(TokenLoss, loss)


def chunked_vocab_loss(
    x_ND: jax.Array,
    table_VD: jax.Array,
    targets_N: jax.Array,
    weights_N: jax.Array,
    *,
    vocab_size: int,
    bias_V: jax.Array | None = None,
    softcap: float | None = None,
    token_loss: TokenLoss = cross_entropy,
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Return the weighted sum of token losses for logits `x · tableᵀ + bias`, float32 or wider.

    Logits exist only for one chunk of tokens at a time, in float32. If gradients are needed, the
    forward pass computes them along with each chunk's loss. This is possible because the loss is a
    scalar: the backward pass only has to scale the gradients by its cotangent. So no logit is
    computed twice.

    Args:
        x_ND: activations.
        table_VD: output embedding, in the dtype of `x_ND`. Rows from `vocab_size` on are padding
            and get no probability. If the pipeline stages share the vocab, this stage's rows.
        targets_N: int32, in [0, vocab_size).
        weights_N: float32; tokens with weight 0 are ignored. Weights receive no gradient.
        vocab_size: number of entries of the vocab, without padding.
        bias_V: added to the logits; this stage's part of it if the table is a part.
        softcap: as for `soft_capped`, of the logits.
        token_loss: function (logits float[C, V], targets int32[C]) -> losses float[C].
        chunk_tokens: number of tokens whose logits exist at the same time. None chooses it by
            platform. Chunks are smaller on a CPU, where new memory is expensive, than on an
            accelerator, where adding each chunk's gradient to the table's gradient is expensive.

    Raises:
        ValueError: if the stages share the vocab, but `token_loss` needs all of it.

    Source: the fused linear cross-entropy of Liger Kernel, Hsu et al. 2024 (arXiv:2410.10989), 3.2.
    """
    if token_loss is not cross_entropy and manual_axes("vocab"):
        raise ValueError(
            f"pipeline.share_vocab=True splits the vocab, and the loss {token_loss.__name__!r} "
            "needs the whole of it; set pipeline.share_vocab=False, or model.loss=cross_entropy"
        )
    chunks = _cutter(x_ND.shape[0], chunk_tokens)
    return declare_flops(
        dense_flops(*x_ND.shape, vocab_size),
        functools.partial(_sum_over_chunks, (vocab_size, softcap, token_loss)),
        chunks(x_ND),
        (table_VD, bias_V),
        chunks(targets_N),
        chunks(weights_N),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabLogits:
    """Logits over the vocab, `soft_capped(x · tableᵀ + bias)`, as the factors that they have.

    Attributes:
        x_BTD: activations.
        table_VD: as for `chunked_vocab_loss`.
        vocab_size: as for `chunked_vocab_loss`.
        bias_V: as for `chunked_vocab_loss`.
        softcap: as for `chunked_vocab_loss`.
    """

    x_BTD: jax.Array
    table_VD: jax.Array
    bias_V: jax.Array | None = None
    _: dataclasses.KW_ONLY
    vocab_size: int = dataclasses.field(metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})

    def whole(self) -> jax.Array:
        """Return the logits without the padding of the vocab, float32[B, T, V] or wider."""
        # Without the padding of the table, each call would copy it.
        logits = self._products()[..., : self.vocab_size]
        if self.bias_V is not None:
            logits = logits + self.bias_V[None, None, : self.vocab_size]
        return soft_capped(logits, self.softcap)

    def predictions(self) -> jax.Array:
        """Return the token with the largest logit, int32[B, T]; a model's `head` may call it.

        A head must not call `whole`: a pipeline stage runs it alone, and to slice the logits, which
        `mesh.model` splits, it would wait for the other stages.
        """
        logits = self._products()
        if self.bias_V is not None:
            logits = logits + self.bias_V
        is_token_V = jnp.arange(logits.shape[-1]) < self.vocab_size
        return jnp.where(is_token_V, logits, -jnp.inf).argmax(-1).astype(jnp.int32)

    def _products(self) -> jax.Array:
        """Return x · tableᵀ with the padding of the vocab, float32[B, T, V] or wider."""
        wide = jnp.promote_types(self.x_BTD.dtype, jnp.float32)
        return jnp.einsum("BTD,VD->BTV", self.x_BTD, self.table_VD, preferred_element_type=wide)

    def loss(
        self, targets_BT: jax.Array, weights_BT: jax.Array, token_loss: TokenLoss = cross_entropy
    ) -> jax.Array:
        """Return the weighted sum of token losses; see `chunked_vocab_loss`."""
        return chunked_vocab_loss(
            self.x_BTD.reshape(targets_BT.size, -1),
            self.table_VD,
            targets_BT.reshape(-1),
            weights_BT.reshape(-1),
            vocab_size=self.vocab_size,
            bias_V=self.bias_V,
            softcap=self.softcap,
            token_loss=token_loss,
        )

    def token_losses(self, targets_BT: jax.Array) -> jax.Array:
        """Return the cross-entropy of every token, float32[B, T] or wider. It has no gradient."""
        table_VD, x_BTD = jax.lax.stop_gradient((self.table_VD, self.x_BTD))

        def losses(_, chunk):
            x_CD, targets_C = chunk
            logits_CV = soft_capped(_logits(x_CD, (table_VD, self.bias_V)), self.softcap)
            return None, cross_entropy(_without_padding(logits_CV, self.vocab_size), targets_C)

        chunks = _cutter(targets_BT.size, None)
        each = (chunks(x_BTD.reshape(targets_BT.size, -1)), chunks(targets_BT.reshape(-1)))
        losses_N = jax.lax.scan(losses, None, each)[1].reshape(-1)
        return losses_N[: targets_BT.size].reshape(targets_BT.shape)


def _cutter(num_tokens: int, chunk_tokens: int | None) -> Callable[[jax.Array], jax.Array]:
    """Return a function that cuts [N, ...] into chunks [N / C, C, ...], with zeros as padding."""
    if chunk_tokens is None:
        chunk_tokens = 512 if hardware.current().runs_on_cpu else 1024
    # Chunks of equal size, with as few chunks and as little padding as possible.
    num_chunks = -(-num_tokens // chunk_tokens)
    size = -(-num_tokens // num_chunks)
    pad = num_chunks * size - num_tokens

    def chunks(a):
        a = jnp.pad(a, ((0, pad), *[(0, 0)] * (a.ndim - 1))) if pad else a
        return a.reshape(num_chunks, size, *a.shape[1:])

    return chunks


def _logits(x_CD, output):
    table_VD, bias_V = output
    wide = jnp.promote_types(x_CD.dtype, jnp.float32)
    logits_CV = jnp.einsum("CD,VD->CV", x_CD, table_VD, preferred_element_type=wide)
    if bias_V is not None:
        logits_CV += bias_V[None]
    return constrain_branch(logits_CV, None, "vocab")


def _without_padding(logits_CV, vocab_size):
    """Give no probability to logits beyond the vocab."""
    size = logits_CV.shape[1]
    if manual_axes("vocab") or vocab_size < size:
        is_token = offset("vocab", size) + jnp.arange(size) < vocab_size
        logits_CV = jnp.where(is_token[None, :], logits_CV, jnp.finfo(logits_CV.dtype).min)
    return logits_CV


def _logits_loss(spec, logits_CV, targets_C, weights_C):
    vocab_size, softcap, token_loss = spec
    logits_CV = _without_padding(soft_capped(logits_CV, softcap), vocab_size)
    losses_C = token_loss(logits_CV, targets_C)
    return jnp.sum(losses_C * weights_C.astype(logits_CV.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_chunks(spec, x, output, targets, weights):
    def add(total, chunk):
        x_CD, targets_C, weights_C = chunk
        return total + _logits_loss(spec, _logits(x_CD, output), targets_C, weights_C), None

    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.scan(add, jnp.zeros((), wide), (x, targets, weights))[0]


def _chunked_forward(spec, x, output, targets, weights):
    # The forward pass of the custom VJP: computes the gradients in the same scan as the loss, and
    # returns them as residuals. Gradients of the table and the bias are summed in `wide`.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    table_VD, _ = output

    def add(carry, chunk):
        total, (table_grad_VD, bias_grad_V) = carry
        x_CD, targets_C, weights_C = chunk
        value, grad_CV = jax.value_and_grad(_logits_loss, argnums=1)(
            spec, _logits(x_CD, output), targets_C, weights_C
        )
        if bias_grad_V is not None:
            bias_grad_V += jnp.sum(grad_CV, axis=0)
        # Rounded before the products: a product with one wide factor would not use tensor cores.
        # Its sum is wide, so that it is added to the table's gradient without a pass of its own.
        grad_CV = constrain(grad_CV.astype(x.dtype), None, "vocab")
        x_grad_CD = jnp.einsum("CV,VD->CD", grad_CV, table_VD)
        table_grad_VD += jnp.einsum("CV,CD->VD", grad_CV, x_CD, preferred_element_type=wide)
        return (total + value, (table_grad_VD, bias_grad_V)), x_grad_CD

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide), output)
    (total, output_grad), x_grad = jax.lax.scan(
        add, (jnp.zeros((), wide), zeros), (x, targets, weights)
    )
    output_grad = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), output_grad, output)
    return total, (sum_over("vocab", x_grad), output_grad, weights)


def _chunked_backward(spec, residuals, cotangent):
    # The gradients exist already: scale them by the cotangent of the loss.
    x_grad, output_grad, weights = residuals

    def scale(grad):
        return (grad * cotangent).astype(grad.dtype)

    return scale(x_grad), jax.tree.map(scale, output_grad), None, jnp.zeros_like(weights)


_sum_over_chunks.defvjp(_chunked_forward, _chunked_backward)
