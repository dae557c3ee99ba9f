"""The training rows of text that is read shard by shard.

Shards are tokenized in a shuffled order, and their tokens follow each other as in a token store. So
rows may begin in one shard and end in the next, and no token is lost. With 2 tokens per row, blocks
of 3 rows, and shards with 5, 4 and 6 tokens in the first epoch:

    shard     2          | 0        | 1            | next epoch
    tokens    a b c d E    f g h E    i j k l m E    n …
    row       0   1   2      3   4    5   6   (7)
    block     0              1                (2)

A block ends with the last whole row of an epoch; the tokens after it belong to the next block. Here
7 is the last row of the first epoch only if all of its tokens are in it.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from data.config import DataConfig
from data.examples import BrokenExample, Examples, ExampleStream, StreamPosition
from data.text.objectives.registry import make_examples, num_tokens_needed
from data.text.streaming.shard_cache import ShardCache
from data.text.streaming.shards import find_shards, relative_names
from data.text.tokenization.tokenizer import Tokenizer


class TokenStream(ExampleStream):
    """The training rows of a streamed corpus.

    Attributes:
        fingerprint: hash of the names, sizes and versions of the shards, and of the tokenizer.

    Raises:
        FileNotFoundError: A glob matches no file.
        ValueError: A shard is of another kind, cannot be read, or is too large for the cache.
        ConnectionError: A store or the hub cannot be reached.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        shards = find_shards(config)
        self._config = config
        self._tokenizer = tokenizer
        self._cache = ShardCache(shards, config, tokenizer)
        self._tokens_per_row = num_tokens_needed(config) - 1
        self._rows(np.zeros(0, np.uint16))  # refuses a tokenizer without the tokens for masks
        self.num_shards = len(shards)
        gigabytes = sum(shard.size or 0 for shard in shards) / 1e9
        self.description = f"streamed from {len(shards):,} shards of {gigabytes:.3g} GB"
        # Copies of local files on other hosts have other modification times.
        versions = [f"{each.size} {'' if each.is_local else each.version}" for each in shards]
        keyed = [tokenizer.fingerprint, config.text_field, *relative_names(shards), *versions]
        self.fingerprint = hashlib.sha256("\0".join(keyed).encode()).hexdigest()

    def read_block(
        self, start: StreamPosition, order: Callable[[int], int]
    ) -> tuple[Examples, StreamPosition]:
        """Return `data.shuffle_window` rows from a position, or fewer at the end of an epoch."""
        size = self._tokens_per_row
        num_wanted = self._config.shuffle_window * size
        shard, offset = start.shard, start.offset
        num_tokens = 0
        parts: list[np.ndarray] = []
        starts: list[tuple[int, StreamPosition]] = []  # number of tokens before the part, and its
        while num_tokens < num_wanted:
            if not num_tokens and shard - start.shard > self.num_shards:
                raise BrokenExample(
                    f"data.paths={self._config.paths!r}: there is not enough text for one row; add "
                    "text, or reduce data.sequence_length"
                )
            part, is_last = self._read(shard, offset, num_wanted - num_tokens, order)
            # Only the first part keeps the token before it, from which its first one is predicted.
            parts.append(part[1:] if parts else part)
            starts.append((num_tokens, StreamPosition(shard=shard, offset=offset)))
            num_tokens += len(part) - 1
            offset += len(part) - 1
            if is_last:
                shard += 1
                offset = 0
                if shard % self.num_shards == 0 and num_tokens >= size:
                    break
        starts.append((num_tokens, StreamPosition(shard=shard, offset=offset)))
        stop = num_tokens - num_tokens % size
        first, position = [each for each in starts if each[0] <= stop][-1]
        end = StreamPosition(shard=position.shard, offset=position.offset + stop - first)
        return self._rows(np.concatenate(parts)[: stop + 1]), end

    def _read(
        self, shard: int, offset: int, max_tokens: int, order: Callable[[int], int]
    ) -> tuple[np.ndarray, bool]:
        """Copy tokens of a shard, and the one before them, so that its file can be deleted.

        Returns:
            The tokens, and whether they are the last ones of the shard.
        """
        tokens = self._cache.read(shard, order)
        if offset > len(tokens):
            raise BrokenExample(
                f"data.paths={self._config.paths!r}: {offset:,} tokens of a shard have been read, "
                f"but it has {len(tokens):,}; restore the original data, or choose another "
                "--workdir"
            )
        part = np.empty(1 + min(max_tokens, len(tokens) - offset), tokens.dtype)
        part[0] = tokens[offset - 1] if offset else self._tokenizer.eos_id
        part[1:] = tokens[offset : offset + max_tokens]
        return part, offset + max_tokens >= len(tokens)

    def _rows(self, tokens: np.ndarray) -> Examples:
        return make_examples(tokens, self._config, self._tokenizer, keep_partial=False)

    def close(self) -> None:
        """Stop fetching and tokenizing."""
        self._cache.close()
