"""Folders of images with a metadata.jsonl: rows, the split, and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from data.config import DataConfig
from data.corpus import load_corpus
from data.image_config import ImageConfig
from data.images.captioned import load_captioned_images
from data.shapes import example_shapes


def write(folder, lines, images=4):
    folder.mkdir(parents=True)
    for number in range(images):
        Image.new("RGB", (12, 9), (number, 0, 0)).save(folder / f"{number}.png")
    text = "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines)
    (folder / "metadata.jsonl").write_text(text)
    return folder


def line(number, text="a caption"):
    return {"file_name": f"{number}.png", "text": text}


def configs(folder, **changes):
    images = {key: changes.pop(key) for key in ("on_broken", "num_workers") if key in changes}
    fields = {
        "name": "image_folder",
        "paths": (str(folder),),
        "objective": "image_text",
        "tokenizer": "bytes",
        "sequence_length": 8,
        "global_batch_size": 1,
        "validation_fraction": 0.0,
        "cache_dir": str(folder.parent / "cache"),
    }
    return DataConfig(**fields | changes), ImageConfig(size=8, channels=3, **images)


def test_rows_have_the_image_and_its_caption(tmp_path):
    folder = write(tmp_path / "images", [line(2, "two"), line(0, "much longer"), "", line(2, "2")])
    data, images = configs(folder)
    corpus = load_captioned_images(data, images)
    assert len(corpus.train) == 3
    eos = corpus.tokenizer.eos_id
    texts = []
    for index, number in enumerate((2, 0, 2)):
        row = corpus.train[index]
        shapes = {name: (value.shape, value.dtype) for name, value in row.items()}
        assert shapes == example_shapes(data, images)
        assert (row["images"] == (number, 0, 0)).all()
        end = int(np.argmax(row["tokens"] == eos))
        texts.append(corpus.tokenizer.decode(row["tokens"][:end]))
    assert texts == ["two", "much lo", "2"]  # the end-of-text token is kept


def test_each_split_has_its_own_captions(tmp_path):
    write(tmp_path / "images" / "train", [line(0, "a"), line(1, "b")])
    write(tmp_path / "images" / "val", [line(3, "c")])
    corpus = load_captioned_images(*configs(tmp_path / "images"))
    decode = corpus.tokenizer.decode
    assert [decode(corpus.train[i]["tokens"][:1]) for i in range(2)] == ["a", "b"]
    assert [decode(corpus.validation[0]["tokens"][:1])] == ["c"]


def test_worker_processes_read_the_same_rows(tmp_path):
    folder = write(tmp_path / "images", [line(i, f"{i}") for i in range(4)])
    rows = [load_corpus(*configs(folder, num_workers=n)).train for n in (0, 1)]
    batches = [each.train_batch([0, 1], lambda element: 3 - element, 5) for each in rows]
    for name, values in batches[0].items():
        np.testing.assert_array_equal(batches[1][name], values)


def test_changed_caption_changes_the_fingerprint(tmp_path):
    folders = [write(tmp_path / x / "images", [line(0, x)]) for x in ("a", "b")]
    prints = {load_corpus(*configs(folder)).fingerprint for folder in folders}
    assert len(prints) == 2


@pytest.mark.parametrize(
    "bad, message",
    [
        (line(1, " "), r"line 2 of .*metadata.jsonl \(its caption is empty\); add"),
        (line(9), r"line 2 of .*metadata.jsonl \(there is no image '9.png' in"),
    ],
)
def test_unusable_line_is_refused_or_skipped(bad, message, tmp_path):
    folder = write(tmp_path / "images", [line(0), bad])
    with pytest.raises(ValueError, match=message):
        load_corpus(*configs(folder))
    assert len(load_corpus(*configs(folder, on_broken="skip")).train) == 1


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"file_name": "1.png"}, r"line 2 of .* has the fields \['file_name'\], but no string in"),
        ({"image": 3, "text": "a"}, r"has the fields \['image', 'text'\], but no string in"),
        ({"file_name": "../1.png", "text": "a"}, "file_name='../1.png', which must be a path with"),
        ("[1]", "line 2 of"),
    ],
)
def test_line_without_image_and_caption_is_refused(bad, message, tmp_path):
    folder = write(tmp_path / "images", [line(0), bad])
    with pytest.raises(ValueError, match=message):
        load_corpus(*configs(folder, on_broken="skip"))


def test_folder_without_captions_is_refused(tmp_path):
    folder = write(tmp_path / "images", [])
    with pytest.raises(ValueError, match="has no usable lines; add lines such as"):
        load_corpus(*configs(folder))
    (folder / "metadata.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="has no metadata.jsonl, from which"):
        load_corpus(*configs(folder))


def test_captions_need_a_folder_of_images():
    with pytest.raises(ValueError, match="set data.name='image_folder'"):
        DataConfig(global_batch_size=1, name="digits", objective="image_text")
