"""Text from TFDS, including the corpus python_stdlib, which the project builds itself."""

import dataclasses
import logging
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data.config import DataConfig
from data.corpus import load_corpus, load_validation
from data.image_config import ImageConfig
from data.text.documents import find_corpus, open_documents
from data.tfds_sets import open_split
from tests.data.corpora import tokens_of, user_config


@pytest.fixture(scope="session")
def stdlib_config(tmp_path_factory):
    """The corpus python_stdlib, built once per module."""
    cache = tmp_path_factory.mktemp("cache")
    config = DataConfig(sequence_length=64, global_batch_size=4, cache_dir=str(cache))
    open_documents(config)
    return config


def test_python_stdlib_is_the_machines_own_library(stdlib_config):
    documents = open_documents(stdlib_config)
    train = set(documents["train"])
    validation = set(documents["validation"])
    texts = train | validation
    root = Path(sysconfig.get_paths()["stdlib"])
    for present in ("dataclasses.py", "json/decoder.py", "asyncio/events.py"):
        assert (root / present).read_text() in texts
    for absent in ("test/support/__init__.py", "pydoc_data/topics.py"):
        if (root / absent).exists():
            assert (root / absent).read_text() not in texts
    assert not train & validation
    assert 0.02 < len(validation) / len(texts) < 0.10  # 5 % of the files, by hash.


def test_python_stdlib_needs_no_tensorflow_and_is_built_once(stdlib_config, caplog):
    with caplog.at_level(logging.INFO, logger="data"):
        again = find_corpus(stdlib_config)
    assert not [record for record in caplog.records if record.name.startswith("data")]
    assert again.key == find_corpus(stdlib_config).key
    assert "tensorflow" not in sys.modules
    version = f"1.{sys.version_info.major * 100 + sys.version_info.minor}.{sys.version_info.micro}"
    assert f"python_stdlib/{version}" in again.key


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("pattern", ["*.array_record-00000*", "dataset_info.json"])
def test_damaged_python_stdlib_is_built_again(damage, pattern, stdlib_config, tmp_path, caplog):
    expected = list(open_documents(stdlib_config)["train"])
    shutil.copytree(stdlib_config.cache_path, tmp_path, dirs_exist_ok=True)
    config = dataclasses.replace(stdlib_config, cache_dir=str(tmp_path))
    damage(next(tmp_path.glob(f"tensorflow_datasets/python_stdlib/*/{pattern}")))
    assert list(open_documents(config)["train"]) == expected
    assert "is damaged or was not completed; it is built again" in caplog.text
    caplog.clear()
    open_documents(config)
    assert not caplog.text


def test_damaged_example_of_another_tfds_set_names_its_directory(stdlib_config, tmp_path):
    import tensorflow_datasets as tfds

    shutil.copytree(stdlib_config.cache_path, tmp_path, dirs_exist_ok=True)
    file = next(tmp_path.glob("tensorflow_datasets/python_stdlib/*/*train.array_record-00000*"))
    examples = open_split(tfds.builder_from_directory(str(file.parent)), "train")
    truncate(file)
    with pytest.raises(ValueError, match=rf"of the train split of the TFDS set at {file.parent} "):
        list(examples)


def make_builder(name: str, splits: dict[str, range]) -> None:
    """Register a TFDS set of texts with numbers."""
    import tensorflow_datasets as tfds

    def info(self):
        features = {"prose": tfds.features.Text(), "year": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def generate(self, _):
        return {
            split: ((i, {"prose": f"prosa {i} é", "year": i}) for i in numbers)
            for split, numbers in splits.items()
        }

    fields = {
        "VERSION": tfds.core.Version("1.0.0"),
        "code_path": tfds.core.Path(__file__),
        "_info": info,
        "_split_generators": generate,
        "_generate_examples": lambda self: iter(()),
    }
    type(name, (tfds.core.GeneratorBasedBuilder,), fields)


def test_named_splits_of_a_tfds_set_are_validation_sets(tmp_path):
    splits = {"train": range(40), "validation": range(40, 50), "dev_2": range(50, 70)}
    make_builder("TinyChapters", splits)
    config = dataclasses.replace(
        user_config("tiny_chapters", tmp_path),
        tokenizer="bytes",
        validation_splits=("dev_2", "validation"),
    )

    def texts(examples) -> set[int]:
        text = bytes(token for token in tokens_of(examples) if token < 256).decode(errors="ignore")
        return {int(number) for number in re.findall(r"prosa (\d+) é", text)}

    corpus = load_corpus(config)
    assert corpus.validation_sets.keys() == {"dev_2", "validation"}
    # A row may cut a text in two, and the last tokens of the training split fill no row.
    assert texts(corpus.train) <= {*range(40)} and len(texts(corpus.train)) > 30
    assert texts(corpus.validation_sets["dev_2"]) == {*range(50, 70)}
    assert texts(corpus.validation_sets["validation"]) == {*range(40, 50)}
    alone = load_validation(config, ImageConfig(), ()).validation_sets
    assert texts(alone["dev_2"]) == {*range(50, 70)}
    other = dataclasses.replace(config, split="dev_2", validation_splits=("validation",))
    documents = open_documents(other)
    assert len(documents["train"]) == 20 and len(documents["validation"]) == 0
    assert find_corpus(other).key != find_corpus(dataclasses.replace(other, split="train")).key
    for changes, key in (
        ({"validation_splits": ("dev",)}, "validation_splits"),
        (
            {"split": "dev", "validation_splits": ()},
            "split",
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"data\.{key}: .*'dev'; choose from dev_2, train, va"
        ):
            load_corpus(dataclasses.replace(config, **changes))


def test_tfds_set_without_validation_holds_out_the_end_of_train(tmp_path):
    make_builder("TinyProse", {"train": range(40)})
    config = user_config("tiny_prose", tmp_path)
    config = dataclasses.replace(config, validation_fraction=0.1)
    documents = open_documents(config)
    assert len(documents["train"]) == 36 and len(documents["validation"]) == 4
    read = sorted(set(documents["train"]) | set(documents["validation"]))
    assert read == sorted(f"prosa {i} é" for i in range(40))
    none = open_documents(dataclasses.replace(config, validation_fraction=0.0))
    assert len(none["train"]) == 40 and len(none["validation"]) == 0
    with pytest.raises(ValueError, match=r"data\.text_field='year'.*\['prose', 'year'\].*prose"):
        open_documents(dataclasses.replace(config, text_field="year"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wiki41b/en", r"data\.name='wiki41b/en' is not a TFDS set; .*'wiki40b'.*'text'"),
        ("wiki40b/english", r"data\.name='wiki40b/english': .*'wiki40b' has no config 'english'"),
        ("mnist", r"data\.text_field='text' is not a text feature .*\['image', 'label'\]"),
    ],
)
def test_tfds_rejects_unknown_names_before_any_download(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_documents(user_config(name, tmp_path))
