"""Images in tars in the format of WebDataset are read as `datasets` reads them."""

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from data.images.captioned import load_captioned_images
from tests.data.images.test_captioned import configs
from tests.data.images.test_tables import corpus_of, encoded

datasets.disable_progress_bars()

NAMES = ["ant", "dog wolf", "tabby, tabby cat"]


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(directory: Path, label_file: str) -> tuple[str, ...]:
    """Write 30 images into two shards, with labels in files `.cls` or `.json`."""
    directory.mkdir()
    for shard in range(2):
        files = {}
        for number in range(15 * shard, 15 * (shard + 1)):
            key = f"train/{number:06d}"
            label = number % 3
            files[f"{key}.png"] = encoded(number)
            if label_file == "cls":
                files[f"{key}.cls"] = f"{label}\n".encode()
            else:
                files[f"{key}.json"] = json.dumps({"kind": NAMES[label], "size": 3}).encode()
            files[f"{key}.txt"] = f"a picture of {NAMES[label]}, number {number}".encode()
            files[f"{key}.mask.bin"] = b"left out"
        write_tar(directory / f"shard-{shard}.tar", files)
    return (str(directory / "shard-*.tar"),)


def pixels_of(content: bytes) -> bytes:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).tobytes()


def images_of(corpus: Any) -> dict[bytes, str]:
    """Return the pixels of the images of a corpus -> their label."""
    labels = {}
    for rows in (corpus.train, corpus.validation):
        for index in range(len(rows)):
            image, label = rows._source.read(index)
            labels[np.asarray(image.convert("RGB")).tobytes()] = corpus.labels[label]
    return labels


@pytest.mark.parametrize("label_file", ["cls", "json"])
def test_images_and_labels_are_those_that_datasets_reads(label_file, tmp_path):
    paths = write_shards(tmp_path / "shards", label_file)
    corpus = corpus_of(paths, tmp_path / "cache", label_field="kind")
    rows: Any = datasets.load_dataset(
        "webdataset", data_files=list(paths), split="train", cache_dir=str(tmp_path / "datasets")
    ).cast_column("png", datasets.Image(decode=False))
    expected = {}
    for row in rows:
        image = row["png"]["bytes"]
        label = f"{row['cls']:05d}" if label_file == "cls" else row["json"]["kind"]
        expected[pixels_of(image)] = label
    assert images_of(corpus) == expected
    assert len(expected) == 30


def test_captions_are_read_from_texts_and_from_json(tmp_path):
    paths = write_shards(tmp_path / "shards", "cls")
    changes = {"paths": paths, "sequence_length": 64, "validation_fraction": 0.2}
    corpus = load_captioned_images(*configs(tmp_path / "unused", **changes))
    texts = set()
    for rows in (corpus.train, corpus.validation):
        for index in range(len(rows)):
            tokens = rows[index]["tokens"].tolist()
            texts.add(corpus.tokenizer.decode(tokens[: tokens.index(corpus.tokenizer.eos_id)]))
    assert texts == {f"a picture of {NAMES[n % 3]}, number {n}" for n in range(30)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1.png": b"x"}, "sample '/1' of {tar} has neither a .cls nor a .json with data.label"),
        ({"1.png": b"x", "1.json": b"{}"}, "neither a .cls nor a .json with data.label_field='la"),
        ({"1.png": b"x", "1.jpg": b"x"}, "has the images jpg, png, but must have one"),
        ({"1.png": b"x", "1.cls": b"../../out"}, "has the label '../../out', which cannot name"),
        ({"1.png": b"x", "1.cls": b"\xff"}, "a text of sample '/1' of {tar} is not UTF-8"),
        ({"1.cls": b"1"}, "{tar} has no images (.jpg, "),
        ({"1.png": b"x", "1.json": b"{"}, "the .json of sample '/1' of {tar}"),
    ],
)
def test_unsuitable_tars_are_refused_and_leave_nothing(files, message, tmp_path):
    tar = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(ValueError, match=re.escape(message.format(tar=tar))):
        corpus_of((str(tar),), tmp_path / "cache")
    folder = tmp_path / "cache" / "image_tables"
    assert {path.suffix for path in folder.iterdir()} == {".lock"}


def test_cut_and_other_files_are_refused(tmp_path):
    tar = write_tar(tmp_path / "a.tar", {f"{n}.png": encoded(n) for n in range(4)})
    whole = tar.read_bytes()
    for content in (whole[:700], b"no tar" * 500, b""):
        tar.write_bytes(content)
        with pytest.raises(ValueError, match="is not a whole tar|has no images"):
            corpus_of((str(tar),), tmp_path / "cache", objective="image_contrast")


def test_links_and_paths_out_of_the_tar_write_nothing(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(["../../up/1.png", "/abs/2.png", "3.png"] * 4):
            content = encoded(number)
            member = tarfile.TarInfo(name.replace(".png", f"{number}.png"))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("9.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        tar.addfile(link)
    corpus = corpus_of((str(path),), tmp_path / "cache", objective="image_contrast")
    assert len(corpus.train) + len(corpus.validation) == 12
    written = [*tmp_path.glob("**/*.png"), *tmp_path.glob("**/*.bmp")]
    assert len(written) == 12
    assert all(file.is_relative_to(tmp_path / "cache" / "image_tables") for file in written)
