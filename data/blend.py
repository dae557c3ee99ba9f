"""Several sources in one stream: which of them each element comes from."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Elements after which the pattern of sources repeats, at most: it is kept in memory.
_MAX_PERIOD = 100_000
_ENTRY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s+(\S.*?)\s*")


def parse_mixture(entries: Sequence[str]) -> list[tuple[Fraction, str]]:
    """Returns (weight, source) of each 'WEIGHT SOURCE'; the weights sum to 1.

    Raises:
        ValueError: An entry has another form, or a weight that is not positive, or the weights
            have too many digits.
    """
    parsed = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None or Fraction(match[1]) == 0:
            raise ValueError(
                f"data.mixture: {entry!r} must be a weight above 0, a space and a source; "
                "write for example '0.7 wiki40b/en'"
            )
        parsed.append((Fraction(match[1]), match[2]))
    total = sum((weight for weight, _ in parsed), Fraction(0))
    shares = [(weight / total, source) for weight, source in parsed]
    if parsed and _period([share for share, _ in shares]) > _MAX_PERIOD:
        raise ValueError(
            f"data.mixture={tuple(entries)!r}: the weights must be whole multiples of 1/n of their "
            f"sum for an n of at most {_MAX_PERIOD:,}; round them to fewer digits"
        )
    return shares


class Blend:
    """Which source each element of an endless stream comes from, and its number there.

    Of the first n elements, source i gives n * shares[i], to less than one element, for every n.
    The stream is a pattern that repeats, so an element is found without those before it.

    Args:
        shares: Of each source; they are positive and sum to 1.

    Source: Baruah et al. 1996, "Proportionate progress": of the sources that may give an element
    now, the one gives it that must do so first.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self._period = _period(shares)
        self._counts = [int(share * self._period) for share in shares]
        sources, numbers, given = [], [], [0] * len(shares)
        for place in range(self._period):
            source = self._due(place, given)
            sources.append(source)
            numbers.append(given[source])
            given[source] += 1
        self._sources, self._numbers = np.array(sources, np.int32), np.array(numbers, np.int32)

    def __getitem__(self, element: int) -> tuple[int, int]:
        """Returns (source, number of the element within it, counted from 0)."""
        cycle, place = divmod(element, self._period)
        source = int(self._sources[place])
        return source, cycle * self._counts[source] + int(self._numbers[place])

    def _due(self, place: int, given: Sequence[int]) -> int:
        """Returns the source that must give soonest, of those whose share lets them give now."""
        period = self._period
        deadlines = [
            (-(-(given[i] + 1) * period // count), i)
            for i, count in enumerate(self._counts)
            if given[i] * period // count <= place
        ]
        return min(deadlines)[1]


def _period(shares: Sequence[Fraction]) -> int:
    return math.lcm(*(share.denominator for share in shares))
