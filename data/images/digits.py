"""The TFDS data set `digits`: scikit-learn's handwritten digits.

It has 1,797 images of 8×8 pixels by 43 writers, and needs no download. Importing this module
imports tensorflow_datasets, which is slow, so it is imported only when the data set is used.

Source: Alpaydin and Kaynak 1998, "Optical recognition of handwritten digits" (UCI), its test set.
"""

import io
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

# Every fifth image is held out. Images are ordered by writer, so all writers are in both splits.
_HELD_OUT_EVERY = 5
# The maximum value of a pixel in scikit-learn, which counts how many of 16 finer pixels are inked.
_MAX_VALUE = 16


class Digits(tfds.core.GeneratorBasedBuilder):
    """Builder of {'image', 'label'} examples, without TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Every fifth image held out."}
    # Without this, TFDS locates this file with the optional library importlib_resources.
    code_path = tfds.core.Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of scikit-learn, pixels from 0 to 255.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://scikit-learn.org/stable/modules/generated/sklearn.datasets.load_digits.html",
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # Nothing is downloaded.
        return {
            "train": self._generate_examples(is_validation=False),
            "validation": self._generate_examples(is_validation=True),
        }

    def _generate_examples(self, *, is_validation: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            if (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == is_validation:
                stream = io.BytesIO()
                levels = (pixels * 255 / _MAX_VALUE).round().astype("uint8")
                Image.fromarray(levels).save(stream, "png")
                yield number, {"image": stream.getvalue(), "label": int(label)}
