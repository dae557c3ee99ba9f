"""The chat objective: whole conversations are packed into rows, and answers are learned.

A conversation sees no other one in its row. With T=8, conversations a (3 tokens) and b (5 tokens),
whose learned tokens are capitals:

    tokens       a0 A1 b0 b1 B2 B3 -  -
    targets      A1 A2 b1 B2 B3 B4 -  -
    weights      1  1  0  1  1  1  0  0
    segment_ids  1  1  2  2  2  2  0  0

T: tokens per sequence.
"""

import numpy as np

from data.examples import Example
from data.text.chat.conversations import EncodedChats
from data.text.objectives.packing import PackedExamples, pack
from data.text.objectives.rows import packed_chats


class ChatExamples(PackedExamples):
    """Rows of whole conversations.

    A row has `tokens`, `targets`, `segment_ids` and `positions: int32[T]`, and
    `weights: float32[T]`, which is 1 where the target is learned.

    Args:
        chats: conversations, each of at most T + 1 tokens.
        sequence_length: T.
        best_fit: whether conversations change their order to fill the rows; see packing.py.
    """

    def __init__(self, chats: EncodedChats, sequence_length: int, *, best_fit: bool = False):
        self._chats = chats
        self._length = sequence_length
        sizes = np.diff(chats.ends, prepend=0) - 1  # the last token is only a target
        self._packing = pack(sizes, sequence_length, best_fit=best_fit)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; nothing in it is random."""
        del key
        numbers = self._packing.items_of(index).tolist()
        row = packed_chats(self._chats, numbers, self._length)
        row["weights"] = (row.pop("answers") > 0).astype(np.float32)
        return row
