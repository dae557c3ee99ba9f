"""Folders and classes of images: links, empty classes, odd names, and unusable labels."""

import logging
import os
from pathlib import Path

import pytest

from data.image_config import ImageConfig
from tests.data.images.pictures import (
    encoded,
    folder,
    load,
    plain,
    targets,
    values,
    write_classes,
    write_image,
)

SKIP = ImageConfig(on_broken="skip")


def test_folder_cycle_is_rejected_or_left_out(tmp_path, caplog):
    root = tmp_path / "i"
    write_classes(root, "ab", num_images=4)
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a")
    with pytest.raises(ValueError, match=r"\d folder\(s\) in .*leads back .*on_broken='skip'"):
        folder(tmp_path, root)
    corpus = folder(tmp_path, root, images=SKIP)
    assert "leads back" in caplog.text
    assert len(corpus.train) + len(corpus.validation) == 8


def test_links_do_not_multiply_images(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    root = tmp_path / "i"
    write_classes(root, "ab", num_images=4)
    write_classes(tmp_path / "elsewhere", "c", num_images=2, first=50)
    # Links to each other's folder, to a file, and twice to a folder and a file outside.
    (root / "a" / "to_b").symlink_to(root / "b")
    (root / "b" / "to_a").symlink_to(root / "a")
    first = min((root / "a").glob("*.png"))
    (root / "b" / "again.png").symlink_to(first)
    for number in range(3):
        (root / "a" / f"outside{number}").symlink_to(tmp_path / "elsewhere" / "c")
    found = folder(tmp_path, root, validation_fraction=0.0).train
    assert sorted(targets(found)) == [0] * 6 + [1] * 4
    assert "5 link(s) in" in caplog.text
    assert "lead to images that are listed anyway: a/outside1, a/outside2, a/to_b" in caplog.text


def test_empty_classes_are_left_out_and_the_others_renumbered(tmp_path, caplog):
    root = tmp_path / "i"
    write_classes(root / "train", "bd", num_images=3)
    write_classes(root / "val", "bcd", num_images=2, first=50)
    (root / "train" / "a").mkdir()
    (root / "train" / "c").mkdir()
    (root / "train" / "c" / "1.png").write_text("none")
    corpus = folder(tmp_path, root, images=SKIP)
    assert corpus.labels == ("b", "d")
    assert targets(corpus.train) == [0, 0, 0, 1, 1, 1]
    assert values(corpus.validation) == [50, 51, 54, 55]
    assert targets(corpus.validation) == [0, 0, 1, 1]
    for said in (
        "1 of 4 classes in",
        "train have no images: 'a'; left out",
        "1 of 13 images cannot be used",
        "1 of 3 classes in",
        "train have no images: 'c'; left out",
        "train: 'c'; left out",
    ):
        assert said in caplog.text, said


def test_too_few_remaining_classes_or_images_are_rejected(tmp_path):
    write_classes(tmp_path / "one", "a")
    (tmp_path / "one" / "b").mkdir()
    with pytest.raises(ValueError, match=r"of 2 classes in .*one only 1 has usable images"):
        folder(tmp_path, tmp_path / "one", images=SKIP)
    write_classes(tmp_path / "two" / "train", "ab")
    for name in "ab":
        (tmp_path / "two" / "val" / name).mkdir(parents=True)
        (tmp_path / "two" / "val" / name / "1.png").write_text("none")
    with pytest.raises(ValueError, match=r"val contains no usable images"):
        folder(tmp_path, tmp_path / "two", images=SKIP)


def test_unusual_file_and_class_names_are_supported(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    root = tmp_path / "i"
    write_classes(root, ["große Katze", "犬 いぬ"], num_images=4)
    write_image(root / "große Katze" / "犬 いぬ" / "ein Bild.png", 8)
    (root / ".DS_Store").write_text("hidden")
    (root / "犬 いぬ" / "._1.png").write_text("hidden")
    (root / "犬 いぬ" / "Thumbs.db").write_text("no image")
    write_image(root / "of no class.png", 62)
    odd = os.fsencode(root / "犬 いぬ") + b"/\xff.png"
    Path(os.fsdecode(odd)).write_bytes(encoded(plain(9), "png"))
    corpus = folder(tmp_path, root, validation_fraction=0.0)
    assert corpus.labels == ("große Katze", "犬 いぬ")
    assert sorted(zip(targets(corpus.train), values(corpus.train), strict=True)) == [
        *((0, value) for value in (0, 1, 2, 3, 8)),
        *((1, value) for value in (4, 5, 6, 7, 9)),
    ]
    assert "1 file(s) in" in caplog.text and "Thumbs.db" in caplog.text
    assert "1 image(s) in" in caplog.text and "hidden" not in caplog.text
    Path(os.fsdecode(os.fsencode(root) + b"/\xff")).mkdir()
    with pytest.raises(ValueError, match=r"contains the class b'.xff', whose name is not UTF-8; r"):
        folder(tmp_path, root)


def test_unusable_tfds_labels_and_images_are_rejected(tmp_path, caplog):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(None, None, 1), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
    }
    made = [(encoded(plain(i), "png"), i % 2) for i in range(12)]
    made[3] = (b"\x89PNG broken", 1)
    made[5] = (made[5][0], -1)

    class TinyBroken(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = tfds.core.Path(__file__)

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0), "test": self._generate_examples(10)}

        def _generate_examples(self, start):
            for i, (image, label) in enumerate(made[start:]):
                yield i, {"image": image, "label": label}

    with pytest.raises(ValueError) as caught:
        load(tmp_path, name="tiny_broken")
    said = str(caught.value)
    assert "2 of 12 images cannot be used" in said and "on_broken='skip'" in said
    assert "it is not an image in a known format" in said
    assert "its label -1 must be one of the 2 classes 0 to 1" in said
    corpus = load(tmp_path, SKIP, name="tiny_broken")
    assert "2 of 12 images cannot be used" in caplog.text
    assert sorted(values(corpus.train)) == [0, 1, 2, 4, *range(6, 12)]
    assert targets(corpus.train) == [value % 2 for value in values(corpus.train)]
    assert sorted(values(corpus.validation)) == [10, 11]
    # An objective without labels does not check them.
    with pytest.raises(ValueError, match="1 of 12 images cannot be used"):
        load(tmp_path, name="tiny_broken", objective="image_reconstruction")
