"""Bad images, folders and labels are named and counted, and refused or left out by the config."""

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.array_cache import read_array, write_array
from data.batches import train_batches, validation_batches
from data.examples import BrokenExample
from data.image_config import ImageConfig
from data.images import readability
from tests.data.corpora import take
from tests.data.images.pictures import (
    encoded,
    folder,
    image_config,
    load,
    plain,
    targets,
    values,
    write_classes,
    write_image,
)

SKIP = ImageConfig(on_broken="skip")
NOISE = np.random.default_rng(0).integers(256, size=(60, 70, 3), dtype=np.uint8)


def damaged(kind, at):
    """Return an encoded image with a few bytes changed."""
    content = bytearray(encoded(NOISE, kind))
    content[at : at + 4] = b"oops"
    return bytes(content)


#: Name of a file -> (its content, or a function that creates it; a part of the message about it).
BROKEN = {
    "cut.jpg": (encoded(NOISE, "jpeg")[:-200], "OSError: image file is truncated"),
    "cut.png": (encoded(NOISE, "png")[:-200], "image file is truncated"),
    "damaged.png": (damaged("png", 5000), "broken"),
    "begin.jpg": (damaged("jpeg", 0), "it is not an image in a known format"),
    "empty.png": (b"", "it is empty"),
    "text.jpg": (b"no image at all", "it is not an image in a known format"),
    "link.png": (lambda path: path.symlink_to("nowhere.png"), "FileNotFoundError: No such file"),
    "pipe.png": (os.mkfifo, "it is not a regular file"),
}


def write_broken(path):
    made = BROKEN[path.name][0]
    path.write_bytes(made) if isinstance(made, bytes) else made(path)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_or_left_out(name, tmp_path, caplog):
    write_classes(tmp_path / "i", "ab", num_images=4)
    write_broken(tmp_path / "i" / "a" / name)
    with pytest.raises(ValueError) as caught:
        folder(tmp_path, tmp_path / "i")
    said = str(caught.value)
    assert f"1 of 9 images cannot be used: {tmp_path}/i/a/{name} (" in said
    assert BROKEN[name][1] in said and said.endswith(
        "set images.on_broken='skip' to leave them out"
    )
    corpus = folder(tmp_path, tmp_path / "i", images=SKIP)
    assert sorted(values(corpus.train) + values(corpus.validation)) == list(range(8))
    assert said.partition(";")[0] in caplog.text and "left out" in caplog.text


def test_many_broken_files_are_counted_and_three_named(tmp_path):
    write_classes(tmp_path / "i", "ab", num_images=6)
    for name in BROKEN:
        write_broken(tmp_path / "i" / "b" / name)
    with pytest.raises(ValueError) as caught:
        folder(tmp_path, tmp_path / "i")
    said = str(caught.value)
    assert "8 of 20 images cannot be used" in said and "and 5 more; fix or remove them" in said
    assert sum(name in said for name in BROKEN) == 3


def refusing(function, path):
    """Wrap a function such that it lacks permission for `path`, which root would always have."""

    def call(given):
        if str(given) == str(path):
            raise PermissionError(13, "Permission denied", str(given))
        return function(given)

    return call


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, caplog):
    root = tmp_path / "i"
    write_classes(root, "ab", num_images=4)
    write_image(root / "a" / "deep" / "9.png", 9)
    with monkeypatch.context() as patch:
        file = root / "a" / "0.png"
        patch.setattr(Path, "read_bytes", refusing(Path.read_bytes, file))
        with pytest.raises(
            ValueError, match=r"1 of 9 images .*0\.png \(PermissionError: Permission"
        ):
            folder(tmp_path, root)
        assert len(folder(tmp_path, root, images=SKIP, validation_fraction=0.0).train) == 8
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refusing(os.scandir, root / "a" / "deep"))
        with pytest.raises(
            ValueError, match=r"1 folder\(s\) .*a/deep \(Permission denied\); fix .*skip"
        ):
            folder(tmp_path, root)
        assert len(folder(tmp_path, root, images=SKIP, validation_fraction=0.0).train) == 8
    assert (
        "PermissionError" in caplog.text and "a/deep (Permission denied); left out" in caplog.text
    )


# Folders and classes.


def test_folder_that_leads_back_is_refused_or_left_out(tmp_path, caplog):
    root = tmp_path / "i"
    write_classes(root, "ab", num_images=4)
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a")
    # Two links to each other's folder; following both leads back to the first folder.
    (root / "a" / "to_b").symlink_to(root / "b")
    (root / "b" / "to_a").symlink_to(root / "a")
    with pytest.raises(ValueError, match=r"\d folder\(s\) in .*leads back .*on_broken='skip'"):
        folder(tmp_path, root)
    corpus = folder(tmp_path, root, images=SKIP)
    assert "leads back" in caplog.text
    # Links to other folders are followed: each class has its own images and the other class's.
    assert len(corpus.train) + len(corpus.validation) == 16
    for link in ("up", "self"):
        (root / "a" / link).unlink()
    (root / "b" / "to_a").unlink()
    assert (
        sorted(targets(folder(tmp_path, root, validation_fraction=0.0).train)) == [0] * 8 + [1] * 4
    )


def test_empty_classes_are_left_out_and_the_others_numbered_anew(tmp_path, caplog):
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


def test_too_few_classes_or_images_left_are_refused(tmp_path):
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


def test_names_of_any_kind(tmp_path, caplog):
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


def test_files_of_every_kind_give_the_pixels_they_show(tmp_path):
    grey = NOISE[:, :, 0]
    kinds = {
        "grey.png": Image.fromarray(grey),
        "deep.png": Image.fromarray(grey.astype(np.uint16) << 8),
        "alpha.png": Image.fromarray(grey).convert("RGBA"),
        "palette.png": Image.fromarray(grey).convert("P"),
        "palette.gif": Image.fromarray(grey).convert("P"),
        "ink.tiff": Image.fromarray(grey).convert("CMYK"),
        "lossless.webp": Image.fromarray(grey).convert("RGB"),
    }
    for name, image in kinds.items():
        for label in "ab":
            path = tmp_path / "i" / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, lossless=True)
    expected = Image.fromarray(grey).resize((16, 16), Image.Resampling.BICUBIC)
    for channels in (1, 3):
        images = ImageConfig(size=16, channels=channels)
        corpus = folder(tmp_path, tmp_path / "i", images=images, validation_fraction=0.0)
        assert len(corpus.train) == 2 * len(kinds)
        batch = next(train_batches(corpus, image_config(tmp_path, global_batch_size=16), range(16)))
        wanted = np.asarray(expected).astype(int)[None, :, :, None]
        # Conversions between modes round values twice.
        assert np.abs(batch["images"].astype(int) - wanted).max() <= 2


# Changes during a run.


def test_image_that_breaks_later_is_named(tmp_path):
    write_classes(tmp_path / "i", "ab")
    corpus = folder(tmp_path, tmp_path / "i")
    shutil.rmtree(tmp_path / "i" / "a")
    with pytest.raises(
        BrokenExample, match=r"/a/\d\.png cannot be read: FileNotFoundError: .*skip"
    ):
        values(corpus.train)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_image_that_breaks_later_gets_no_weight(num_workers, tmp_path, caplog, capfd):
    write_classes(tmp_path / "i", "ab")
    images = ImageConfig(mixup=0.5, on_broken="skip", num_workers=num_workers)
    config = image_config(tmp_path, global_batch_size=4)
    whole = folder(tmp_path, tmp_path / "i", images=images, validation_fraction=0.25)
    expected = take(train_batches(whole, config, range(4)), 6)
    held = list(validation_batches(whole, config, range(4)))
    corpus = folder(tmp_path, tmp_path / "i", images=images, validation_fraction=0.25)
    shutil.rmtree(tmp_path / "i" / "a")
    found = take(train_batches(corpus, config, range(4)), 6)
    is_left = np.stack([batch["weights"] for batch in found])
    # Class a is lost. All of class b remains, and is not mixed with lost images.
    np.testing.assert_array_equal(is_left, np.stack([batch["targets"] for batch in expected]))
    assert 0 < is_left.sum() < is_left.size
    for batch, before in zip(found, expected, strict=True):
        for row in np.flatnonzero(batch["weights"]):
            for key in batch if batch["weights"][row ^ 1] else ():
                np.testing.assert_array_equal(batch[key][row], before[key][row])
            if not batch["weights"][row ^ 1]:
                assert batch["target_shares"][row] == 1 and batch["targets"][row] == 1
    for batch, before in zip(validation_batches(corpus, config, range(4)), held, strict=True):
        np.testing.assert_array_equal(batch["weights"], before["weights"] * before["targets"])
    said = caplog.text + capfd.readouterr().err
    assert "cannot be read: FileNotFoundError" in said and "left out" in said
    names = [line for line in said.splitlines() if "left out" in line]
    assert len({line.partition(" cannot")[0][-12:] for line in names}) == 8


# The cache.


def test_sound_images_are_checked_once_until_they_change(tmp_path, monkeypatch):
    write_classes(tmp_path / "i", "ab", num_images=5)
    checked = []

    def counted(content):
        checked.append(content)
        return problem_of(content)

    problem_of = readability.problem_of
    monkeypatch.setattr(readability, "problem_of", counted)
    folder(tmp_path, tmp_path / "i")
    assert len(checked) == 10
    folder(tmp_path, tmp_path / "i")
    assert len(checked) == 10
    changed = tmp_path / "i" / "a" / "0.png"
    changed.write_bytes(changed.read_bytes())
    os.utime(changed, ns=(1, 1))
    write_image(tmp_path / "i" / "b" / "new.png", 77)
    folder(tmp_path, tmp_path / "i")
    assert len(checked) == 12
    changed.write_bytes(b"")
    with pytest.raises(ValueError, match=r"1 of 11 images cannot be used: .*0\.png"):
        folder(tmp_path, tmp_path / "i")
    assert len(checked) == 13
    # A damaged cache is built again.
    (cache,) = (tmp_path / "cache").glob("sound-images-*.npy")
    cache.write_bytes(cache.read_bytes()[:50])
    changed.unlink()
    folder(tmp_path, tmp_path / "i")
    kept = read_array(cache)
    assert len(checked) == 23 and kept is not None and len(kept) == 10


def test_those_who_start_together_check_once(tmp_path, monkeypatch):
    write_classes(tmp_path / "i", "ab", num_images=20)
    checked = []
    problem_of = readability.problem_of
    monkeypatch.setattr(
        readability, "problem_of", lambda content: checked.append(1) or problem_of(content)
    )
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: folder(tmp_path, tmp_path / "i"), range(4)))
    assert len(checked) == 40
    assert len({corpus.fingerprint for corpus in found}) == 1


def test_array_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.npy"
    write_array(path, np.arange(3))

    def full(file, values):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_array(path, np.arange(4))
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]
    np.testing.assert_array_equal(read_array(path), np.arange(3))
    assert read_array(tmp_path / "b.npy") is None


# TFDS.


def test_labels_and_images_of_tfds_that_cannot_be_used(tmp_path, caplog):
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
