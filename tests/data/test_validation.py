"""Validation sets that a config names: their rows, and refusals."""

import dataclasses
import json

import datasets
import numpy as np
import pytest

from data.config import DataConfig
from data.corpus import load_corpus, load_validation
from data.examples import Examples
from data.image_config import ImageConfig
from data.named_paths import named_paths
from data.validation import with_split_folders
from tests.data.corpora import documents, jsonl_config
from tests.data.images import test_captioned
from tests.data.images.pictures import folder, targets, values, write_classes
from tests.train.test_evaluation import records

STREAMS = ("causal_lm", "masked_lm", "masked_lm_pairs", "span_corruption")
RECORDS = ("seq2seq", "classification", "chat", "preference")


def lines_of(objective: str) -> list[dict]:
    return records(objective) if objective in RECORDS else [{"text": t} for t in documents()]


def config_of(tmp_path, objective: str, **changes) -> DataConfig:
    """Return a config whose training file has 60 lines, next to b.jsonl with other ones."""
    lines = lines_of(objective)
    template = {"chat_template": "roles"} if objective in ("chat", "preference") else {}
    config = jsonl_config(tmp_path, lines[:40], objective=objective, **template)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[40:]))
    return dataclasses.replace(config, sequence_length=96, **changes)


def all_rows(examples: Examples) -> list[dict[str, np.ndarray]]:
    return [examples[i] for i in range(len(examples))]


def assert_same(found: Examples, expected: Examples) -> None:
    assert len(found) == len(expected) > 0
    for row, other in zip(all_rows(found), all_rows(expected), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("objective", [*STREAMS, *RECORDS])
def test_sets_are_the_rows_of_their_files_and_nothing_is_held_out(objective, tmp_path):
    other = str(tmp_path / "b.jsonl")
    paths = (f"b={other}", f"both={other}", f"both={tmp_path / 'a.jsonl'}", other)
    config = config_of(tmp_path, objective, validation_paths=paths)
    corpus = load_corpus(config)
    assert list(corpus.named_validation) == ["b", "both"]
    plain = dataclasses.replace(config, validation_paths=(), validation_fraction=0)
    alone = load_corpus(plain)
    assert_same(corpus.train, alone.train)
    whole = dataclasses.replace(plain, validation_paths=(other,))
    assert_same(corpus.validation, load_corpus(whole).validation)
    assert_same(corpus.named_validation["b"], corpus.validation)
    assert len(corpus.named_validation["both"]) > len(corpus.validation)
    if objective not in STREAMS:  # in streams, only a split for evaluations keeps a partial row
        assert_same(corpus.validation, load_corpus(with_paths(plain, other)).train)
    # The data of an evaluation needs neither the training data nor its fingerprint.
    (tmp_path / "a.jsonl").unlink()
    unseen = dataclasses.replace(config, validation_paths=(other,))
    assert_same(load_validation(unseen, ImageConfig(), corpus.labels).validation, corpus.validation)


def with_paths(config: DataConfig, *paths: str) -> DataConfig:
    return dataclasses.replace(config, paths=paths)


@pytest.mark.parametrize("objective", [*STREAMS, *RECORDS])
def test_fingerprint_is_of_the_training_data(objective, tmp_path):
    """A run may resume with other validation sets, unless its reference has rows of them."""
    paths = [(str(tmp_path / "a.jsonl"),), (f"b={tmp_path / 'b.jsonl'}",)]
    prints = {
        load_corpus(config_of(tmp_path, objective, validation_paths=each)).fingerprint
        for each in paths
    }
    assert len(prints) == (2 if objective == "preference" else 1)


def test_sets_for_other_sources(tmp_path):
    file = tmp_path / "held.txt"
    file.write_text("some text for validation\n" * 20)
    config = config_of(tmp_path, "causal_lm")
    expected = load_corpus(dataclasses.replace(config, validation_paths=(str(file),))).validation
    mixture = (f"0.5 {tmp_path / 'a.jsonl'}", f"0.5 {tmp_path / 'b.jsonl'}")
    others: list[dict] = [
        {"name": "mixture", "paths": (), "mixture": mixture},
        {"name": f"{__name__}:own_texts", "paths": ()},
    ]
    for changes in others:
        corpus = load_corpus(dataclasses.replace(config, validation_paths=(str(file),), **changes))
        assert_same(corpus.validation, expected)


def own_texts():
    return {"train": documents(), "validation": ["never read " * 99]}


def write_splits(tmp_path, **splits) -> str:
    sets = {name: datasets.Dataset.from_list(lines) for name, lines in splits.items()}
    datasets.DatasetDict(sets).save_to_disk(str(tmp_path / "x=1"))  # pyright: ignore
    return str(tmp_path / "x=1")


def test_splits_of_a_dataset_dict(tmp_path):
    lines = lines_of("classification")
    path = write_splits(tmp_path, train=lines[:40], validation=lines[40:70], test=lines[70:])
    config = config_of(tmp_path, "classification", paths=(path,))
    corpus = load_corpus(config)
    assert (len(corpus.train), len(corpus.validation)) == (40, 30)
    both = dataclasses.replace(config, validation_splits=("validation", "test"))
    sizes = {name: len(rows) for name, rows in load_corpus(both).validation_sets.items()}
    assert sizes == {"validation": 30, "test": 20} and both.validation_names == (
        "validation",
        "test",
    )
    one = load_corpus(dataclasses.replace(config, split="validation", validation_splits=("test",)))
    assert (len(one.train), len(one.validation)) == (30, 20)
    with pytest.raises(ValueError, match=r"no split 'tset'; choose from test, train, validation"):
        load_corpus(dataclasses.replace(config, validation_splits=("tset",)))
    with pytest.raises(ValueError, match="no entry of data.paths=.* is the folder of one"):
        load_corpus(config_of(tmp_path, "classification", validation_splits=("test",)))


def test_folders_of_images(tmp_path):
    write_classes(tmp_path / "train", "ab", 8)
    write_classes(tmp_path / "b", "b", 3, first=100)
    write_classes(tmp_path / "odd", "bc", 1, first=200)
    sets = (f"b={tmp_path / 'b'}", str(tmp_path / "train"))
    paths = (tmp_path / "train", tmp_path / "odd")  # the second folder is for validation
    corpus = folder(tmp_path, *paths, validation_paths=sets)
    assert len(corpus.train) == 16
    named = corpus.named_validation["b"]
    assert values(named) == [100, 101, 102] and set(targets(named)) == {1}
    assert sorted(values(corpus.validation)) == sorted(values(corpus.train))
    with pytest.raises(ValueError, match=r"1 of 2 classes in .*odd do not occur in training: 'c'"):
        folder(tmp_path, tmp_path / "train", validation_paths=(str(tmp_path / "odd"),))
    with pytest.raises(FileNotFoundError, match=r"data\.validation_paths: there is no folder"):
        folder(tmp_path, tmp_path / "train", validation_paths=("nowhere",))
    with pytest.raises(ValueError, match=r"data\.validation_paths=.* must be one folder"):
        folder(tmp_path, tmp_path / "train", validation_paths=("a", "b"))


def test_folder_of_images_named_twice_is_also_the_validation_set(tmp_path):
    write_classes(tmp_path / "train", "ab", 8)
    corpus = folder(tmp_path, tmp_path / "train", tmp_path / "train")
    assert len(corpus.train) == 16
    assert sorted(values(corpus.validation)) == sorted(values(corpus.train))


def test_path_named_twice_is_read_twice():
    config = DataConfig(
        name="megatron", tokenizer="bytes", paths=("a", "b", "a"), global_batch_size=1
    )
    assert with_split_folders(config).paths == ("a", "b", "a")


def test_captioned_images(tmp_path):
    write, line = test_captioned.write, test_captioned.line
    first = write(tmp_path / "first", [line(0, "zero"), line(1, "one")])
    other = write(tmp_path / "other", [line(3, "three")])
    data, images = test_captioned.configs(first, validation_paths=(f"o={other}",))
    corpus = load_corpus(data, images)
    assert len(corpus.train) == 2 and not len(corpus.validation)
    (row,) = all_rows(corpus.named_validation["o"])
    assert (row["images"] == (3, 0, 0)).all() and bytes(row["tokens"][:5].astype("u1")) == b"three"
    alone = load_validation(data, images, ()).named_validation["o"]
    assert_same(alone, corpus.named_validation["o"])


@pytest.mark.parametrize(
    ("objective", "path", "content", "message"),
    [
        ("causal_lm", "nowhere/*.txt", None, r"data\.validation_paths: no file matches"),
        ("chat", "b.jsonl", "\n\n", r"data\.validation_paths: there is no text in .*b\.jsonl"),
        ("causal_lm", "b.txt", "", r"data\.validation_paths: there is no text in .*b\.txt"),
        (
            "classification",
            "b.jsonl",
            '{"text": "a", "label": "label 1"}\n{"text": "a", "label": "new"}\n',
            r"data\.validation_paths: .*b\.jsonl line 2 is held out and has the label 'new'",
        ),
        ("masked_lm", "b.txt", "short", r"the set 'b' is too short for one row"),
    ],
)
def test_bad_sets_are_refused(objective, path, content, message, tmp_path):
    config = config_of(tmp_path, objective)
    if content is not None:
        (tmp_path / path).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_corpus(dataclasses.replace(config, validation_paths=(f"b={tmp_path / path}",)))


def test_names_of_sets():
    paths = ("wiki=a.txt", "./x=1/b.txt", "wiki=c=d.txt", "/x=2/e.txt")
    assert named_paths(paths) == {"wiki": ("a.txt", "c=d.txt"), "": ("./x=1/b.txt", "/x=2/e.txt")}
    config = DataConfig(global_batch_size=1, validation_paths=paths)
    assert config.validation_names == ("wiki", "")
    for bad, message in ((("a=",), "has no path"), (("a=file:///b/c",), "is a URL")):
        with pytest.raises(ValueError, match=message):
            DataConfig(global_batch_size=1, validation_paths=bad)
    with pytest.raises(ValueError, match="both name data to evaluate on"):
        DataConfig(global_batch_size=1, validation_paths=("a",), validation_splits=("test",))
