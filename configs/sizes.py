"""What the published sizes of all models have in common."""

from collections.abc import Iterable

from ml_collections import ConfigDict


def at_scale(
    config: ConfigDict, *, sequence_length: int, vocab_size: int, learning_rate: float
) -> None:
    """Sets what the published sizes of a model share: a long run on accelerators."""
    config.data.vocab_size = vocab_size
    config.data.sequence_length = sequence_length
    config.data.global_batch_size = 512
    config.train.num_microbatches = 16
    config.train.num_steps = 100_000
    config.train.remat = "dots"
    config.optimizer.learning_rate = learning_rate
    config.optimizer.warmup_steps = 2000
    config.eval.every_steps = 1000
    config.checkpoint.every_steps = 1000
    config.precision.compute = "bfloat16"
    config.log.every_steps = 10


def choose(model: str, size: str, sizes: Iterable[str]) -> None:
    """Checks that `size` is "tiny" or one of a model's published sizes.

    Raises:
        ValueError: it is neither.
    """
    if size != "tiny" and size not in sizes:
        raise ValueError(f"{model} has no size {size!r}; choose from tiny, {', '.join(sizes)}")
