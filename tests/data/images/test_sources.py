"""Image sources: folders, user functions and TFDS data sets, and their error messages."""

import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.batches import train_batches
from data.corpus import load_validation
from data.image_config import ImageConfig
from tests.data.corpora import SEED
from tests.data.images.pictures import (
    folder,
    image_config,
    load,
    one_broken,
    plain,
    targets,
    values,
    values_of,
    write_classes,
    write_image,
)

# Folders.


@pytest.mark.parametrize("validation", ["val", "validation", "valid", "Val"])
def test_folder_of_splits_has_its_classes_in_the_order_of_their_names(validation, tmp_path):
    write_classes(tmp_path / "i" / "train", "ba", num_images=3)
    write_classes(tmp_path / "i" / validation, "b", num_images=2, first=100)
    corpus = folder(tmp_path, tmp_path / "i")
    assert corpus.labels == ("a", "b")
    assert values(corpus.train) == [3, 4, 5, 0, 1, 2]
    assert targets(corpus.train) == [0, 0, 0, 1, 1, 1]
    assert values(corpus.validation) == [100, 101] and targets(corpus.validation) == [1, 1]
    two = folder(tmp_path, tmp_path / "i" / "train", tmp_path / "i" / validation)
    assert two.fingerprint == corpus.fingerprint and values(two.train) == values(corpus.train)


def test_folder_of_classes_holds_out_a_part_of_each(tmp_path):
    write_classes(tmp_path / "i", "abc", num_images=20)
    write_image(tmp_path / "i" / "b" / "deeper" / "one.JPG", 60)
    (tmp_path / "i" / "b" / "notes.txt").write_text("no image")
    write_image(tmp_path / "i" / ".hidden" / "1.png", 61)
    write_image(tmp_path / "i" / "of_no_class.png", 62)
    corpus = folder(tmp_path, tmp_path / "i", validation_fraction=0.2)
    assert np.bincount(targets(corpus.validation)).tolist() == [4, 4, 4]
    assert np.bincount(targets(corpus.train)).tolist() == [16, 17, 16]
    validation = values(corpus.validation)
    trained = values(corpus.train)
    assert sorted(validation + trained) == list(range(61))
    more = folder(tmp_path, tmp_path / "i", validation_fraction=0.4)
    assert set(validation) < set(values(more.validation))
    assert more.fingerprint != corpus.fingerprint
    assert not len(folder(tmp_path, tmp_path / "i", validation_fraction=0.0).validation)
    # A copy of the folder has the same fingerprint.
    shutil.copytree(tmp_path / "i", tmp_path / "copy")
    copy = folder(tmp_path, tmp_path / "copy", validation_fraction=0.2)
    assert copy.fingerprint == corpus.fingerprint
    write_image(tmp_path / "copy" / "a" / "new.png", 70)
    changed = folder(tmp_path, tmp_path / "copy", validation_fraction=0.2)
    assert changed.fingerprint != corpus.fingerprint


def test_class_called_train_is_a_class(tmp_path):
    for name in ("train", "car"):
        write_classes(tmp_path / "i" / name, [""], num_images=4)
    assert folder(tmp_path, tmp_path / "i", global_batch_size=4).labels == ("car", "train")


@pytest.mark.parametrize("objective", ["image_reconstruction", "image_contrast"])
def test_images_without_labels_may_be_in_any_folder(objective, tmp_path):
    for i in range(6):
        write_image(tmp_path / "i" / f"{i}.png", i)
    write_image(tmp_path / "i" / "deep" / "er" / "6.bmp", 6)
    corpus = folder(tmp_path, tmp_path / "i", objective=objective, validation_fraction=0.2)
    assert corpus.labels == () and len(corpus.train) == 6 and len(corpus.validation) == 1
    assert sorted(values(corpus.train) + values(corpus.validation)) == list(range(7))


def test_small_class_keeps_a_training_image(tmp_path):
    write_classes(tmp_path / "i", "a", num_images=6)
    write_classes(tmp_path / "i", "b", num_images=1, first=50)
    corpus = folder(tmp_path, tmp_path / "i", validation_fraction=0.9, global_batch_size=2)
    assert sorted(targets(corpus.train)) == [0, 1]
    tiny = folder(tmp_path, tmp_path / "i", validation_fraction=0.01)
    assert len(tiny.validation) == 1, "where any is asked for, one is held out"


def make_flat(root):
    for i in range(4):
        write_image(root / f"{i}.png", i)


def make_one_class(root):
    write_classes(root, "a")


def make_empty_class(root):
    write_classes(root, "ab")
    (root / "c").mkdir()
    (root / "d").mkdir()


def make_no_images(root):
    (root / "a").mkdir(parents=True)
    (root / "b").mkdir()


def make_splits_and_more(root):
    for name in ("Train", "val", "extra"):
        write_classes(root / name, "ab")


def make_lacking(root):
    write_classes(root / "train", "ab")
    write_classes(root / "val", "abcd", first=50)


def make_empty_validation(root):
    write_classes(root / "train", "ab")
    write_classes(root / "val", "a", first=50)
    (root / "val" / "b").mkdir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_flat, r"i contains no folders of images, but .* two classes; sort .* folders"),
        (make_one_class, r"i contains only the folder 'a' of images, but .* at least two classes"),
        (
            make_empty_class,
            r"2 of 4 classes in .*i have no images: 'c', 'd'; add images, remove the folders, "
            r"or set images\.on_broken='skip'",
        ),
        (
            make_splits_and_more,
            r"i contains both the splits 'Train', 'val' and the other folders 'extra'; move these",
        ),
        (make_no_images, r"i contains no usable images; add .* one of \.jpg, \.jpeg"),
        (
            make_lacking,
            r"2 of 4 classes in .*val do not occur in .*train: 'c', 'd'; add training .* or set",
        ),
        (make_empty_validation, r"1 of 2 classes in .*val have no images: 'b'; add images"),
    ],
)
def test_bad_folder_is_refused(make, message, tmp_path):
    make(tmp_path / "i")
    with pytest.raises(ValueError, match=message):
        folder(tmp_path, tmp_path / "i")


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nothing .*correct the path"):
        folder(tmp_path, tmp_path / "nothing")


# User functions.


def own(directory, name, **changes):
    return load(
        directory, name=f"tests.data.images.pictures:{name}", global_batch_size=2, **changes
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong_labels",
            r"2 of 4 images .* image 1 of 'train' \(its label 1\.5 must be a string or",
        ),
        (
            "negative_labels",
            r"1 of 2 images .*image 1 of 'train' \(its label -1 must .* at least 0",
        ),
        ("single_class", r"must have at least two labels, all strings or .*, but have 0; fix"),
        (
            "lacking_classes",
            r"1 of 2 images .*image 1 of 'validation' \(its label 'c' does not occur in",
        ),
        ("no_pairs", r"1 of 1 images .*\(it is a ndarray, but must be a pair \(image, label\)\)"),
        ("floats", r"1 of 2 images .*image 1 .*it is a float64 array of shape \(10, 12, 1\), but"),
        ("one_broken", r"2 of 11 images cannot be used: .*image 4 of 'train' \(it is not an image"),
        (
            "failing",
            r"1 of 4 images cannot be used: .*image 2 of 'train' \(KeyError: 'no image 2'\)",
        ),
        ("values_of", r"'tests\.data\.images\.pictures:values_of' failed: TypeError"),
        ("plain", r"failed: TypeError"),
        ("NUM_PLAIN", r"is of type int, but must be a function without arguments"),
    ],
)
def test_bad_own_images_are_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        own(tmp_path, name)


def test_own_images_are_loaded_without_broken_ones(tmp_path):
    name = "tests.data.images.pictures:one_broken"
    corpus = load(tmp_path, ImageConfig(on_broken="skip"), name=name)
    assert corpus.labels == (0, 1) and values(corpus.train) == list(range(9))
    assert targets(corpus.train) == [value % 2 for value in range(9)]
    assert len(one_broken()["train"]) == 11
    assert values(corpus.validation) == [0, 1], "training has no label 2"
    # Workers, which call the function again in another process, read the same images.
    images = ImageConfig(on_broken="skip", num_workers=1)
    config = image_config(tmp_path, name=name)
    workers = next(train_batches(load(tmp_path, images, name=name), config, range(6), seed=SEED))
    here = next(train_batches(corpus, config, range(6), seed=SEED))
    np.testing.assert_array_equal(values_of(workers), values_of(here))


def test_labels_are_ignored_if_the_objective_does_not_use_them(tmp_path):
    corpus = own(tmp_path, "single_class", objective="image_reconstruction")
    assert corpus.labels == () and len(corpus.train) == 2


# TFDS.


def test_digits_hold_out_every_fifth_image_of_scikit_learn(tmp_path):
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    corpus = load(tmp_path, name="digits")
    assert len(corpus.train) == 1438 and len(corpus.validation) == 359
    assert corpus.labels == tuple(map(str, range(10)))
    is_held = np.arange(1797) % 5 == 4
    for examples, chosen in ((corpus.train, ~is_held), (corpus.validation, is_held)):
        rows = [examples[i] for i in range(len(examples))]
        found = {(row["images"].tobytes(), int(row["targets"])) for row in rows}
        pixels = np.rint(digits.images[chosen] * 255 / 16).astype(np.uint8)
        labels = digits.target[chosen]
        assert found == {(p.tobytes(), int(t)) for p, t in zip(pixels, labels, strict=True)}
    some = load(tmp_path, ImageConfig(train_fraction=0.1), name="digits")
    expected = np.rint(np.bincount(targets(corpus.train)) / 10)
    np.testing.assert_array_equal(np.bincount(targets(some.train)), expected)


def make_builder(name, features, splits):
    """Return a TFDS builder class of plain images; TFDS registers it by its name."""
    import tensorflow_datasets as tfds

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def generate(self, split):
        for i in range(splits[split]):
            image = plain(i + 100 * list(splits).index(split))
            label = i % 2
            kinds = {"Image": image, "ClassLabel": label, "Text": "words"}
            yield i, {key: kinds[type(kind).__name__] for key, kind in features.items()}

    fields = {
        "VERSION": tfds.core.Version("1.0.0"),
        "code_path": tfds.core.Path(__file__),
        "_info": info,
        "_split_generators": lambda self, dl: {split: generate(self, split) for split in splits},
        "_generate_examples": generate,
    }
    return type(name, (tfds.core.GeneratorBasedBuilder,), fields)


def test_tfds_set_is_built_from_arrays_and_evaluated_on_its_test_split(tmp_path):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(None, None, 1)),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
        "other": tfds.features.ClassLabel(num_classes=2),
    }
    make_builder("TinyPictures", features, {"train": 12, "test": 5})
    corpus = load(tmp_path, name="tiny_pictures")
    assert corpus.labels == ("cat", "dog")
    assert sorted(values(corpus.train)) == list(range(12))
    assert sorted(values(corpus.validation)) == list(range(100, 105))
    assert targets(corpus.train) == [value % 2 for value in values(corpus.train)]
    assert load(tmp_path, name="tiny_pictures", label_field="other").labels == ("0", "1")
    with pytest.raises(ValueError, match=r"='breed' is not a class .*\['label', 'other'\]"):
        load(tmp_path, name="tiny_pictures", label_field="breed")


def test_named_splits_of_a_tfds_set_are_validation_sets(tmp_path):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(None, None, 1)),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
    }
    make_builder("TinySplits", features, {"train": 12, "validation": 7, "test": 4})

    def read(*splits: str, **changes) -> dict[str, list[int]]:
        corpus = load(tmp_path, name="tiny_splits", validation_splits=splits, **changes)
        sets = {name: sorted(values(rows)) for name, rows in corpus.validation_sets.items()}
        return {"train": sorted(values(corpus.train)), **sets}

    train = [*range(12)]
    validation = [*range(100, 107)]
    test = [*range(200, 204)]
    assert read() == {"train": train, "": validation}
    assert read("test") == {"train": train, "": test}
    both = read("test", "validation")
    assert both == {"train": train, "test": test, "validation": validation}
    assert read("test", split="validation") == {"train": validation, "": test}
    with pytest.raises(
        ValueError, match=r"validation_splits: the TFDS set 'tiny_splits/1.0.0' has"
    ):
        read("tset")
    config = image_config(tmp_path, name="tiny_splits", validation_splits=("test", "validation"))
    unseen = load_validation(config, ImageConfig(channels=1), ("cat", "dog"))
    assert sorted(values(unseen.named_validation["validation"])) == validation
    with pytest.raises(ValueError, match="has the classes 'cat', 'dog', but the model has learned"):
        load_validation(config, ImageConfig(channels=1), ("a", "b"))


def test_tfds_set_without_a_test_split_holds_out_a_part_of_each_class(tmp_path):
    import tensorflow_datasets as tfds

    features = {
        "photo": tfds.features.Image(shape=(None, None, 1)),
        "kind": tfds.features.ClassLabel(num_classes=2),
    }
    make_builder("TinyPhotos", features, {"train": 20})
    corpus = load(tmp_path, name="tiny_photos", validation_fraction=0.2)
    assert np.bincount(targets(corpus.validation)).tolist() == [2, 2]
    assert sorted(values(corpus.train) + values(corpus.validation)) == list(range(20))


def test_unsuitable_tfds_set_is_rejected(tmp_path):
    import tensorflow_datasets as tfds

    image = {"image": tfds.features.Image(shape=(None, None, 1))}
    make_builder("TinyUnlabelled", image, {"train": 12, "test": 5})
    make_builder("TinyWords", {"text": tfds.features.Text()}, {"train": 12})
    make_builder(
        "TinyTest", {**image, "label": tfds.features.ClassLabel(names=["a", "b"])}, {"test": 3}
    )
    with pytest.raises(ValueError, match=r"is not a class .*tiny_unlabelled.*choose a set with cl"):
        load(tmp_path, name="tiny_unlabelled")
    assert len(load(tmp_path, name="tiny_unlabelled", objective="image_contrast").train) == 12
    with pytest.raises(ValueError, match=r"tiny_words.* the features \['text'\], and none of them"):
        load(tmp_path, name="tiny_words")
    with pytest.raises(
        ValueError, match=r"tiny_test/1.0.0' has no split 'train'; choose from test"
    ):
        load(tmp_path, name="tiny_test")
    with pytest.raises(ValueError, match=r"'cifar' is not a TFDS set; .*'cifar10'.*'image_folder'"):
        load(tmp_path, name="cifar")


def test_images_of_another_size_and_colour_are_converted(tmp_path):
    for i, mode in enumerate(("RGB", "L", "RGBA", "P")):
        for name in "ab":
            path = tmp_path / "i" / name / f"{mode}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9 + 5 * i, 14 - i), (255, 0, 0)).convert(mode).save(path)
    corpus = folder(tmp_path, tmp_path / "i", images=ImageConfig(size=6, channels=3))
    for index in range(len(corpus.train)):
        pixels = corpus.train[index]["images"]
        assert pixels.shape == (6, 6, 3)
        # Red, or the gray value of red.
        assert (pixels == pixels[0, 0]).all() and pixels[0, 0].tolist() in ([255, 0, 0], [76] * 3)
