"""A language model as two pure functions: a pass over prompts, and a pass over the next tokens.

    prompts ──> prefill ──> logits of the next token, KV caches
                                    │
    tokens, KV caches ──> decode ──> logits after each token, KV caches   (repeated)

Both call the same blocks as training, and share the KV caches of models/layers/kv_cache.py. The
layers are not in a loop here: a loop would copy the parameters of each layer, and its caches, for
each token.

A causal model continues its prompt. The decoder of a sequence-to-sequence model continues a start
token, and its cross-attention reads the prompt; only the decoder has caches.

B batch, T prompt seq, or the next tokens, V vocab.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.functions import functions_of
from models.layers import kv_cache
from models.layers.kv_cache import KVCache

Tree = Any
Batch = dict[str, jax.Array]
Caches = tuple[KVCache, ...]


def unchanged(params: Tree) -> Tree:
    """Return `params`."""
    return params


def decoder_of(model: Any, start_token: int | None = None) -> "Decoder":
    """Return the functions of a model that generate text.

    Args:
        model: model, which may be abstract.
        start_token: id of the token that the decoder of a sequence-to-sequence model begins with.

    Raises:
        ValueError: the model does not predict the next token, has no start token but needs one, or
            the frequencies of its rotary embeddings depend on the length of a text.
    """
    objectives = getattr(model, "objectives", ())
    if "seq2seq" not in objectives:
        return Decoder(model)
    vocab_size = model.config.vocab_size
    if start_token is None or not 0 <= start_token < vocab_size:
        raise ValueError(
            f"the decoder of a {type(model).__name__} begins with a start token, whose id must be "
            f"in 0..{vocab_size - 1}, not {start_token}; put decoder_start_token_id into the "
            "model's generation_config.json"
        )
    return Seq2SeqDecoder(model, start_token)


class Decoder:
    """The functions of a causal language model; see `decoder_of`.

    Attributes:
        max_positions: most tokens of a prompt and its continuation; None: any number.
        follows_prompt: whether a continuation follows its prompt, and is not an answer to it.
    """

    follows_prompt = True
    _objective = "causal_lm"

    def __init__(self, model: Any):
        self._functions = functions_of(model, remat=None)
        self._separate = jax.jit(self._separate_prepared, static_argnums=0)
        skipped = getattr(model, "loss_stacks", ())
        self._stack_names = [name for name in self._functions.num_layers if name not in skipped]
        objectives = getattr(model, "objectives", ())
        if self._functions.logits is None or self._objective not in objectives:
            raise ValueError(
                f"{type(model).__name__} cannot generate text: it has no method `logits`, or "
                "neither causal_lm nor seq2seq is among its objectives"
            )
        self.max_positions: int | None = getattr(model.config, "max_positions", None)
        scaling = getattr(model.config, "rope_scaling", None) or {}
        if scaling.get("rope_type") == "longrope":
            raise ValueError(
                "model.rope_scaling: with rope_type='longrope', the frequencies depend on the "
                "length of the text, which changes while it is generated; export the model and "
                "generate with transformers or vLLM"
            )

    def params_of(self, model: Any) -> dict[str, Tree]:
        """Return copies of the parameters of the model, as both passes take them."""
        return self.separated(nnx.to_pure_dict(nnx.split(model)[1]))

    def separated(
        self, params: Tree, prepare: Callable[[Tree], Tree] = unchanged
    ) -> dict[str, Tree]:
        """Return copies of parameters, as both passes take them.

        Args:
            params: arrays that `prepare` turns into the parameters of the model.
            prepare: function of them; a program is compiled for each function.
        """
        return self._separate(prepare, params)

    def _separate_prepared(self, prepare: Callable[[Tree], Tree], params: Tree) -> dict[str, Tree]:
        return self.separate(prepare(params))

    def split(self, params: Tree) -> dict[str, Tree]:
        """Separate the parameters of the stacks from all others, in a tree like the model's."""
        return self._functions.split(params)

    def separate(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Split the stacked parameters into separate arrays for each layer."""
        parts = self.split(params)
        stacks = {
            name: [
                jax.tree.map(lambda leaf, i=i: leaf[i], parts["stacks"][name])
                for i in range(self._functions.num_layers[name])
            ]
            for name in self._stack_names
        }
        return {"non_stack": parts["non_stack"], "stacks": stacks}

    def given(self, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens that a continuation follows, and their numbers: the prompts.

        Args:
            tokens_BT: int32, prompts; padding follows them.
            lengths_B: int32, number of tokens of each prompt.
        """
        return tokens_BT, lengths_B

    def prefill(
        self,
        params: dict[str, Tree],
        tokens_BT: jax.Array,
        lengths_B: jax.Array,
        max_new_tokens: int,
        num_drafts: int = 0,
    ) -> tuple[jax.Array, Caches]:
        """Compute the logits of the first new token.

        Args:
            params: parameters from `separate`.
            tokens_BT: int32, prompts; padding follows them.
            lengths_B: int32, number of tokens of each prompt, at least 1.
            max_new_tokens: most tokens of a continuation.
            num_drafts: how many of the next tokens may be taken back.

        Returns:
            Logits float32[B, V], or wider, and a cache for each attention.
        """
        batch = self._batch_of_prompts(tokens_BT, lengths_B)
        x = self._functions.embed(params["non_stack"], batch)
        encoders, decoders = self._stacks()
        x = self._run(encoders, params, x, batch)
        for name in decoders:
            if name in self._functions.before:
                x = self._functions.before[name](params["non_stack"], x, batch)
        given_BT, given_B = self.given(tokens_BT, lengths_B)
        num_slots = given_BT.shape[1] + max_new_tokens
        if self.max_positions is not None:
            num_slots = min(num_slots, self.max_positions)
        with kv_cache.filling(given_B, num_slots + num_drafts, num_drafts) as caches:
            x = self._run(decoders, params, x, batch)
        return self._logits(params, self._last(x, lengths_B))[:, 0], (*caches,)

    def decode(
        self,
        params: dict[str, Tree],
        tokens_BT: jax.Array,
        positions_B: jax.Array,
        caches: Sequence[KVCache],
    ) -> tuple[jax.Array, Caches]:
        """Compute the logits after each of the next tokens.

        Args:
            params: parameters from `separate`.
            tokens_BT: int32, the next tokens of each row: the newest, and drafts that follow it.
            positions_B: int32, position of the newest token.
            caches: tokens before it.

        Returns:
            Logits float32[B, T, V], or wider, and the caches with the tokens added.
        """
        positions_BT = positions_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        batch = self._batch_of_next(tokens_BT, positions_BT)
        x = self._functions.embed(params["non_stack"], batch)
        with kv_cache.reading(caches, positions_BT) as grown:
            x = self._run(self._stacks()[1], params, x, batch)
        return self._logits(params, x), (*grown,)

    def _batch_of_prompts(self, tokens_BT: jax.Array, lengths_B: jax.Array) -> Batch:
        return {"tokens": tokens_BT}

    def _batch_of_next(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> Batch:
        if self.max_positions is not None:  # drafts may go beyond; they are not taken
            positions_BT = jnp.minimum(positions_BT, self.max_positions - 1)
        return {"tokens": tokens_BT, "positions": positions_BT}

    def _last(self, x: Tree, lengths_B: jax.Array) -> Tree:
        """Return the activations of the token after which a continuation begins."""
        return jnp.take_along_axis(x, (lengths_B - 1)[:, None, None], axis=1)

    def _stacks(self) -> tuple[list[str], list[str]]:
        """Return the names of stacks that only prompts pass, and of those that new tokens pass."""
        return [], self._stack_names

    def _run(self, stacks: list[str], params: dict[str, Tree], x: Tree, batch: Batch) -> Tree:
        """Return the activations after the last block of the last stack."""
        for stack in stacks:
            for number, layer in enumerate(params["stacks"][stack]):
                x = self._functions.blocks[stack](layer, x, batch, jnp.int32(number))
        return x

    def _logits(self, params: dict[str, Tree], x: Tree) -> jax.Array:
        assert self._functions.logits is not None
        return self._functions.logits(params["non_stack"], x)


class Seq2SeqDecoder(Decoder):
    """The functions of a sequence-to-sequence model; see `decoder_of`.

    Prompts may have any length: its positions are relative.
    """

    follows_prompt = False
    _objective = "seq2seq"

    def __init__(self, model: Any, start_token: int):
        super().__init__(model)
        self._start_token = start_token

    def given(self, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens that a continuation follows, and their numbers: one start token."""
        shape = len(tokens_BT), 1
        return jnp.full(shape, self._start_token, jnp.int32), jnp.ones_like(lengths_B)

    def _stacks(self) -> tuple[list[str], list[str]]:
        first = self._stack_names.index("decoder")
        return self._stack_names[:first], self._stack_names[first:]

    def _batch_of_prompts(self, tokens_BT: jax.Array, lengths_B: jax.Array) -> Batch:
        start_B1, _ = self.given(tokens_BT, lengths_B)
        is_token_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
        return {
            "tokens": tokens_BT,
            "segment_ids": is_token_BT.astype(jnp.int32),
            "decoder_tokens": start_B1,
            "decoder_segment_ids": jnp.ones_like(start_B1),
        }

    def _batch_of_next(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> Batch:
        # The blocks of the decoder see the encoder through their caches alone.
        return {"tokens": jnp.zeros_like(tokens_BT[:, :1]), "decoder_tokens": tokens_BT}

    def _last(self, x: Tree, lengths_B: jax.Array) -> Tree:
        return x
