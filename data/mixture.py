"""A mixture of sources: what each is, and the order of their rows in the stream."""

import dataclasses
from collections.abc import Callable, Sequence

from data.blend import Blend, parse_mixture
from data.config import DataConfig


def sources(config: DataConfig) -> list[DataConfig]:
    """Returns a config for each source of a mixture; for other data, the config itself.

    Raises:
        ValueError: A source does not go with the other fields of the config.
    """
    if config.name != "mixture":
        return [config]
    return [_source(config, source) for _, source in parse_mixture(config.mixture)]


def mixed_order(
    config: DataConfig, orders: Sequence[Callable[[int], int]], offsets: Sequence[int]
) -> Callable[[int], int]:
    """Returns what tells the row, of all rows of the sources, that each element of the stream is.

    Args:
        config: Of the shares.
        orders: What tells the row that each element is, by source.
        offsets: The number of each source's first row among all rows.
    """
    blend = Blend([share for share, _ in parse_mixture(config.mixture)])

    def order(element: int) -> int:
        source, number = blend[element]
        return offsets[source] + orders[source](number)

    return order


def _source(config: DataConfig, source: str) -> DataConfig:
    paths, name = (), source
    if source.endswith((".txt", ".jsonl")):
        paths, name = (source,), "text"
    elif source.endswith((".bin", ".idx")):
        paths, name = (source,), "megatron"
    return dataclasses.replace(config, name=name, paths=paths, mixture=())
