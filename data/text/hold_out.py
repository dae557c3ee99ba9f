"""Chooses the documents of a validation split, by a hash of their content.

    share of the text      |------- 0.05 -------|------------------ 0.95 -------------------|
    documents by hash      h h h h h h h h h h h|c|t t t t t t t t t t t t t t t t t t t t t t

Documents with the smallest hashes are held out (h). In a large corpus, the documents whose hashes
are in the lowest 5 % of the range make up almost exactly 5 % of the text, and adding documents
moves no document to the other split. In a small corpus, single documents are a large part of the
text. The boundary is then moved until the share is within 1 % of the fraction, and the document at
the boundary may be cut in two (c).
"""

import numpy as np

#: Largest difference between the share and the fraction, as a fraction of the text.
TOLERANCE = 0.01


def held_out_shares(
    sizes: np.ndarray, hashes: np.ndarray, may_cut: np.ndarray, fraction: float
) -> np.ndarray:
    """Choose the documents to hold out. Documents with equal hashes are in the same split.

    Args:
        sizes: int64[number of documents], their sizes.
        hashes: uint64[number of documents], hashes of their contents.
        may_cut: bool[number of documents], whether they may be cut in two.
        fraction: The fraction of the total size to hold out.

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
        shares[order[: boundaries[np.argmin(errors)]]] = 1
    return shares
