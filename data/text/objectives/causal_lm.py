"""The causal language modeling objective: every token predicts the next one.

The token array is cut into windows, so nothing is lost to padding. With T=4 and E for the
end-of-document token:

    token array   E a b c d E e f g ...
    row 0         tokens  E a b c     targets  a b c d
    row 1         tokens  d E e f     targets  E e f g

With `data.packing=best_fit`, documents are not cut unless they have more than T tokens, and rows
have a little padding (see packing.py):

    row 0         tokens  E a b c     targets  a b c d
    row 1         tokens  E e f -     targets  e f g -

T: tokens per sequence.
"""

import numpy as np

from data.examples import Example, Examples
from data.text.objectives.packing import PackedExamples, pack
from data.text.objectives.rows import padded, segments
from data.text.token_store import document_ends


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


class WholeDocumentExamples(PackedExamples):
    """Rows for causal language modeling that begin and end with whole documents where possible.

    A document with more than T tokens is cut into pieces of T tokens and a rest. A row has the
    same keys as those of `CausalLMExamples`.

    Args:
        tokens: uint16 or uint32 [number of tokens]: an end-of-document token, then every document
            followed by another one.
        sequence_length: T.
        eos_id: id of the end-of-document token.
        isolates: whether documents do not attend to each other.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, eos_id: int, *, isolates: bool):
        self._tokens = tokens
        self._length = sequence_length
        self._isolates = isolates
        # A document begins with the end of the one before, from which its first token is predicted;
        # the model also learns to predict its end.
        ends = document_ends(tokens, eos_id)
        sizes = np.diff(ends)
        num_pieces = -(-sizes // sequence_length)
        document = np.repeat(np.arange(len(sizes)), num_pieces)
        first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        offset = (np.arange(len(document)) - first) * sequence_length
        self._starts = ends[:-1][document] + offset
        self._sizes = np.minimum(sizes[document] - offset, sequence_length)
        self._packing = pack(self._sizes, sequence_length, best_fit=True)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; nothing in it is random."""
        del key
        spans = [
            (int(self._starts[item]), int(self._starts[item] + self._sizes[item]))
            for item in self._packing.items_of(index)
        ]
        tokens = np.concatenate([self._tokens[start:stop] for start, stop in spans])
        targets = np.concatenate([self._tokens[start + 1 : stop + 1] for start, stop in spans])
        is_target = np.arange(self._length) < len(tokens)
        row = {
            "tokens": padded(tokens, self._length),
            "targets": padded(targets, self._length),
            "weights": is_target.astype(np.float32),
        }
        if self._isolates:
            starts = np.zeros(self._length, bool)
            starts[np.cumsum([0, *(stop - start for start, stop in spans[:-1])])] = True
            row |= segments(starts)
            row["segment_ids"] *= is_target
        return row
