"""CLIP and SigLIP: an image encoder and a text encoder, whose outputs agree for pairs.

    images --image_encoder--pool--projection-->  image embeddings  --+
                                                                     +-- loss over all B × B pairs
    tokens --text_encoder---pool--projection-->  text embeddings  ---+

CLIP picks the right text of each image by a softmax, and the right image of each text. SigLIP
decides for each pair by itself, with a sigmoid, whether it is one. The two encoders are stacks that
run one after the other; their activations are a dict, `image` [B, P, D] and `text` [B, T, D].

The batch is as in models/vision/common.py, without labels, and with `tokens`, int32[B, T].

B batch of this device, S batch of all devices, P patches, T tokens, D embed, E embeddings.

Source: Radford et al. 2021 (arXiv:2103.00020), section 2; Zhai et al. 2023 (arXiv:2303.15343),
algorithm 1.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from models.field_checks import check_choices
from models.layers.basic import Linear, lookup, param, unit_length
from models.layers.block import PlainBlock, attention_of, mlp_of, norm_of
from models.stack import Stack, run_stacks
from models.text.common import (
    BlockConfig,
    check_heads_divide,
    learned_positions,
    padded_vocab,
    positions_by_index,
    text_batch,
)
from models.vision.common import (
    ImageInputConfig,
    PatchEmbedding,
    check_patch_size,
    resized_positions,
)
from sharding.logical import first_example, gather_batch

#: Values of `pool`, `text_pool` and `contrast`.
POOLS = ("class_token", "attention")
TEXT_POOLS = ("eos", "highest_id", "last")
CONTRASTS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig(BlockConfig, ImageInputConfig):
    """Sizes of the two encoders, and the loss. Fields without `text_` are the image encoder's."""

    patch_size: int  # pixels per side
    vocab_size: int  # number of tokens in the tokenizer's vocab
    max_positions: int  # longest text
    text_num_layers: int
    text_num_heads: int
    text_embed_dim: int
    text_mlp_dim: int
    projection_dim: int  # dim of the embeddings that are compared
    pool: str = "class_token"  # class_token | attention, SigLIP's: one query for all patches
    # token whose activations represent a text: eos | highest_id, the largest of the row, as in
    # CLIPs whose config.json has eos_token_id=2 | last, whatever it is; text is then not causal
    text_pool: str = "eos"
    eos_id: int | None = None  # for text_pool="eos": token that ends a text
    contrast: str = "softmax"  # softmax, CLIP's | sigmoid, SigLIP's
    initial_logit_scale: float = math.log(1 / 0.07)  # logarithm; SigLIP: log 10
    initial_logit_bias: float = -10.0  # for contrast="sigmoid"
    activation: str = "quick_gelu"
    vocab_multiple: int = 128  # the vocab is padded to a multiple of this

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        check_patch_size(self)
        check_choices(self, pool=POOLS, text_pool=TEXT_POOLS, contrast=CONTRASTS)
        check_heads_divide(self, prefix="text_")
        if self.pool == "attention" and self.projection_dim != self.embed_dim:
            raise ValueError(
                f"model.projection_dim={self.projection_dim} must be model.embed_dim="
                f"{self.embed_dim} with model.pool='attention', which has no projection of images"
            )
        if (self.eos_id is None) == (self.text_pool == "eos"):
            raise ValueError(
                f"model.eos_id={self.eos_id} must be set if and only if model.text_pool='eos', but "
                f"it is {self.text_pool!r}; set it to the tokenizer's end-of-text token, or choose "
                "another model.text_pool"
            )

    @property
    def is_causal(self) -> bool:
        """Whether a token of a text only sees those before it."""
        return self.text_pool != "last"

    def encoder(self, side: str) -> BlockConfig:
        """Return the sizes of the encoder of "image" or "text"."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(BlockConfig)}
        if side == "text":
            values |= {name: getattr(self, f"text_{name}", x) for name, x in values.items()}
        return BlockConfig(**values)


class _Block(PlainBlock):
    """A block of one of the encoders, which returns the activations of the other unchanged."""

    def __init__(self, config: ClipConfig, side: str, *, rngs: nnx.Rngs):
        is_causal = side == "text" and config.is_causal
        super().__init__(config.encoder(side), is_causal=is_causal, rngs=rngs)
        self.side = side

    def __call__(self, x: dict, batch: dict, keys: jax.Array | None) -> dict:
        batch = batch if self.side == "text" else {}  # segments are those of tokens
        return {**x, self.side: super().__call__(x[self.side], batch, keys)}


class AttentionPool(nnx.Module):
    """Attention of one learned query to all patches, and an MLP."""

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(config.init_stddev)
        self.probe = param(normal, rngs, (1, 1, config.embed_dim), (None, None, "embed"))
        self.attention = attention_of(config, rngs=rngs)
        self.norm = norm_of(config, rngs=rngs)
        self.mlp = mlp_of(config, rngs=rngs)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        """Return `[B, D]`."""
        probe_B1D = jnp.broadcast_to(self.probe[...], (len(x_BPD), *self.probe[...].shape[1:]))
        x_B1D = self.attention(probe_B1D, source_BSD=x_BPD, is_causal=False)
        return (x_B1D + self.mlp(self.norm(x_B1D)))[:, 0]


class Clip(nnx.Module):
    """An image encoder and a text encoder that learn from pairs."""

    Config = ClipConfig
    stacks = ("image_encoder", "text_encoder")
    objectives = ("image_text",)
    sees_whole_batch = True
    not_decayed = ("class_token", "position_embedding", "text_position_embedding", "probe")

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs):
        self.config = config
        stddev = config.init_stddev
        normal = jax.nn.initializers.normal(stddev)
        embed = config.embed_dim
        text_embed = config.text_embed_dim
        has_class_token = config.pool == "class_token"
        vocab = padded_vocab(config.vocab_size, config.vocab_multiple)
        positions = (config.image_size // config.patch_size) ** 2 + has_class_token

        def stack(side: str) -> Stack:
            layers = config.encoder(side).num_layers
            return Stack(lambda rngs: _Block(config, side, rngs=rngs), layers, rngs=rngs)

        def linear(inputs: int, use_bias: bool) -> Linear:
            outputs = {"_projection": config.projection_dim}
            return Linear({"embed": inputs}, outputs, stddev=stddev, use_bias=use_bias, rngs=rngs)

        def number(value: float) -> nnx.Param:
            return param(jax.nn.initializers.constant(value), rngs, (1,), (None,))

        self.patch_embedding = PatchEmbedding(
            config, config.patch_size, embed, use_bias=not has_class_token, rngs=rngs
        )
        self.class_token = (
            param(normal, rngs, (1, 1, embed), (None, None, "embed")) if has_class_token else None
        )
        self.position_embedding = param(normal, rngs, (positions, embed), (None, "embed"))
        self.first_norm = norm_of(config, rngs=rngs) if has_class_token else None
        self.image_encoder = stack("image")
        self.final_norm = norm_of(config, rngs=rngs)
        self.pool = None if has_class_token else AttentionPool(config, rngs=rngs)
        self.projection = linear(embed, False) if has_class_token else None
        shape = (config.max_positions, text_embed)
        self.token_embedding = param(normal, rngs, (vocab, text_embed), ("vocab", "embed"))
        self.text_position_embedding = param(normal, rngs, shape, (None, "embed"))
        self.text_encoder = stack("text")
        self.text_final_norm = norm_of(config.encoder("text"), rngs=rngs)
        self.text_projection = linear(text_embed, not has_class_token)
        self.logit_scale = number(config.initial_logit_scale)
        is_sigmoid = config.contrast == "sigmoid"
        self.logit_bias = number(config.initial_logit_bias) if is_sigmoid else None

    def embed(self, batch: dict) -> dict:
        """Return the activations of `images` and `tokens`."""
        patches = self.patch_embedding(batch["images"])
        size, rows, columns, embed = patches.shape
        table = self.position_embedding[...]
        num_first = 0 if self.class_token is None else 1
        image = patches.reshape(size, rows * columns, embed)
        image += resized_positions(table[num_first:], (rows, columns))
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...] + table[:1], (size, 1, embed))
            image = jnp.concatenate([first, image], axis=1)
        if self.first_norm is not None:
            image = self.first_norm(image)
        text = lookup(self.token_embedding[...], batch["tokens"])
        text += learned_positions(self.text_position_embedding[...], positions_by_index(batch))
        return {"image": image, "text": text}

    def embeddings(self, x: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Return the embeddings of images and texts, float32[B, E] each, of unit length."""
        if self.pool is None:
            image = self.final_norm(x["image"][:, 0])
        else:
            image = self.pool(self.final_norm(x["image"]))
        image = image if self.projection is None else self.projection(image)
        text_BTD = self.text_final_norm(x["text"])
        places_B = self._ends(batch["tokens"])
        text = jnp.take_along_axis(text_BTD, places_B[:, None, None], axis=1)[:, 0]
        return unit_length(image), unit_length(self.text_projection(text))

    def head(self, x: dict, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted losses, sum of weights, sums of metrics).

        The loss of a pair is the mean of two: of its image with all texts of the batch, and of its
        text with all images. `image_to_text_accuracy` is the share of images whose text has the
        largest logit among all texts, `text_to_image_accuracy` the reverse.
        """
        own = self.embeddings(x, batch)
        others = tuple(gather_batch(each, keeps_gradient=True) for each in own)
        is_used_S = gather_batch(batch["weights"]) > 0  # other rows only pad the batch
        weights_B = batch["weights"].astype(own[0].dtype)
        size = len(weights_B)
        own_B = first_example(size) + jnp.arange(size)
        losses_B = jnp.zeros(size, own[0].dtype)
        metrics = {"logit_scale": jnp.sum(weights_B) * self._scale(own[0].dtype)}
        names = ("image_to_text_accuracy", "text_to_image_accuracy")
        for name, queries_BE, keys_SE in zip(names, own, reversed(others), strict=True):
            logits_BS = jnp.where(is_used_S, self._logits(queries_BE, keys_SE), -jnp.inf)
            losses_B += self._pair_losses(logits_BS, own_B) / 2
            hits_B = jnp.argmax(logits_BS, axis=1) == own_B
            metrics[name] = jnp.sum(hits_B * weights_B)
        losses_B = jnp.where(weights_B > 0, losses_B, 0)
        return jnp.sum(losses_B * weights_B), jnp.sum(weights_B), metrics

    def __call__(
        self, tokens: jax.Array, images: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """Return the logits of all pairs, float32[images, texts].

        Args:
            tokens: int32[texts, T].
            images: `[images, H, W, C]`, uint8 or normalized.
            attention_mask: [texts, T], 0 for padding; None for no padding.

        Raises:
            ValueError: there is a mask, but the model's texts are not causal: it represents a text
                by the last token of a row, which is padding if the text is shorter.
        """
        if attention_mask is not None and not self.config.is_causal:
            raise ValueError(
                "attention_mask is given, but a model with text_pool='last' learns with padding "
                "that all tokens see; leave it out"
            )
        image_BE, text_BE = self.encode(tokens, images, attention_mask)
        return self._logits(image_BE, text_BE)

    def encode(
        self, tokens: jax.Array, images: jax.Array, attention_mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the embeddings of images and of texts; arguments as for `__call__`."""
        batch: dict[str, Any] = text_batch(
            tokens, attention_mask, vocab_size=self.config.vocab_size
        )
        if attention_mask is not None and not isinstance(attention_mask, Tracer):
            ends_B1 = self._ends(tokens)[:, None]
            if not jnp.all(jnp.take_along_axis(attention_mask, ends_B1, axis=1)):
                raise ValueError(
                    "attention_mask hides the token that represents a text, because padding before "
                    "the text is the same token; pad on the right, or with another token"
                )
        batch["images"] = images
        return self.embeddings(run_stacks(self, self.embed(batch), batch), batch)

    def _ends(self, tokens_BT: jax.Array) -> jax.Array:
        """Return int32[B], the position of the token that represents each text."""
        if self.config.text_pool == "last":
            return jnp.full(len(tokens_BT), tokens_BT.shape[1] - 1, jnp.int32)
        if self.config.text_pool == "eos":
            tokens_BT = (tokens_BT == self.config.eos_id).astype(jnp.int32)
        return jnp.argmax(tokens_BT, axis=1)  # the first one of several

    def _scale(self, dtype: Any) -> jax.Array:
        return jnp.exp(self.logit_scale[...].astype(dtype))[0]

    def _logits(self, queries_BE: jax.Array, keys_SE: jax.Array) -> jax.Array:
        logits_BS = queries_BE @ keys_SE.T * self._scale(queries_BE.dtype)
        bias = self.logit_bias
        return logits_BS if bias is None else logits_BS + bias[...].astype(logits_BS.dtype)

    def _pair_losses(self, logits_BS: jax.Array, own_B: jax.Array) -> jax.Array:
        """Return the losses of each row; logits of -inf do not count."""
        if self.config.contrast == "softmax":
            log_shares_BS = jax.nn.log_softmax(logits_BS)
            return -jnp.take_along_axis(log_shares_BS, own_B[:, None], axis=1)[:, 0]
        is_own_BS = own_B[:, None] == jnp.arange(logits_BS.shape[1])
        # For other pairs: -log(1 - sigmoid(x)) = -log_sigmoid(-x), which is 0 for -inf.
        return -jnp.sum(jax.nn.log_sigmoid(jnp.where(is_own_BS, logits_BS, -logits_BS)), axis=1)
