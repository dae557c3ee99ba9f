"""Broken images are named and counted, and refused or left out by the config."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from data.batches import train_batches, validation_batches
from data.examples import BrokenExample
from data.image_config import ImageConfig
from tests.data.corpora import SEED, take
from tests.data.images.pictures import (
    encoded,
    folder,
    image_config,
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
    # 8 KB that decode to 67 million pixels.
    "bomb.png": (
        lambda path: Image.new("1", (8193, 8192)).save(path),
        "8193 × 8192 pixels, but at most 67,108,864 are decoded",
    ),
    "pipe.png": (os.mkfifo, "it is not a regular file"),
}


def write_broken(path):
    made = BROKEN[path.name][0]
    path.write_bytes(made) if isinstance(made, bytes) else made(path)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_rejected_or_left_out(name, tmp_path, caplog):
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


def test_many_broken_files_are_counted_and_three_are_named(tmp_path):
    write_classes(tmp_path / "i", "ab", num_images=6)
    for name in BROKEN:
        write_broken(tmp_path / "i" / "b" / name)
    with pytest.raises(ValueError) as caught:
        folder(tmp_path, tmp_path / "i")
    said = str(caught.value)
    assert "9 of 21 images cannot be used" in said and "and 6 more; fix or remove them" in said
    assert sum(name in said for name in BROKEN) == 3


def refusing(function, path):
    """Wrap a function such that it lacks permission for `path`, which root would always have."""

    def call(given, *args, **kwargs):
        if str(given) == str(path):
            raise PermissionError(13, "Permission denied", str(given))
        return function(given, *args, **kwargs)

    return call


def test_files_without_read_permission_are_named(tmp_path, monkeypatch, caplog):
    root = tmp_path / "i"
    write_classes(root, "ab", num_images=4)
    write_image(root / "a" / "deep" / "9.png", 9)
    with monkeypatch.context() as patch:
        file = root / "a" / "0.png"
        patch.setattr(os, "open", refusing(os.open, file))
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


def test_every_image_format_gives_the_expected_pixels(tmp_path):
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
        batch = next(
            train_batches(
                corpus, image_config(tmp_path, global_batch_size=16), range(16), seed=SEED
            )
        )
        wanted = np.asarray(expected).astype(int)[None, :, :, None]
        # Conversions between modes round values twice.
        assert np.abs(batch["images"].astype(int) - wanted).max() <= 2


def test_image_that_is_replaced_later_is_named(tmp_path):
    """Otherwise an image that was swapped with another class would train with the wrong label."""
    write_classes(tmp_path / "i", "ab")
    corpus = folder(tmp_path, tmp_path / "i")
    a, b = (sorted((tmp_path / "i" / name).iterdir()) for name in "ab")
    for one, other in zip(a, b, strict=True):
        (tmp_path / "swap").write_bytes(one.read_bytes())
        one.write_bytes(other.read_bytes())
        other.write_bytes((tmp_path / "swap").read_bytes())
    with pytest.raises(BrokenExample, match=r"\.png cannot be read: ValueError: it has changed"):
        values(corpus.train)


def test_image_that_breaks_later_is_named(tmp_path):
    write_classes(tmp_path / "i", "ab")
    corpus = folder(tmp_path, tmp_path / "i")
    shutil.rmtree(tmp_path / "i" / "a")
    with pytest.raises(
        BrokenExample, match=r"/a/\d\.png cannot be read: FileNotFoundError: .*skip"
    ):
        values(corpus.train)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_image_that_breaks_later_has_zero_weight(num_workers, tmp_path, caplog, capfd):
    write_classes(tmp_path / "i", "ab")
    images = ImageConfig(mixup=0.5, on_broken="skip", num_workers=num_workers)
    config = image_config(tmp_path, global_batch_size=4)
    whole = folder(tmp_path, tmp_path / "i", images=images, validation_fraction=0.25)
    expected = take(train_batches(whole, config, range(4), seed=SEED), 6)
    whole_batches = list(validation_batches(whole, config, range(4)))
    corpus = folder(tmp_path, tmp_path / "i", images=images, validation_fraction=0.25)
    shutil.rmtree(tmp_path / "i" / "a")
    found = take(train_batches(corpus, config, range(4), seed=SEED), 6)
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
    for batch, before in zip(
        validation_batches(corpus, config, range(4)), whole_batches, strict=True
    ):
        np.testing.assert_array_equal(batch["weights"], before["weights"] * before["targets"])
    said = caplog.text + capfd.readouterr().err
    assert "cannot be read: FileNotFoundError" in said and "left out" in said
    names = [line for line in said.splitlines() if "left out" in line]
    assert len({line.partition(" cannot")[0][-12:] for line in names}) == 8


def test_image_that_would_start_a_program_is_not_an_image(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("subprocess.check_call", refuse)
    write_classes(tmp_path / "i", "ab", num_images=2)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "i" / "a" / "photo.jpg").write_bytes(eps)
    with pytest.raises(ValueError, match=r"photo\.jpg \(it is not an image in a known format\)"):
        folder(tmp_path, tmp_path / "i")
