"""Finds the cheapest set of values to keep when everything else can be recomputed from them.

A minimum cut answers the question. Every value becomes an edge whose capacity is its size in bytes,
a use becomes an edge of unlimited capacity, and the edges of the minimum cut between the values
that cannot be recomputed (`given`) and the `wanted` ones are the values to keep:

    given                                  wanted    wanted
    wide (8) ---+
                +---> narrow (3) --------> y (8) --> z (8)      keep {narrow}: 3 bytes
    other (8) --+

Keeping `narrow` is cheaper than keeping `wide` and `other` (16) or `y` (8), and both `y` and `z`
can be recomputed from it.

Source: the min-cut recomputation of AOTAutograd, He and Yu 2023 (Transcending Runtime-Memory
Tradeoffs in Checkpointing, MLSys), section 3.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow


def cheapest_cut(
    sizes: Mapping[Any, int],
    uses: Iterable[tuple[Any, Any]],
    given: Iterable[Any],
    wanted: Iterable[Any],
) -> set:
    """Return the smallest set of values from which all wanted values can be computed.

    Args:
        sizes: value -> size in bytes, for every value of the graph.
        uses: (a, b) for every value a that is an input of value b, if b may be recomputed.
        given: values that cannot be recomputed. For every wanted value that depends on one of them
            through `uses`, that value or one on the path must be kept.
        wanted: values that must be available.

    Returns:
        The values to keep. Their total size is minimal; above 2**29 bytes in total, it is minimal
        up to rounding of each size to a multiple of (total / 2**29).
    """
    numbers = {value: i for i, value in enumerate(sizes)}
    # Value i is an edge from node 2i to node 2i + 1 with its size as capacity: cutting this edge
    # means keeping the value. All other edges are unlimited, so a minimum cut never contains them.
    source = 2 * len(numbers)
    sink = 2 * len(numbers) + 1
    unit = max(1, sum(sizes.values()) // 2**29)  # scipy's capacities are int32
    widths = {value: max(1, -(-size // unit)) for value, size in sizes.items()}
    unlimited = sum(widths.values()) + 1
    edges = [(2 * numbers[v], 2 * numbers[v] + 1, width) for v, width in widths.items()]
    edges += [(2 * numbers[a] + 1, 2 * numbers[b], unlimited) for a, b in uses]
    edges += [(source, 2 * numbers[v], unlimited) for v in given]
    edges += [(2 * numbers[v] + 1, sink, unlimited) for v in wanted]
    start, end, width = (np.array(column) for column in zip(*dict.fromkeys(edges), strict=True))
    shape = (sink + 1, sink + 1)
    capacity = csr_array((width.astype(np.int32), (start, end)), shape=shape)
    # After a maximum flow, the cut consists of the edges that leave the set of nodes that can still
    # be reached from the source through edges with spare capacity.
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {v for v, i in numbers.items() if 2 * i in reached and 2 * i + 1 not in reached}
