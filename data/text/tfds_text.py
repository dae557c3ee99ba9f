"""TFDS data sets of text as sequences of documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import tfds_sets
from data.tfds_sets import open_split


class TfdsDocuments(Sequence[str]):
    """The texts of some examples of a split, read and decoded on access.

    Args:
        source: examples of the split.
        text_feature: feature that contains the text.
        positions: positions of the examples to keep; None keeps all of them.
    """

    def __init__(self, source: Sequence[Any], text_feature: str, positions: range | None = None):
        self._source = source
        self._text_feature = text_feature
        self._positions = range(len(source)) if positions is None else positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        text = self._source[self._positions[index]][self._text_feature]
        # Users cannot repair a bad byte in a published data set, so it is replaced.
        return text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text


def open_builder(name: str, text_field: str, cache_path: Path) -> Any:
    """Return the builder of a prepared TFDS data set of text; download and build it on first use.

    Args:
        text_field: feature that contains the text.

    Raises:
        ValueError: TFDS has no such data set, the data set has no such text feature, or it could
            not be prepared.
    """
    return tfds_sets.open_builder(
        name, cache_path, lambda builder: _text_feature(builder, text_field)
    )


def open_builder_documents(
    builder: Any, text_field: str, validation_fraction: float
) -> dict[str, Sequence[str]]:
    """Return the train and validation documents of a data set.

    If the data set has no validation split, the last part of its train split is held out. This is
    a random sample, because TFDS shuffles a data set by hash when it builds it.

    Args:
        text_field: feature that contains the text.
        validation_fraction: fraction of the train split to hold out.

    Returns:
        Split -> its documents, read on access.

    Raises:
        ValueError: The data set has no train split, no such text feature or no random access.
    """
    name = builder.info.full_name
    feature = _text_feature(builder, text_field)
    splits = builder.info.splits
    if "train" not in splits:
        raise ValueError(
            f"data.name: the TFDS set {name!r} has the splits {sorted(splits)}, but no 'train'; "
            "choose a set that has one"
        )
    train = open_split(builder, "train")
    if "validation" in splits:
        validation = open_split(builder, "validation")
        return {
            "train": TfdsDocuments(train, feature),
            "validation": TfdsDocuments(validation, feature),
        }
    # At least one document is held out, unless the fraction is 0.
    num_held = max(round(len(train) * validation_fraction), 1) if validation_fraction else 0
    positions = range(len(train))
    num_train = max(len(train) - num_held, 0)
    return {
        "train": TfdsDocuments(train, feature, positions[:num_train]),
        "validation": TfdsDocuments(train, feature, positions[num_train:]),
    }


def _text_feature(builder: Any, text_field: str) -> str:
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
