"""A token array cut into sequences of which each token predicts the next.

T: tokens a sequence.
"""

import numpy as np

from data.examples import Example, Examples
from data.text.objectives.rows import padded, segments


class CausalLMExamples(Examples):
    """Sequences of the stream: window i predicts tokens i*T+1 to i*T+T.

    Its rows are tokens, targets: int32[T]; weights: float32[T].

    Args:
        tokens: uint16 or uint32 [number of tokens].
        sequence_length: T.
        keep_partial: Keep a last window that is shorter than T, padded with weight 0.
        isolate_after: The id that ends a document: rows have segment_ids and positions, int32[T],
            too. It belongs to the document that follows it, whose first token is predicted from it.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        *,
        keep_partial: bool,
        isolate_after: int | None = None,
    ):
        self.tokens, self.sequence_length = tokens, sequence_length
        self._isolate_after = isolate_after
        num_targets = max(len(tokens) - 1, 0)
        self._length = (
            -(-num_targets // sequence_length) if keep_partial else num_targets // sequence_length
        )

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        del key  # Nothing is random.
        length = self.sequence_length
        window = self.tokens[index * length : index * length + length + 1]
        packed = padded(window, length + 1)
        is_target = np.arange(length) < len(window) - 1
        row = {
            "tokens": packed[:-1],
            "targets": packed[1:],
            "weights": is_target.astype(np.float32),
        }
        if self._isolate_after is not None:
            row |= segments(row["tokens"] == self._isolate_after)
            row["segment_ids"] *= is_target
        return row
