"""Losses over a vocabulary, without the logits of the whole batch.

N tokens, C tokens in a chunk, D embed, V vocab.
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from sharding import hardware
from sharding.logical import axes_by_hand, constrain, max_over, offset, sum_over

TokenLoss = Callable[[jax.Array, jax.Array], jax.Array]


def cross_entropy(logits_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """Returns -log softmax(logits)[target] of every token, in nats: the dtype of the logits, [C].

    The target's logit is picked by comparison, not by indexing: a vocab dim that is split over the
    mesh then needs one scalar per token from its neighbours instead of all logits.
    """
    size = logits_CV.shape[1]
    vocab = offset("vocab", size) + jnp.arange(size, dtype=targets_C.dtype)
    is_target = vocab[None, :] == targets_C[:, None]
    target_logit = jnp.sum(jnp.where(is_target, logits_CV, 0), axis=1)
    largest = max_over("vocab", jnp.max(logits_CV, axis=1))
    total = sum_over("vocab", jnp.sum(jnp.exp(logits_CV - largest[:, None]), axis=1))
    return jnp.log(total) + largest - sum_over("vocab", target_logit)


def make_token_loss(name: str) -> TokenLoss:
    """Returns the per-token loss that `name` stands for.

    Args:
      name: "cross_entropy", or an import path "package.module:function" of a function from
        (logits float[C, V], targets int32[C]) to losses float[C].

    Raises:
      ValueError: the path leads to no function.
    """
    if name == "cross_entropy":
        return cross_entropy
    try:
        loss: Any = pkgutil.resolve_name(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"model.loss={name!r} is neither 'cross_entropy' nor an import path "
            f"'package.module:function': {error}"
        ) from None
    if not callable(loss):
        raise ValueError(
            f"model.loss={name!r} is no function; it must be (logits, targets) -> losses"
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
    token_loss: TokenLoss = cross_entropy,
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Returns the weighted sum of token losses of logits `x · tableᵀ + bias`, float32 or wider.

    Logits exist for one chunk of tokens at a time, in float32. Where gradients are asked for, they
    are computed in the same pass: the sum is linear in its own cotangent, so the backward pass
    only scales them, and no logit is computed twice.

    Args:
      x_ND: activations.
      table_VD: output embedding, in the dtype of `x`; rows from `vocab_size` on are padding and
        get no probability. Where the pipeline's stages share it, the part of its rows that is here.
      targets_N: int32, in [0, vocab_size).
      weights_N: float32; 0 leaves a token out. No gradient flows into them.
      bias_V: added to the logits; a part of it where the table is one.
      chunk_tokens: tokens whose logits exist at once; None chooses by the hardware: on a CPU fresh
        memory is what costs, on an accelerator each chunk's addition to the table's gradient.

    Raises:
      ValueError: the stages share the vocab, and `token_loss` is not made for a part of it.

    Source: the fused linear cross-entropy of Liger Kernel, Hsu et al. 2024 (arXiv:2410.10989), 3.2.
    """
    if token_loss is not cross_entropy and axes_by_hand("vocab"):
        raise ValueError(
            f"pipeline.share_vocab=True splits the vocab, and the loss {token_loss.__name__!r} "
            "needs the whole of it; set pipeline.share_vocab=False, or model.loss=cross_entropy"
        )
    num_tokens = x_ND.shape[0]
    if chunk_tokens is None:
        chunk_tokens = 512 if hardware.current().runs_on_cpu else 1024
    num_chunks = -(-num_tokens // chunk_tokens)
    size = -(-num_tokens // num_chunks)
    pad = num_chunks * size - num_tokens

    def chunks(a):
        a = jnp.pad(a, ((0, pad), *[(0, 0)] * (a.ndim - 1))) if pad else a
        return a.reshape(num_chunks, size, *a.shape[1:])

    output = (table_VD, bias_V)
    return _chunked(
        (vocab_size, token_loss), chunks(x_ND), output, chunks(targets_N), chunks(weights_N)
    )


def _chunk_loss(spec, x_CD, output, targets_C, weights_C):
    (vocab_size, token_loss), (table_VD, bias_V) = spec, output
    wide = jnp.promote_types(x_CD.dtype, jnp.float32)
    logits_CV = jnp.einsum("CD,VD->CV", x_CD, table_VD, preferred_element_type=wide)
    if bias_V is not None:
        logits_CV += bias_V[None]
    logits_CV = constrain(logits_CV, None, "vocab")
    size = table_VD.shape[0]
    if axes_by_hand("vocab") or vocab_size < size:
        is_token = offset("vocab", size) + jnp.arange(size) < vocab_size
        logits_CV = jnp.where(is_token[None, :], logits_CV, jnp.finfo(wide).min)
    return jnp.sum(token_loss(logits_CV, targets_C) * weights_C.astype(wide))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(spec, x, output, targets, weights):
    def add(total, chunk):
        return total + _chunk_loss(spec, chunk[0], output, *chunk[1:]), None

    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.scan(add, jnp.zeros((), wide), (x, targets, weights))[0]


def _chunked_forward(spec, x, output, targets, weights):
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def add(carry, chunk):
        total, output_grad = carry
        value, (x_grad, grad) = jax.value_and_grad(_chunk_loss, argnums=(1, 2))(
            spec, chunk[0], output, *chunk[1:]
        )
        output_grad = jax.tree.map(lambda total, part: total + part.astype(wide), output_grad, grad)
        return (total + value, output_grad), x_grad

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide), output)
    (total, output_grad), x_grad = jax.lax.scan(
        add, (jnp.zeros((), wide), zeros), (x, targets, weights)
    )
    output_grad = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), output_grad, output)
    return total, (sum_over("vocab", x_grad), output_grad, targets, weights)


def _chunked_backward(spec, residuals, cotangent):
    x_grad, output_grad, targets, weights = residuals
    scale = lambda grad: (grad * cotangent).astype(grad.dtype)  # noqa: E731
    return scale(x_grad), jax.tree.map(scale, output_grad), None, jnp.zeros_like(weights)


_chunked.defvjp(_chunked_forward, _chunked_backward)
