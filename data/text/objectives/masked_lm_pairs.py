"""The objective of BERT's pre-training: masked tokens and next sentence prediction.

A row is CLS A SEP B SEP. In half of the rows B is the text that follows A in its document; in the
others B comes from another document. The model predicts which, in addition to masked tokens.

T: tokens per row.

Source: Devlin et al. 2018 (arXiv:1810.04805), section 3.1, "next sentence prediction".
"""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples, generator
from data.text.objectives.masked_lm import TokenMasker
from data.text.objectives.rows import RowPacker
from data.text.token_store import document_ends
from data.text.tokenization.tokenizer import Tokenizer


class MaskedLMPairExamples(Examples):
    """Rows with pairs of texts: pieces of documents, cut in two at a random position.

    A row has `tokens`, `targets`, `token_types` and `segment_ids: int32[T]`;
    `weights: float32[T]`, which is 1 at the chosen tokens; `labels: int32`, 0 if B follows A and 1
    if it does not; and `label_weights: float32`, which is 1.

    Args:
        tokens: uint16 or uint32 [number of tokens], beginning with an end-of-document token.
        config: config section `data`, with T and the settings of masking.

    Raises:
        ValueError: There is only one document, so there is no other one to take texts from.
    """

    def __init__(self, tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer):
        self._tokens = tokens
        self._masking = TokenMasker(config, tokenizer)
        self._joiner = RowPacker(config, tokenizer)
        self._room = self._joiner.room(is_pair=True)
        ends = document_ends(tokens, tokenizer.eos_id)
        # A difference of 2 means one token between two ends, and one token cannot be cut in two.
        has_two = np.diff(ends) > 2
        self._starts = ends[:-1][has_two] + 1
        self._ends = ends[1:][has_two]
        if len(self._starts) == 1:
            raise ValueError(
                f"data.objective={config.objective!r} takes second texts from other documents, but "
                f"a split of data.name={config.name!r} has only one document of two or more "
                "tokens; add documents, or choose data.objective='masked_lm'"
            )
        # Each document is cut into pieces that fit into a row; a rest of one token is dropped.
        # _last_pieces[i] is the number of pieces in documents 0 to i, for looking up a row.
        whole, remainder = np.divmod(self._ends - self._starts, self._room)
        self._last_pieces = np.cumsum(whole + (remainder > 1))

    def __len__(self) -> int:
        return int(self._last_pieces[-1]) if len(self._last_pieces) else 0

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; `key` decides the cut, the second text, and the masked tokens."""
        random = generator(key)
        document = int(np.searchsorted(self._last_pieces, index, side="right"))
        before = int(self._last_pieces[document - 1]) if document else 0
        start = int(self._starts[document]) + (index - before) * self._room
        stop = min(start + self._room, int(self._ends[document]))
        cut = int(random.integers(start + 1, stop))
        follows = bool(random.random() < 0.5)
        text = self._tokens[start:cut]
        pair = self._tokens[cut:stop] if follows else self._other(document, stop - cut, random)
        row = self._joiner.row(text, pair)
        tokens, weights = self._masking(row["tokens"], random)
        return {
            **row,
            "tokens": tokens,
            "targets": row["tokens"],
            "weights": weights,
            "labels": np.array(not follows, np.int32),
            "label_weights": np.array(1, np.float32),
        }

    def _other(self, document: int, length: int, random: np.random.Generator) -> np.ndarray:
        """Draw `length` consecutive tokens of another document, or all of it if it is shorter."""
        # Drawing from one document fewer and skipping this one is uniform over the others.
        other = int(random.integers(len(self._starts) - 1))
        other += other >= document
        start = int(self._starts[other])
        end = int(self._ends[other])
        begin = int(random.integers(start, max(end - length, start) + 1))
        return self._tokens[begin : min(begin + length, end)]
