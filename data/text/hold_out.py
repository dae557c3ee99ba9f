"""Chooses the documents of a validation split, by a hash of their content.

    share of the text      |------- 0.05 -------|------------------ 0.95 -------------------|
    documents by hash      h h h h h h h h h h h|c|t t t t t t t t t t t t t t t t t t t t t t

Documents with the smallest hashes are held out (h). In a large corpus, the documents whose hashes
are in the lowest 5 % of the range make up almost exactly 5 % of the text, and adding documents
moves no document to the other split. In a small corpus, single documents are a large part of the
text. The boundary is then moved until the share is within 1 % of the fraction, and the document at
the boundary may be cut in two (c).

Sometimes neither helps, because a very long document or many identical ones are at the boundary.
Then documents that are too large are passed over, and the rest is chosen so that the share is as
near to the fraction as possible:

    sizes by hash   2 1 90 3 1 2 1      fraction 0.06: hold out 6 of 100
                    h h    h
"""

import logging

import numpy as np

#: Largest difference between the share and the fraction, as a fraction of the text.
TOLERANCE = 0.01
#: A split with less than this part of its due share is nearly empty.
_NEARLY_EMPTY = 0.01

logger = logging.getLogger(__name__)


def held_out_shares(
    sizes: np.ndarray, hashes: np.ndarray, may_cut: np.ndarray, fraction: float
) -> np.ndarray:
    """Choose the documents to hold out. Documents with equal hashes are in the same split.

    Args:
        sizes: int64[number of documents], their sizes.
        hashes: uint64[number of documents], hashes of their contents.
        may_cut: bool[number of documents], whether they may be cut in two.
        fraction: fraction of the total size to hold out.

    Returns:
        float64[number of documents]: 1 for documents to hold out, 0 for others. At most one has
        another value: the share of it that is to be held out. If there are two different documents
        and `fraction` is not 0, both splits get some.
    """
    count = len(sizes)
    shares = np.zeros(count)
    if not fraction or not count:
        return shares
    order = np.argsort(hashes, kind="stable")
    ends = np.cumsum(sizes[order])
    total = float(ends[-1])
    # Possible boundaries: numbers of documents to hold out, between different hashes.
    by_hash = hashes[order]
    boundaries = np.flatnonzero(by_hash[1:] != by_hash[:-1]) + 1
    errors = np.abs(ends[boundaries - 1] / total - fraction)
    in_range = boundaries[errors <= TOLERANCE]
    if len(in_range):
        # The nearest to the boundary of large corpora, so that few documents move.
        usual = np.searchsorted(by_hash, np.uint64(min(fraction * 2**64, 2**64 - 1)))
        shares[order[: in_range[np.argmin(np.abs(in_range - usual))]]] = 1
        return shares
    wanted = fraction * total
    crossing = int(np.searchsorted(ends, wanted))  # The document that reaches the share.
    document = order[crossing]
    if may_cut[document] and np.count_nonzero(by_hash == by_hash[crossing]) == 1:
        shares[order[:crossing]] = 1
        shares[document] = (wanted - (ends[crossing] - sizes[document])) / sizes[document]
    elif len(boundaries):
        starts = np.concatenate([[0], boundaries])
        group_shares = _nearest_groups(np.add.reduceat(sizes[order], starts), wanted)
        shares[order] = np.repeat(group_shares, np.diff([*starts, count]))
    return shares


def check_share(held: int, total: int, fraction: float, sequence_size: int, named: str) -> None:
    """Warn if the held-out share misses the request by more than 1 % and more than one sequence.

    Args:
        held: size of the validation split.
        total: size of both splits; more than 0.
        fraction: fraction that was asked for, `data.validation_fraction`.
        sequence_size: about the size of one sequence.
        named: files, for messages.

    Raises:
        ValueError: One of the splits is nearly empty.
    """
    if abs(held - fraction * total) <= max(TOLERANCE * total, sequence_size):
        return
    cause = "identical documents stay in one split, and a line of a .jsonl file is never cut"
    what = (
        f"{100 * held / total:.3g} % of the text in {named} instead of {100 * fraction:.3g} % "
        f"(data.validation_fraction={fraction}), because {cause}"
    )
    is_small = held < _NEARLY_EMPTY * fraction * total
    if is_small or total - held < _NEARLY_EMPTY * (1 - fraction) * total:
        raise ValueError(
            f"the validation split would be {what}; remove copies, divide long documents, or set "
            "data.validation_fraction=0 to hold out none"
        )
    logger.warning("Held out %s", what)


def _nearest_groups(sizes: np.ndarray, wanted: float) -> np.ndarray:
    """Choose whole groups of identical documents whose total size is near a wanted size.

    Args:
        sizes: int64[number of groups], their sizes in the order of the hashes; at least two.
        wanted: wanted total, more than 0 and less than the sum of the sizes.

    Returns:
        bool[number of groups]: the chosen ones, at least one and not all.
    """
    total = int(sizes.sum())

    def filled(order: np.ndarray) -> np.ndarray:
        if wanted > total / 2:
            return ~_fill(sizes, order, total - wanted)
        return _fill(sizes, order, wanted)

    def error(chosen: np.ndarray) -> float:
        return abs(int(sizes[chosen].sum()) - wanted)

    numbers = np.arange(len(sizes))
    by_hash = filled(numbers)
    # In the order of the hashes, the choice is a sample of all documents. This is better than one
    # that is even nearer but prefers long documents.
    if error(by_hash) <= TOLERANCE * total:
        return by_hash
    by_size = filled(np.argsort(-sizes, kind="stable"))
    lowest = numbers <= np.argmin(np.abs(np.cumsum(sizes)[:-1] - wanted))
    return min((by_hash, by_size, lowest), key=error)


def _fill(sizes: np.ndarray, order: np.ndarray, wanted: float) -> np.ndarray:
    """Choose every group that still fits, in the given order, and one more if that is nearer."""
    chosen = np.zeros(len(sizes), bool)
    remaining_size = wanted
    smallest = sizes.min()
    for number in order:
        if remaining_size < smallest:
            break
        if sizes[number] <= remaining_size:
            chosen[number] = True
            remaining_size -= sizes[number]
    others = np.flatnonzero(~chosen)
    nearest = others[np.argmin(np.abs(sizes[others] - remaining_size))]
    is_nearer = abs(sizes[nearest] - remaining_size) < remaining_size
    if not chosen.any() or (is_nearer and len(others) > 1):
        chosen[nearest] = True
    return chosen
