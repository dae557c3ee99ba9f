"""Images and texts get the same labels as from transformers' pipelines, and as in evaluations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from convert.source import read_source
from convert.to_hf import main as export
from data.config import DataConfig
from data.corpus import load_corpus
from generate.classify import main, read_image
from generate.image_eval import read_sections
from tests.runs import ROOT
from train.main import main as train

_CHANGES = (
    "data.name=image_folder",
    "data.global_batch_size=6",
    "data.validation_fraction=0.5",
    "images.size=12",
    "images.channels=3",
    "images.eval_crop=0.8",
    "model.num_layers=1",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.patch_size=4",
    "optimizer.learning_rate=0.01",
    "optimizer.warmup_steps=0",
    "train.num_steps=2",
    "checkpoint.every_steps=0",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run that was trained on a folder, and the folder: images of several sizes."""
    directory = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    sizes = ((12, 12), (30, 30), (17, 17), (40, 24), (13, 31), (64, 64))
    for name in ("ant", "bee"):
        (directory / "images" / name).mkdir(parents=True)
        for i, (height, width) in enumerate(sizes):
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(directory / "images" / name / f"{i}.png")
    changes = (*_CHANGES, f"data.paths={directory}/images", f"data.cache_dir={directory}/cache")
    flags = [f"--config.{change}" for change in changes]
    run = directory / "run"
    assert train([f"--config={ROOT}/configs/vit.py", f"--workdir={run}", *flags]) == 0
    return run, directory / "images"


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["", "data=2,model=2"])
def test_probabilities_equal_those_of_a_pipeline_of_transformers(photos, mesh, tmp_path, capsys):
    run, images = photos
    assert export([str(run), f"{tmp_path}/vit"]) == 0
    # The image processor of transformers squashes images that are not square, and has no crop.
    files = [str(images / name / f"{i}.png") for name in ("ant", "bee") for i in (0, 1, 2, 5)]
    arguments = [f"--model={tmp_path}/vit", "--batch_size=6", f"--mesh={mesh}", "--json"]
    capsys.readouterr()
    assert main([*arguments, *files]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in lines] == files
    pipeline: Any = transformers.pipeline("image-classification", model=f"{tmp_path}/vit")
    for line, file in zip(lines, files, strict=True):
        expected = {entry["label"]: entry["score"] for entry in pipeline(file)}
        assert [*line["labels"]] == [*expected]  # the most likely label first
        for label, probability in line["labels"].items():
            assert probability == pytest.approx(expected[label], abs=1e-5)  # float32


@pytest.mark.thorough
def test_images_are_prepared_as_in_evaluations(photos):
    run, images = photos
    source = read_source(run)
    data, preprocessing = read_sections(source, run)
    assert preprocessing.eval_crop == 0.8
    corpus = load_corpus(DataConfig(**data), preprocessing)
    rows = [corpus.validation[i]["images"] for i in range(len(corpus.validation))]
    files = [read_image(file, preprocessing) for file in sorted(images.rglob("*.png"))]
    assert len(rows) == 6
    for row in rows:
        assert any(np.array_equal(row, pixels) for pixels in files)


def test_top_labels_are_printed(photos, capsys):
    run, images = photos
    file = images / "bee" / "3.png"
    assert main([str(file), f"--model={run}", "--top=1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith((f"{file}: ant ", f"{file}: bee ")) and printed.endswith("%\n")


def test_unusable_files_end_in_one_sentence(photos, tmp_path, capsys):
    run, _ = photos
    (tmp_path / "text.png").write_text("no image")
    for name, message in (
        ("text.png", "text.png cannot be classified: it is not an image in a known format"),
        ("absent.png", "absent.png"),
    ):
        assert main([str(tmp_path / name), f"--model={run}"]) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line


_WORDS = ("a", "fine", "dull", "film", "it", "is", "not", "good", "very", "##ly")
_TEXTS = ("a fine film", "it is not good " * 3, "very dullly")


@pytest.fixture(scope="module")
def text_classifier(tmp_path_factory):
    """A tiny BERT with random parameters, and a WordPiece tokenizer."""
    directory = tmp_path_factory.mktemp("bert")
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS)
    (directory / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(directory / "vocab.txt")).save_pretrained(directory)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        id2label={0: "bad", 1: "good", 2: "unclear"},
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["", "data=2,model=2"])
def test_labels_of_texts_equal_those_of_a_pipeline_of_transformers(text_classifier, mesh, capsys):
    arguments = [f"--model={text_classifier}", "--batch_size=2", f"--mesh={mesh}", "--json"]
    capsys.readouterr()
    assert main([*arguments, *_TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [*_TEXTS]
    check_labels(lines, [{"text": text} for text in _TEXTS], text_classifier)


def check_labels(lines: list[dict[str, Any]], inputs: list[Any], directory: Path) -> None:
    """Compare the probabilities of lines with a pipeline of transformers."""
    pipeline: Any = transformers.pipeline("text-classification", model=str(directory), top_k=None)
    for line, given in zip(lines, inputs, strict=True):
        expected = {entry["label"]: entry["score"] for entry in pipeline(given)}
        assert [*line["labels"]] == [*expected]  # the most likely label first
        for label, probability in line["labels"].items():
            assert probability == pytest.approx(expected[label], abs=1e-5)  # float32


def test_pairs_of_texts_in_a_file(text_classifier, tmp_path, capsys):
    pairs = [("a film", "it is good"), ("very fine", "not a dull film")]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps({"one": a, "two": b, "label": 0}) for a, b in pairs))
    fields = ("--text_field=one", "--pair_field=two")
    capsys.readouterr()
    assert main([f"--model={text_classifier}", f"--texts={file}", *fields, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["text"], line["text_pair"]) for line in lines] == pairs
    check_labels(lines, [{"text": a, "text_pair": b} for a, b in pairs], text_classifier)


def test_unusable_texts_end_in_one_sentence(text_classifier, photos, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"body": "a film"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    of_texts = f"--model={text_classifier}"
    for arguments, message in (
        ([of_texts], "give either image files or texts, or --texts=FILE"),
        ([of_texts, f"--texts={tmp_path}/texts.jsonl"], "texts.jsonl:1"),
        ([of_texts, f"--texts={tmp_path}/empty.jsonl"], "empty.jsonl has no texts"),
        ([f"--model={photos[0]}", f"--texts={tmp_path}/texts.jsonl"], "classifies images"),
    ):
        assert main(arguments) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line
