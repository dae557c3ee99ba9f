"""Log-probabilities of the tokens of given texts, on the mesh that the model is on.

B batch, T seq, V vocab.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from generate.batches import batches_of, check_batch_size, pad_rows
from sharding.logical import axis_rules
from sharding.rules import rules_on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities of the tokens of a text, except the first."""

    # float32[T - 1], or wider: log-probability of each token after those before it
    log_probs: np.ndarray
    is_likeliest: np.ndarray  # bool[T - 1], whether no other token is more likely


class Scorer:
    """Computes log-probabilities of texts.

    Args:
        model: causal language model, as from `convert.from_hf.load`. Use the scorer on the mesh
            that it was loaded on.
        batch_size: most texts that are scored at the same time; a multiple of the number of
            replicas of the mesh.

    Raises:
        ValueError: the model does not predict the next token, or `batch_size` does not divide.
    """

    def __init__(self, model: Any, *, batch_size: int = 8):
        if "causal_lm" not in getattr(model, "objectives", ()):
            raise ValueError(
                f"{type(model).__name__} does not predict the next token; causal_lm is not among "
                "its objectives"
            )
        mesh = jax.sharding.get_mesh()
        self._num_replicas = check_batch_size(mesh, batch_size)
        self._batch_size = batch_size
        self._most = model.config.max_positions
        graph, self._params = nnx.split(model)

        @axis_rules(rules_on(mesh))
        def scored(params: Any, inputs_BT: jax.Array, targets_BT: jax.Array) -> Any:
            logits_BTV = nnx.merge(graph, params)(inputs_BT)
            chosen_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
            log_probs_BT = chosen_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)
            return log_probs_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT

        self._scored = jax.jit(scored)

    def score(
        self, texts: Sequence[Sequence[int]], *, on_batch: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Return the score of each text.

        Args:
            texts: token ids, at least two per text and at most one more than the model has
                positions.
            on_batch: called with the number of texts of each batch that is complete.

        Raises:
            ValueError: a text is too short or too long.
        """
        for i, text in enumerate(texts):
            if not 2 <= len(text) <= self._most + 1:
                raise ValueError(
                    f"text {i} has {len(text)} tokens; a text to score has 2 to {self._most + 1}"
                )
        scores: list[Score | None] = [None] * len(texts)
        for numbers in batches_of(texts, self._batch_size):
            sizes = self._num_replicas, self._batch_size, self._most
            inputs_BT, _ = pad_rows([texts[number][:-1] for number in numbers], *sizes)
            targets_BT, _ = pad_rows([texts[number][1:] for number in numbers], *sizes)
            log_probs_BT, is_likeliest_BT = map(
                np.asarray, self._scored(self._params, inputs_BT, targets_BT)
            )
            for place, number in enumerate(numbers):
                length = len(texts[number]) - 1
                scores[number] = Score(
                    log_probs=log_probs_BT[place, :length],
                    is_likeliest=is_likeliest_BT[place, :length],
                )
            if on_batch is not None:
                on_batch(len(numbers))
        return [score for score in scores if score is not None]
