"""TFDS data sets of text as sequences of documents."""

from collections.abc import Sequence
from typing import Any

from data import tfds_sets
from data.sequences import LazySequence, hold_out_last


def open_tfds_documents(
    builder: Any, feature: str, split: str, validation_fraction: float | None
) -> dict[str, Sequence[str]]:
    """Return the documents of a split of a prepared data set, and those to evaluate on.

    They are read on access. If the data set has no validation split, the last part of the split is
    held out. This is a random sample, because TFDS shuffles a data set by hash when it builds it.

    Args:
        validation_fraction: fraction to hold out; None: the validation split is empty.

    Raises:
        ValueError: The data set has no random access.
    """
    train = _texts(builder, split, feature)
    if validation_fraction is None:
        return {"train": train, "validation": ()}
    if "validation" not in builder.info.splits:
        return hold_out_last([train], validation_fraction)
    return {"train": train, "validation": _texts(builder, "validation", feature)}


def _texts(builder: Any, split: str, feature: str) -> Sequence[str]:
    examples = tfds_sets.open_split(builder, split)

    def read(index: int) -> str:
        text = examples[index][feature]
        # Users cannot repair a bad byte in a published data set, so it is replaced.
        return text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text

    return LazySequence(len(examples), read)


def find_text_feature(builder: Any, text_field: str) -> str:
    """Return the feature of a data set that contains the text.

    Raises:
        ValueError: `data.text_field` is none of its text features.
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    texts = [key for key, value in features.items() if isinstance(value, tfds.features.Text)]
    if text_field in texts:
        return text_field
    # With the default field name, the only text feature is used regardless of its name.
    if text_field == "text" and len(texts) == 1:
        return texts[0]
    remedy = f"set data.text_field to one of {sorted(texts)}" if texts else "choose a text data set"
    raise ValueError(
        f"data.text_field={text_field!r} is not a text feature of the TFDS set "
        f"{builder.info.full_name!r}, whose features are {sorted(features)}; {remedy}"
    )
