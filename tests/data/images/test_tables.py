"""Images in Parquet and Arrow files give the same rows as in folders."""

import io
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.config import DataConfig
from data.corpus import load_corpus
from data.image_config import ImageConfig

datasets.disable_progress_bars()

NAMES = ["tabby, tabby cat", "dog/wolf", "ant"]
FOLDERS = ["tabby, tabby cat", "dog_wolf", "ant"]


def encoded(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, ["PNG", "BMP"][number % 2])
    return stream.getvalue()


ROWS = [{"image": {"bytes": encoded(i), "path": None}, "label": i % 3} for i in range(30)]
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})


def write_folders(directory: Path) -> tuple[str, ...]:
    for number, row in enumerate(ROWS):
        folder = directory / FOLDERS[row["label"]]
        folder.mkdir(parents=True, exist_ok=True)
        suffix = [".png", ".bmp"][number % 2]
        (folder / f"{number:09d}{suffix}").write_bytes(row["image"]["bytes"])
    return (str(directory),)


def write_tables(kind: str, directory: Path) -> tuple[str, ...]:
    rows = datasets.Dataset.from_list(ROWS, features=FEATURES)
    if kind == "saved":
        rows.save_to_disk(str(directory / "saved"), num_shards=2)
        return (str(directory / "saved"),)
    directory.mkdir()
    for shard in range(2):
        part = rows.select(range(15 * shard, 15 * (shard + 1)))
        part.to_parquet(str(directory / f"train-{shard}.parquet"), batch_size=4)
    return (str(directory / "train-*.parquet"),)


def corpus_of(paths: tuple[str, ...], cache: Path, **changes: Any):
    values: dict[str, Any] = {
        "name": "image_folder",
        "paths": paths,
        "objective": "image_classification",
        "global_batch_size": 4,
        "validation_fraction": 0.2,
        "cache_dir": str(cache),
    }
    images = ImageConfig(size=8, num_workers=0)
    return load_corpus(DataConfig(**values | changes), images)


@pytest.mark.parametrize("objective", ["image_classification", "image_reconstruction"])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_tables_give_the_same_rows_as_folders(kind, objective, tmp_path):
    changes = {"objective": objective}
    expected = corpus_of(write_folders(tmp_path / "folders"), tmp_path / "cache")
    found = corpus_of(write_tables(kind, tmp_path / "tables"), tmp_path / "cache", **changes)
    if objective == "image_reconstruction":  # without labels, all images are in one folder
        assert found.labels == ()
        assert len(found.train) + len(found.validation) == len(ROWS)
        return
    assert found.labels == expected.labels == tuple(sorted(FOLDERS))
    assert found.fingerprint == expected.fingerprint
    for split in ("train", "validation"):
        a, b = (getattr(corpus, split) for corpus in (expected, found))
        assert len(a) == len(b) > 0
        before, after = (each.evaluation_batch(range(len(a))) for each in (a, b))
        for key in before:
            np.testing.assert_array_equal(before[key], after[key])


def plain(directory: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Write rows as another program would, without a schema of `datasets`."""
    pq.write_table(pa.Table.from_pylist(rows), directory / "rows.parquet")
    return (str(directory / "rows.parquet"),)


def test_tables_of_other_programs_have_numbers_or_names_as_labels(tmp_path):
    numbers = [{"picture": encoded(i), "label": 9 + i % 3} for i in range(12)]
    found = corpus_of(plain(tmp_path, numbers), tmp_path / "cache")
    assert found.labels == ("00009", "00010", "00011")
    names = [{"picture": encoded(i), "kind": "ab"[i % 2]} for i in range(12)]
    paths = plain(tmp_path, names)
    found = corpus_of((*paths, *paths), tmp_path / "cache", label_field="kind")
    assert found.labels == ("a", "b") and len(found.validation) == 12


def test_a_table_is_unpacked_once_and_again_after_a_change(tmp_path):
    paths = plain(tmp_path, [{"image": encoded(i), "label": i % 2} for i in range(12)])
    first = corpus_of(paths, tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache" / "image_tables").iterdir() if path.is_dir())
    before = folder.stat().st_mtime_ns
    assert corpus_of(paths, tmp_path / "cache").fingerprint == first.fingerprint
    assert folder.stat().st_mtime_ns == before
    plain(tmp_path, [{"image": encoded(i), "label": i % 2} for i in range(14)])
    assert corpus_of(paths, tmp_path / "cache").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": 1}, "has the columns text, label, of which none can be images"),
        ({"a": b"", "b": b""}, "of which a, b can be images; it needs one, or one named 'image'"),
        ({"image": b""}, "data.label_field='label' is not among the columns image of"),
        ({"image": b"", "label": 0.5}, "labels must be whole numbers or strings"),
        ({"image": b"", "label": -1}, "has the label -1, which cannot name a class"),
        ({"image": b"", "label": None}, "data.label_field='label' has the type null"),
        ({"image": b"", "label": "../../out"}, "has the label '../../out', which cannot name"),
        ({"image": b"", "label": "a\0b"}, r"has the label 'a\x00b', which cannot name"),
        ({"image": {"bytes": None, "path": "a"}, "label": 1}, "the columns image, label, of which"),
    ],
)
def test_unsuitable_tables_are_refused_and_leave_nothing(row, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        corpus_of(plain(tmp_path, [row, row]), tmp_path / "cache")
    folder = tmp_path / "cache" / "image_tables"
    assert {path.suffix for path in folder.iterdir()} == {".lock"}


def test_images_that_are_not_embedded_are_refused(tmp_path):
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": None, "path": "elsewhere.png"}], kind)
    pq.write_table(pa.table({"image": images}), tmp_path / "rows.parquet")
    paths = (str(tmp_path / "rows.parquet"),)
    with pytest.raises(ValueError, match="row 0 of .* has no bytes in 'image'; embed the images"):
        corpus_of(paths, tmp_path / "cache", objective="image_contrast")


def test_broken_images_are_named_by_their_row(tmp_path):
    rows = [{"image": encoded(i), "label": i % 2} for i in range(12)]
    rows[7]["image"] = b"no image"
    with pytest.raises(ValueError, match=r"00001/000000007\.jpg \(it is not an image in a known"):
        corpus_of(plain(tmp_path, rows), tmp_path / "cache")
