"""A causal language model as two pure functions: a pass over prompts, and a pass over one token.

    prompts ──> prefill ──> logits of the next token, KV caches
                                   │
    token, KV caches ──> decode ──> logits of the next token, KV caches   (repeated)

Both call the blocks that training calls; models/layers/kv_cache.py keeps what they share. The
layers are not in a loop here: a loop would copy the parameters of each layer, and its caches, for
each token.

B batch, T prompt seq, V vocab.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.functions import functions_of
from models.layers import kv_cache
from models.layers.kv_cache import KVCache

Tree = Any
Caches = tuple[KVCache, ...]


class Decoder:
    """The functions of a causal language model that generate text.

    Args:
        model: the model, which may be abstract.

    Raises:
        ValueError: the model does not predict the next token, or the frequencies of its rotary
            embeddings depend on the length of a text.
    """

    def __init__(self, model: Any):
        self._functions = functions_of(model, remat=None)
        objectives = getattr(model, "objectives", ())
        if self._functions.logits is None or "causal_lm" not in objectives:
            raise ValueError(
                f"{type(model).__name__} cannot generate text: it has no method `logits`, or "
                "causal_lm is not among its objectives"
            )
        scaling = getattr(model.config, "rope_scaling", None) or {}
        if scaling.get("rope_type") == "longrope":
            raise ValueError(
                "model.rope_scaling: with rope_type='longrope', the frequencies depend on the "
                "length of the text, which changes while it is generated; export the model and "
                "generate with transformers or vLLM"
            )

    def separate(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Split the stacked parameters into separate arrays for each layer."""
        parts = self._functions.split(params)
        stacks = {
            name: [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count)]
            for (name, layers), count in zip(
                parts["stacks"].items(), self._functions.num_layers.values(), strict=True
            )
        }
        return {"non_stack": parts["non_stack"], "stacks": stacks}

    def prefill(
        self, params: dict[str, Tree], tokens_BT: jax.Array, lengths_B: jax.Array, num_slots: int
    ) -> tuple[jax.Array, Caches]:
        """Compute the logits of the first new token.

        Args:
            params: parameters from `separate`.
            tokens_BT: int32, prompts; padding follows them.
            lengths_B: int32, number of tokens of each prompt, at least 1.
            num_slots: number of tokens that a row may have in the end.

        Returns:
            Logits float32[B, V], or wider, and a cache for each attention.
        """
        with kv_cache.filling(lengths_B, num_slots) as caches:
            x_BTD = self._run(params, {"tokens": tokens_BT})
        last_B11 = (lengths_B - 1)[:, None, None]
        x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1)
        return self._logits(params, x_B1D), (*caches,)

    def decode(
        self,
        params: dict[str, Tree],
        tokens_B: jax.Array,
        positions_B: jax.Array,
        caches: Sequence[KVCache],
    ) -> tuple[jax.Array, Caches]:
        """Compute the logits of the token after the next.

        Args:
            params: parameters from `separate`.
            tokens_B: int32, the newest token of each row.
            positions_B: int32, its position.
            caches: the tokens before it.

        Returns:
            Logits float32[B, V], or wider, and the caches with the token added.
        """
        batch = {"tokens": tokens_B[:, None], "positions": positions_B[:, None]}
        with kv_cache.reading(caches, positions_B) as grown:
            x_B1D = self._run(params, batch)
        return self._logits(params, x_B1D), (*grown,)

    def _run(self, params: dict[str, Tree], batch: dict[str, jax.Array]) -> jax.Array:
        """Return the activations after the last block."""
        functions = self._functions
        x_BTD = functions.embed(params["non_stack"], batch)
        for name, layers in params["stacks"].items():
            for number, layer in enumerate(layers):
                x_BTD = functions.blocks[name](layer, x_BTD, batch, jnp.int32(number))
        return x_BTD

    def _logits(self, params: dict[str, Tree], x_B1D: jax.Array) -> jax.Array:
        assert self._functions.logits is not None
        return self._functions.logits(params["non_stack"], x_B1D)[:, 0]
