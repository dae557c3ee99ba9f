"""Paths of datasets on the Hugging Face hub: which files they stand for, and their splits."""

import io
import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from data.config import DataConfig
from data.corpus import load_corpus, load_validation
from data.hub_files import hub_splits, with_local_files
from data.image_config import ImageConfig
from data.text.hub_tokenizer import local_tokenizer
from data.text.tokenization.file_tokenizer import load_tokenizer_file
from data.validation import with_split_folders
from tests.hub import use_hub
from tests.hugging_face import save_tokenizer

TEXTS = "hf://datasets/me/texts"


def config(*paths: str, **fields) -> DataConfig:
    defaults = {"name": "text", "tokenizer": "bytes", "sequence_length": 8, "global_batch_size": 2}
    return DataConfig(paths=paths, **{**defaults, **fields})


def parquet(**columns) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), stream)
    return stream.getvalue()


def splits(path: str, *, reads_images: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the splits of a path, without the commits in their entries."""
    entries = hub_splits(path, reads_images=reads_images)
    without = {}
    for split, names in entries.items():
        assert all(name.startswith(f"{TEXTS}@") for name in names)
        without[split] = tuple(name[len(TEXTS) + 42 :] for name in names)
    return without


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        (["a.jsonl", "b.jsonl"], "", {"": ("*.jsonl",)}),
        (["a.jsonl"], "", {"": ("a.jsonl",)}),
        (
            ["data/train-0.csv", "data/train-1.csv", "data/test-0.csv", "LICENSE.txt"],
            "",
            {"train": ("data/train-*.csv",), "test": ("data/test-0.csv",)},
        ),
        (
            ["train/0.csv", "dev/0.csv"],
            "",
            {"train": ("train/0.csv",), "validation": ("dev/0.csv",)},
        ),
        (["en/train.csv", "fr/train.csv"], "en", {"train": ("en/train.csv",)}),
        (["trainer.csv", "contest.csv"], "", {"": ("*.csv",)}),
        (["a[1].txt", "a[2].txt"], "", {"": ("a[1].txt", "a[2].txt")}),
        (["a.csv", "b.csv"], "a.csv", {}),
        (["a.csv", "b.csv"], "*.csv", {}),
    ],
)
def test_folder_has_the_splits_that_names_tell(files, path, expected, hub):
    hub.commit("me/texts", dict.fromkeys(files, b"text"), kind="datasets")
    named = splits(f"{TEXTS}/{path}" if path else TEXTS)
    assert {split: set(names) for split, names in named.items()} == {
        split: set(names) for split, names in expected.items()
    }


def test_files_without_a_split_are_logged(hub, caplog):
    files = ("train.csv", "test2.csv", "a.csv", "b.csv", "c.csv", "d.csv")
    hub.commit("me/texts", dict.fromkeys(files, b"text"), kind="datasets")
    with caplog.at_level("INFO"):
        assert splits(TEXTS) == {"train": ("train.csv",), "test": ("test2.csv",)}
    lines = [each.message for each in caplog.records if each.name == "data.hub_files"]
    why = "because other files have the name of a split"
    assert lines == [f"{TEXTS}: a.csv, b.csv, c.csv and 1 more are not read, {why}"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["en/a.csv", "fr/a.csv"], "data in 2 folders (en, fr), which may be different"),
        (
            ["a.csv", "b.txt"],
            f"files of 2 formats (.csv, .txt); name those to read, such as {TEXTS}/*.csv",
        ),
        (["config.json"], "has no files that can be read"),
    ],
)
def test_folder_of_several_kinds_is_refused(files, problem, hub):
    hub.commit("me/texts", dict.fromkeys(files, b"text"), kind="datasets")
    with pytest.raises(ValueError) as raised:
        hub_splits(TEXTS, reads_images=False)
    assert problem in str(raised.value)


def test_splits_are_trained_and_evaluated_on(hub):
    files = {f"{split}.csv": f"text\n{split}\n".encode() for split in ("train", "val", "test")}
    hub.commit("me/texts", files, kind="datasets")
    chosen = with_split_folders(config(TEXTS))
    local = with_local_files(chosen)
    assert [path.rpartition("/")[2] for path in local.paths] == ["train.csv"]
    assert [path.rpartition("/")[2] for path in local.validation_paths] == ["val.csv"]
    assert sorted(hub.downloads()) == ["train.csv", "val.csv"]
    named = with_split_folders(
        config(TEXTS, split="test", validation_splits=("train", "validation"))
    )
    assert [path.rpartition("/")[2] for path in named.paths] == ["test.csv"]
    assert named.validation_names == ("train", "validation")
    with pytest.raises(ValueError, match="no split 'dev'; choose from test, train, validation"):
        with_split_folders(config(TEXTS, split="dev"))


@pytest.mark.parametrize("path", ["data/*.csv", "**/*.csv", "data/a.csv", "data"])
def test_path_stands_for_the_same_files_as_on_disk(path, hub):
    names = ("data/a.csv", "data/b.csv", "data/sub/c.csv", "d.csv")
    files = {name: f"text\n{name}\n".encode() for name in names}
    commit = hub.commit("me/texts", files, kind="datasets")
    local = with_local_files(config(f"{TEXTS}@{commit}/{path}")).paths
    assert local == with_local_files(config(f"{TEXTS}/{path}")).paths
    (entry,) = local
    assert entry.endswith(f"/snapshots/{commit}/{path}")
    expected = {
        "data/*.csv": {"data/a.csv", "data/b.csv"},
        "**/*.csv": {*files},
        "data/a.csv": {"data/a.csv"},
        "data": {"data/a.csv", "data/b.csv", "data/sub/c.csv"},
    }
    assert {*hub.downloads()} == expected[path]


@pytest.mark.parametrize("path", ["", "/data", "/data/*.csv", "/data/b.csv"])
def test_files_that_the_cache_may_lack_are_refused_without_a_network(
    path, hub, monkeypatch, tmp_path
):
    """A download of single files leaves no list of all files."""
    files = {"data/a.csv": b"text\n1\n", "data/b.csv": b"text\n2\n"}
    hub.commit("me/texts", files, kind="datasets")
    huggingface_hub.hf_hub_download("me/texts", "data/a.csv", repo_type="dataset")
    use_hub(monkeypatch, hub.url, tmp_path / "hf_home", is_offline=True)
    (file,) = with_local_files(with_split_folders(config(f"{TEXTS}/data/a.csv"))).paths
    assert Path(file).read_bytes() == files["data/a.csv"]
    for read in (with_split_folders, with_local_files):
        with pytest.raises(ConnectionError, match="'hf download --repo-type=dataset me/texts --re"):
            read(config(TEXTS + path))


def test_pickle_of_a_dataset_is_not_downloaded(hub):
    hub.commit("me/texts", {"a.csv": b"text\n1\n", "a.pkl": b"code"}, kind="datasets")
    with pytest.raises(
        ValueError, match=r"data.paths: no file of data in .* matches 'a.pkl'.* a.csv"
    ):
        with_local_files(config(f"{TEXTS}/a.pkl"))
    assert hub.downloads() == []


def test_corpus_equals_that_of_local_files(hub, tmp_path):
    texts = [f"document {i} " * 9 for i in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    files = {"train.jsonl": lines.encode(), "test.parquet": parquet(text=texts[:5])}
    hub.commit("me/texts", files, kind="datasets")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    fields = {"cache_dir": str(tmp_path / "cache")}
    corpora = [
        load_corpus(
            config(f"{place}/train.jsonl", validation_paths=(f"t={place}/test.parquet",), **fields)
        )
        for place in (TEXTS, tmp_path)
    ]
    assert corpora[0].fingerprint == corpora[1].fingerprint
    assert len(corpora[0].train) == len(corpora[1].train)
    ours, theirs = (corpus.named_validation["t"][0]["tokens"] for corpus in corpora)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("en/a.csv", "en/b.csv", "c.csv"), {"en/a.csv", "en/b.csv"}),
        (("en/train.csv", "en/val.csv", "en/test.csv"), {"en/val.csv"}),
        (("en/test-0.csv", "en/test-1.csv"), {"en/test-0.csv", "en/test-1.csv"}),
    ],
)
def test_folder_of_the_hub_is_a_validation_set(files, expected, hub, tmp_path):
    text = "text\n" + "some text\n" * 40
    contents = {file: f"{text}{file}\n".encode() for file in files}  # equal ones are read once
    hub.commit("me/texts", contents, kind="datasets")
    (tmp_path / "a.txt").write_text(text)
    fields = {"validation_paths": (f"en={TEXTS}/en",), "cache_dir": str(tmp_path / "cache")}
    section = config(str(tmp_path / "a.txt"), **fields)
    corpus = load_corpus(section)
    assert {*hub.downloads()} == expected
    alone = load_validation(section, ImageConfig(), ())
    for loaded in (corpus, alone):
        assert len(loaded.named_validation["en"]) > 0


def test_folder_of_the_hub_with_several_splits_is_no_validation_set(hub):
    hub.commit("me/texts", {"train.csv": b"text\n1\n", "test.csv": b"text\n"}, kind="datasets")
    with pytest.raises(
        ValueError, match=r"^data.validation_paths: .*/texts has the splits test, t"
    ):
        with_split_folders(config("a.txt", validation_paths=(TEXTS,)))


def image(color: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("path", ["", "/train"])
def test_folder_of_images_is_read(path, hub, tmp_path):
    folders = ("train/a", "train/b", "val/a", "val/b")
    files = {
        f"{folder}/{i}.png": image(20 * i + number)
        for number, folder in enumerate(folders)
        for i in range(4)
    }
    hub.commit("me/texts", files, kind="datasets")
    section = DataConfig(
        name="image_folder",
        objective="image_classification",
        paths=(TEXTS + path,),
        global_batch_size=2,
        validation_fraction=0.25,
        cache_dir=str(tmp_path),
    )
    corpus = load_corpus(section, ImageConfig(size=8))
    assert corpus.labels == ("a", "b")
    assert len(corpus.train) == (6 if path else 8)


def test_table_of_images_is_read(hub, tmp_path):
    rows = [{"bytes": image(20 * i), "path": None} for i in range(8)]
    content = parquet(image=rows, label=["a", "b"] * 4)
    files = {"data/train-0.parquet": content, "data/validation-0.parquet": content}
    hub.commit("me/texts", files, kind="datasets")
    section = DataConfig(
        name="image_folder",
        objective="image_classification",
        paths=(TEXTS,),
        global_batch_size=2,
        cache_dir=str(tmp_path),
    )
    corpus = load_corpus(section, ImageConfig(size=8))
    assert (corpus.labels, len(corpus.train), len(corpus.validation)) == (("a", "b"), 8, 8)


def test_tokenizer_is_downloaded_without_weights(hub, tmp_path):
    save_tokenizer(tmp_path)
    files = {
        "tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(),
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "model.safetensors": b"weights",
        "onnx/config.json": b"{}",
    }
    hub.commit("me/gpt", files)
    tokenizer = load_tokenizer_file(local_tokenizer("me/gpt"))
    local = load_tokenizer_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.fingerprint == local.fingerprint
    assert {*hub.downloads()} == {*files} - {"model.safetensors", "onnx/config.json"}
    hub.commit("me/none", {"config.json": b"{}"})
    with pytest.raises(ValueError, match="data.tokenizer='me/none' has neither a tokenizer.json"):
        local_tokenizer("me/none")
