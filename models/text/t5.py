"""T5: an encoder and a decoder with relative instead of absolute positions.

In a Switch Transformer, which is a T5 too, some layers have experts instead of an MLP.

For the encoder, a batch has `tokens` and `segment_ids` as in models/text/common.py. For the
decoder, it has `decoder_tokens` and `targets`, int32[B, T], `weights`, float32[B, T], and, if there
are `segment_ids`, also `decoder_segment_ids`: a decoder token only sees encoder tokens of its own
segment.

B batch, S seq of the encoder, T seq of the decoder, D embed, N heads, R buckets, V vocab.

Source: Raffel et al. 2019 (arXiv:1910.10683), section 2.1; version 1.1: Shazeer 2020
(arXiv:2002.05202); mT5: Xue et al. 2020 (arXiv:2010.11934), section 3.2; Switch Transformers: Fedus
et al. 2021 (arXiv:2101.03961), section 2.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.activations import check_activation
from models.layers.basic import RMSNorm, lookup, param
from models.layers.dropout import dropout
from models.layers.experts import Experts, ExpertsConfig
from models.layers.kv_cache import key_distances
from models.layers.masks import segments
from models.layers.relative_bias import RelativeBias
from models.layers.transformer import MLP, Attention
from models.losses import VocabLogits
from models.stack import Stack, Sums, run_stacks
from models.text.common import VocabConfig, check_token_ids, vocab_loss
from models.text.layer_types import stacks_of
from models.text.mixture import Mixture, added_report


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(VocabConfig, ExpertsConfig):
    """Sizes and regularization of a T5."""

    num_layers: int  # layers of the encoder
    num_decoder_layers: int
    num_heads: int
    head_dim: int
    embed_dim: int
    mlp_dim: int
    dropout: float = 0.0  # rate for embeddings, residual branches and outputs, in [0, 1)
    sparse_step: int = 2  # of so many layers of the encoder, the second has experts; 0: none has
    decoder_sparse_step: int = 2  # the same of the decoder
    activation: str = "relu"  # version 1.1: gelu_tanh
    is_gated: bool = False  # version 1.1: True
    tie_embeddings: bool = True  # whether the head uses the token embedding; version 1.1: False
    scale_outputs: bool = True  # by 1 / √D before the head; version 1.1: False
    num_buckets: int = 32  # buckets of relative positions
    max_distance: int = 128  # this distance and all larger ones share one bucket
    rms_norm_epsilon: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        if self.num_buckets % 4 or self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"model.num_buckets={self.num_buckets} must be a multiple of 4, and "
                f"model.max_distance={self.max_distance} more than half of it"
            )
        check_activation(self.activation)
        for name in ("sparse_step", "decoder_sparse_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be 0 or positive")
        self.check_experts("sparse_step", "decoder_sparse_step")

    @property
    def are_dense(self) -> tuple[bool, ...]:
        """Whether each layer, of the encoder and then of the decoder, has an MLP."""
        return (
            *self._dense(self.num_layers, self.sparse_step),
            *self._dense(self.num_decoder_layers, self.decoder_sparse_step),
        )

    def _dense(self, num_layers: int, step: int) -> tuple[bool, ...]:
        if self.num_experts is None or step == 0:
            return (True,) * num_layers
        return tuple(number % step != 1 % step for number in range(num_layers))


class Block(nnx.Module):
    """Self-attention, cross-attention if it is in the decoder, and an MLP: x + branch(norm(x)).

    Its activations are a dict: `encoder` [B, S, D], `decoder` [B, T, D], and the tables
    `encoder_bias` and `decoder_bias` [R, N], which all layers read and return unchanged. With
    experts and a loss, it has a `report` too; see models/text/mixture.py.
    """

    can_split_tokens = True
    can_split_sequence = True

    def __init__(self, config: T5Config, is_dense: bool, *, is_decoder: bool, rngs: nnx.Rngs):
        embed = config.embed_dim
        inner = config.num_heads * config.head_dim
        norm = {"epsilon": config.rms_norm_epsilon, "rngs": rngs}

        def attention() -> Attention:
            # Queries are initialized smaller by 1 / √H, because logits are not scaled by it.
            queries = (embed * config.head_dim) ** -0.5
            return Attention(
                embed,
                config.num_heads,
                config.head_dim,
                use_bias=False,
                stddevs=(queries, embed**-0.5, inner**-0.5),
                rngs=rngs,
            )

        self.attention_norm = RMSNorm(embed, **norm)
        self.attention = attention()
        self.cross_norm = RMSNorm(embed, **norm) if is_decoder else None
        self.cross_attention = attention() if is_decoder else None
        self.mlp_norm = RMSNorm(embed, **norm)
        mlp: dict[str, Any] = {"activation": config.activation, "is_gated": config.is_gated}
        mlp_dim = config.mlp_dim if is_dense else config.expert_dim or config.mlp_dim
        mlp |= {"stddevs": (embed**-0.5, mlp_dim**-0.5), "rngs": rngs}
        self.mlp = (
            MLP(embed, mlp_dim, use_bias=False, **mlp)
            if is_dense
            else Experts(config, embed_dim=embed, expert_dim=mlp_dim, **mlp)
        )
        self.config = config
        self.side = "decoder" if is_decoder else "encoder"

    def __call__(self, x: dict, batch: dict, keys: jax.Array | None) -> dict:
        """Apply the block to its side's entry of `x`; arguments as in models/stack.py."""
        config = self.config
        x_BTD = x[self.side]
        is_decoder = self.side == "decoder"
        table_RN = x[f"{self.side}_bias"]
        longest = config.max_distance
        bias: Any = RelativeBias(table_RN=table_RN, is_causal=is_decoder, max_distance=longest)
        if is_decoder and (distances_BTS := key_distances()) is not None:
            bias = bias.at(distances_BTS)
        ids = segments(batch, "decoder_segment_ids" if is_decoder else "segment_ids")
        branch = self.attention(
            self.attention_norm(x_BTD),
            is_causal=is_decoder,
            segments=ids,
            bias=bias,
            scale=1.0,
        )
        x_BTD += dropout(branch, config.dropout, keys, site=0)
        if self.cross_attention is not None and self.cross_norm is not None:
            branch = self.cross_attention(
                self.cross_norm(x_BTD),
                source_BSD=x["encoder"],
                is_causal=False,
                segments=None if ids is None else (ids[0], batch["segment_ids"]),
                scale=1.0,
            )
            x_BTD += dropout(branch, config.dropout, keys, site=1)
        x_BTD += dropout(self.mlp(self.mlp_norm(x_BTD)), config.dropout, keys, site=2)
        if "report" not in x or not isinstance(self.mlp, Experts):
            return {**x, self.side: x_BTD}
        is_token_BT = jnp.ones(x_BTD.shape[:2]) if ids is None else ids[0] != 0
        report_BR = added_report(x["report"], config, self.mlp, is_token_BT, batch)
        return {**x, self.side: x_BTD, "report": report_BR}


class T5(Mixture):
    """A sequence-to-sequence model."""

    Config = T5Config
    stacks = ("encoder", "last_encoder", "decoder", "last_decoder")
    not_decayed = ("router_bias", "gate_bias", "up_bias", "down_bias")
    can_share_vocab = True
    can_split_sequence = True
    objectives = ("span_corruption", "seq2seq")

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        normal = jax.nn.initializers.normal
        bias = (config.num_buckets, config.num_heads)
        self.token_embedding = config.make_table(config.embed_dim, 1.0, rngs)
        stddev = config.embed_dim**-0.5
        self.encoder_bias = param(normal(stddev), rngs, bias, (None, "heads"))
        self.decoder_bias = param(normal(stddev), rngs, bias, (None, "heads"))

        def stacks(num_layers: int, is_decoder: bool) -> tuple[Stack, Stack | None]:
            are_dense = config.are_dense[-num_layers:] if is_decoder else config.are_dense
            make = partial(Block, config, is_decoder=is_decoder)
            return stacks_of(are_dense[:num_layers], make, rngs=rngs)

        norm = {"epsilon": config.rms_norm_epsilon, "rngs": rngs}
        self.encoder, self.last_encoder = stacks(config.num_layers, False)
        self.encoder_norm = RMSNorm(config.embed_dim, **norm)
        self.decoder, self.last_decoder = stacks(config.num_decoder_layers, True)
        self.decoder_norm = RMSNorm(config.embed_dim, **norm)
        tied = config.tie_embeddings
        # A tied table is scaled down before the head instead of at initialization.
        self.output_embedding = None if tied else config.make_table(config.embed_dim, stddev, rngs)

    def embed(self, batch: dict) -> dict:
        """Return the activations of `Block` for `tokens` and `decoder_tokens`."""
        keys = batch.get("dropout_keys")
        rate = self.config.dropout
        x = {"encoder_bias": self.encoder_bias[...], "decoder_bias": self.decoder_bias[...]}
        for site, (side, name) in enumerate((("encoder", "tokens"), ("decoder", "decoder_tokens"))):
            x[side] = dropout(lookup(self.token_embedding[...], batch[name]), rate, keys, site=site)
        return x | self.first_report(x["encoder"], batch)

    def before_decoder(self, x: dict, batch: dict) -> dict:
        """Apply the final norm and dropout to the encoder's output."""
        keys = batch.get("dropout_keys")
        output = dropout(self.encoder_norm(x["encoder"]), self.config.dropout, keys, site=2)
        return {**x, "encoder": output}

    def head(self, x: dict, batch: dict) -> tuple[Sums, Sums, dict]:
        """Return (sums of weighted losses, sums of weights, metrics of the routers)."""
        loss, weight = vocab_loss(self._logits(x, batch), batch, self.config.loss)
        return self.summed({"lm_loss": loss}, weight, x.get("report"), batch)

    def __call__(
        self,
        tokens: jax.Array,
        decoder_tokens: jax.Array,
        attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits, float32[B, T, V], V without padding.

        Args:
            tokens: int32[B, S], tokens of the encoder.
            decoder_tokens: int32[B, T], which begin with the start token; T5 uses padding for it.
            attention_mask: [B, S], 0 for padding; None for no padding.
            decoder_attention_mask: [B, T], 0 for padding; None for no padding.
        """
        for ids in (tokens, decoder_tokens):
            check_token_ids(ids, self.config.vocab_size)
        batch = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        if attention_mask is not None or decoder_attention_mask is not None:
            for name, ids, mask in (
                ("segment_ids", tokens, attention_mask),
                ("decoder_segment_ids", decoder_tokens, decoder_attention_mask),
            ):
                batch[name] = (jnp.ones_like(ids) if mask is None else mask).astype(jnp.int32)
        return self.logits(run_stacks(self, self.embed(batch), batch))

    def logits(self, x: dict) -> jax.Array:
        """Return logits float32[B, T, V] for the activations after the last block."""
        return self._logits(x, {}).whole()

    def _logits(self, x: dict, batch: dict) -> VocabLogits:
        config = self.config
        table = self.token_embedding if self.output_embedding is None else self.output_embedding
        scale = config.embed_dim**-0.5 if config.scale_outputs else 1.0
        x_BTD = self.decoder_norm(x["decoder"]) * scale
        x_BTD = dropout(x_BTD, config.dropout, batch.get("dropout_keys"), site=3)
        return VocabLogits(x_BTD, table[...], vocab_size=config.vocab_size)
