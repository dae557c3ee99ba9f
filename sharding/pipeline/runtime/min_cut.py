"""The cheapest set of values to keep, where what is not kept can be computed again.

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
    """Returns the values to keep so that all `wanted` ones can be had again, of least total size.

    Args:
      sizes: of every value.
      uses: (a, b) for every value a that b is computed from, if b may be computed again.
      given: values that cannot be computed again; those that are wanted through `uses` must be
        kept, or something on the way from them.
      wanted: values.
    """
    numbers = {value: i for i, value in enumerate(sizes)}
    # A value is an edge from node 2i to node 2i + 1, as wide as it is large.
    source, sink = 2 * len(numbers), 2 * len(numbers) + 1
    unit = max(1, sum(sizes.values()) // 2**29)  # capacities are int32
    widths = {value: max(1, -(-size // unit)) for value, size in sizes.items()}
    unlimited = sum(widths.values()) + 1
    edges = [(2 * numbers[v], 2 * numbers[v] + 1, width) for v, width in widths.items()]
    edges += [(2 * numbers[a] + 1, 2 * numbers[b], unlimited) for a, b in uses]
    edges += [(source, 2 * numbers[v], unlimited) for v in given]
    edges += [(2 * numbers[v] + 1, sink, unlimited) for v in wanted]
    start, end, width = (np.array(column) for column in zip(*dict.fromkeys(edges), strict=True))
    shape = (sink + 1, sink + 1)
    capacity = csr_array((width.astype(np.int32), (start, end)), shape=shape)
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {v for v, i in numbers.items() if 2 * i in reached and 2 * i + 1 not in reached}
