"""Mixtures of several sources: their configs, and the order in which their rows are read."""

import dataclasses
from collections.abc import Callable, Sequence

from data.blend import Blend, parse_mixture
from data.config import DataConfig
from data.formats import format_of


def sources(config: DataConfig) -> list[DataConfig]:
    """Split the config of a mixture into one config per source.

    Returns:
        The config of each source, in the order of `data.mixture`. If the corpus is not a mixture,
        the config itself is the only one.

    Raises:
        ValueError: A source contradicts the other fields of the config.
    """
    if config.name != "mixture":
        return [config]
    return [_source(config, source) for _, source in parse_mixture(config.mixture)]


def mixed_order(
    config: DataConfig, orders: Sequence[Callable[[int], int]], offsets: Sequence[int]
) -> Callable[[int], int]:
    """Return a function that maps an element of the mixed stream to a row.

    The stream is endless, and takes the weighted share of each source (see `Blend`). Rows are
    numbered as if the sources were concatenated.

    Args:
        orders: for each source, a function that maps an element of that source's own shuffled
            stream to a row of the source.
        offsets: for each source, the number of its first row in the concatenation.
    """
    blend = Blend([share for share, _ in parse_mixture(config.mixture)])

    def order(element: int) -> int:
        source, number = blend[element]
        return offsets[source] + orders[source](number)

    return order


def _source(config: DataConfig, source: str) -> DataConfig:
    paths = ()
    name = source
    if format_of(source) is not None:
        paths = (source,)
        name = "text"
    elif source.endswith((".bin", ".idx")):
        paths = (source,)
        name = "megatron"
    return dataclasses.replace(config, name=name, paths=paths, mixture=())
