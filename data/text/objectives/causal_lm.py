"""The causal language modeling objective: every token predicts the next one.

The token array is cut into windows, so nothing is lost to padding. With T=4 and E for the
end-of-document token:

    token array   E a b c d E e f g ...
    row 0         tokens  E a b c     targets  a b c d
    row 1         tokens  d E e f     targets  E e f g

T: tokens per sequence.
"""

import numpy as np

from data.examples import Example, Examples
from data.text.objectives.rows import padded, segments


class CausalLMExamples(Examples):
    """Rows for causal language modeling: row i predicts tokens i*T+1 to i*T+T of the array.

    A row has `tokens` and `targets: int32[T]` and `weights: float32[T]`.

    Args:
        tokens: uint16 or uint32 [number of tokens].
        sequence_length: T.
        keep_partial: whether to keep a last window that is shorter than T, padded with weight 0.
        isolate_after: id of the end-of-document token, to isolate documents from each other:
            rows then also have `segment_ids` and `positions: int32[T]`. An end-of-document token
            belongs to the document after it, because it predicts the first token of that document.
            None does not isolate documents.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        *,
        keep_partial: bool,
        isolate_after: int | None = None,
    ):
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._isolate_after = isolate_after
        num_targets = max(len(tokens) - 1, 0)
        self._length = (
            -(-num_targets // sequence_length) if keep_partial else num_targets // sequence_length
        )

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; nothing in it is random."""
        del key
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
