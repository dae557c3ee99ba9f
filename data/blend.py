"""The interleaving of weighted sources: which source each element of a mixture comes from.

The order is deterministic and periodic. With shares 1/2, 1/4 and 1/4 of the sources a, b and c:

    element  0  1  2  3  4  5  6  7
    source   a  b  a  c  a  b  a  c
    number   0  0  1  0  2  1  3  1     (number of the element within its source)
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Longest period of the pattern of sources, in elements. The whole pattern is kept in memory.
_MAX_PERIOD = 100_000
_ENTRY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s+(\S.*?)\s*")


def parse_mixture(entries: Sequence[str]) -> list[tuple[Fraction, str]]:
    """Return (share, source) of each entry of `data.mixture`; the shares sum to 1.

    Args:
        entries: strings of the form 'WEIGHT SOURCE'.

    Raises:
        ValueError: An entry has another form, a weight is not positive, or the weights have too
            many digits.
    """
    parsed = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None or Fraction(match[1]) == 0:
            raise ValueError(
                f"data.mixture: {entry!r} must be a weight above 0, a space and a source, for "
                "example '0.7 wiki40b/en'"
            )
        parsed.append((Fraction(match[1]), match[2]))
    total = sum((weight for weight, _ in parsed), Fraction(0))
    shares = [(weight / total, source) for weight, source in parsed]
    if parsed and _period([share for share, _ in shares]) > _MAX_PERIOD:
        raise ValueError(
            f"data.mixture={tuple(entries)!r}: the weights, divided by their sum, must have a "
            f"common denominator of at most {_MAX_PERIOD:,}; round them to fewer digits"
        )
    return shares


def weighted_token_files(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of `data.mixture` for paths in the spelling of Megatron's `--data-path`.

    For example, `("0.7 a 0.3 b",)` and `("0.7", "a", "0.3", "b")` are `("0.7 a.bin", "0.3 b.bin")`.

    Args:
        paths: paths of token files, with or without the suffix .bin or .idx.

    Returns:
        The entries; empty if there are no weights in front of the paths.
    """
    words = " ".join(paths).split()
    pairs = [*zip(words[::2], words[1::2], strict=False)]
    entries = [
        f"{weight} {path.removesuffix('.idx').removesuffix('.bin')}.bin" for weight, path in pairs
    ]
    are_pairs = bool(words) and len(words) % 2 == 0 and all(map(_ENTRY.fullmatch, entries))
    return tuple(entries) if are_pairs else ()


class Blend:
    """The source of each element of an endless stream, and the element's number in that source.

    For every n, the first n elements contain n * shares[i] elements of source i, with an error of
    less than one element. The stream repeats a fixed pattern, so any element can be looked up
    without computing the ones before it.

    Args:
        shares: share of each source; they are positive and sum to 1.

    Source: Baruah et al. 1996, "Proportionate progress". Among the sources that are allowed to
        supply the next element, the one with the earliest deadline supplies it.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self._period = _period(shares)
        self._counts = [int(share * self._period) for share in shares]
        sources = []
        numbers = []
        num_supplied = [0] * len(shares)
        for place in range(self._period):
            source = self._due(place, num_supplied)
            sources.append(source)
            numbers.append(num_supplied[source])
            num_supplied[source] += 1
        self._sources = np.array(sources, np.int32)
        self._numbers = np.array(numbers, np.int32)

    def __getitem__(self, element: int) -> tuple[int, int]:
        """Return (source, number of the element within the source, counted from 0)."""
        cycle, place = divmod(element, self._period)
        source = int(self._sources[place])
        return source, cycle * self._counts[source] + int(self._numbers[place])

    def _due(self, place: int, num_supplied: Sequence[int]) -> int:
        """Return the source with the earliest deadline among those allowed to supply an element.

        Element number k (from 0) of a source with share s must come no earlier than place
        floor(k / s), and before place ceil((k + 1) / s), its deadline.

        Args:
            num_supplied: how many elements each source has supplied before this place.
        """
        # In integers: the share of source i is self._counts[i] / period.
        period = self._period
        deadlines = [
            (-(-(num_supplied[i] + 1) * period // count), i)
            for i, count in enumerate(self._counts)
            if num_supplied[i] * period // count <= place
        ]
        return min(deadlines)[1]


def _period(shares: Sequence[Fraction]) -> int:
    return math.lcm(*(share.denominator for share in shares))
