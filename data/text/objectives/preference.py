"""The preference objective: pairs of conversations, of which one has the better answer.

The two conversations of a pair are next to each other in a row, and no conversation sees another.
With T=8, one pair, whose answers are capitals:

    tokens       a0 a1 A2 b0 b1 B2 B3 -
    targets      a1 A2 A3 b1 B2 B3 B4 -
    answers      0  1  1  0  2  2  2  0
    segment_ids  1  1  1  2  2  2  2  0

T: tokens per sequence, P: most pairs in a row.
"""

import numpy as np

from data.examples import Example
from data.text.chat.conversations import EncodedChats
from data.text.objectives.packing import PackedExamples, pack
from data.text.objectives.rows import packed_chats

#: A row has at most one pair for this many tokens. Arrays of pairs are small then.
_TOKENS_PER_PAIR = 64


def max_pairs(sequence_length: int) -> int:
    """Return P, the largest number of pairs in a row of `sequence_length` tokens."""
    return max(1, sequence_length // _TOKENS_PER_PAIR)


class PreferenceExamples(PackedExamples):
    """Rows of pairs.

    A row has `tokens`, `targets`, `segment_ids`, `positions` and `answers: int32[T]`, and
    `weights: float32[P]`, which is 1 for each pair that is there. Pair p has the answers 2p + 1,
    which is the chosen one, and 2p + 2. Once they are known, a row also has
    `reference_log_probs: float32[P, 2]`.

    Args:
        chats: conversations, each of at most T / 2 + 1 tokens: for every pair the one with the
            chosen answer, then the one with the rejected answer.
        sequence_length: T.
        best_fit: whether pairs change their order to fill the rows; see packing.py.

    Attributes:
        reference_log_probs: float32[rows, P, 2], log-probabilities of the answers by the reference;
            None until they have been computed.
    """

    reference_log_probs: np.ndarray | None = None

    def __init__(self, chats: EncodedChats, sequence_length: int, *, best_fit: bool = False):
        self._chats = chats
        self._length = sequence_length
        self._most = max_pairs(sequence_length)
        sizes = np.diff(chats.ends, prepend=0) - 1  # the last token is only a target
        pair_sizes = sizes.reshape(-1, 2).sum(axis=1)
        self._packing = pack(pair_sizes, sequence_length, best_fit=best_fit, max_items=self._most)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; nothing in it is random."""
        del key
        pairs = self._packing.items_of(index).tolist()
        numbers = [2 * pair + i for pair in pairs for i in (0, 1)]
        row = packed_chats(self._chats, numbers, self._length)
        row["weights"] = (np.arange(self._most) < len(pairs)).astype(np.float32)
        if self.reference_log_probs is not None:
            row["reference_log_probs"] = self.reference_log_probs[index]
        return row
