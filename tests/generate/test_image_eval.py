"""Scores of images match scikit-learn and training, on every mesh."""

import csv
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
import torch
import transformers
from flax import nnx
from PIL import Image

from data.batches import validation_batches
from data.config import DataConfig
from data.corpus import load_corpus
from data.image_config import ImageConfig
from generate.image_eval import ImageScores, evaluate_images, main
from models.vision.common import label_loss
from tests.runs import ROOT
from train.main import main as train

_VIT = {
    "image_size": 12,
    "patch_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "attn_implementation": "eager",
}
#: In another order than the folders.
_LABELS = ("wolf", "ant", "cow", "eel", "bee", "yak", "fox")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A ViT of transformers in vit/, and images of seven classes in images/."""
    directory = tmp_path_factory.mktemp("vit")
    names = {
        "id2label": dict(enumerate(_LABELS)),
        "label2id": {n: i for i, n in enumerate(_LABELS)},
    }
    torch.manual_seed(0)
    config = transformers.ViTConfig(**_VIT, **names)
    model: Any = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    model.save_pretrained(directory / "vit")
    preprocessor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True}
    (directory / "vit" / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    rng = np.random.default_rng(0)
    for number, name in enumerate(_LABELS):
        (directory / "images" / name).mkdir(parents=True)
        for i in range(3 + number):
            pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(directory / "images" / name / f"{i}.png")
    return model, directory


def by_hand(vit) -> tuple[list[str], np.ndarray]:
    """Return the class of each image, and the logits of transformers."""
    model, directory = vit
    files = sorted((directory / "images").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file), np.float32) for file in files])
    pixels = torch.tensor((pixels / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)
    with torch.no_grad():
        return [file.parent.name for file in files], model(pixels).logits.numpy()


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["", "data=4", "data=2,model=2"])
def test_scores_equal_those_of_scikit_learn(vit, mesh, tmp_path, capsys):
    names, logits = by_hand(vit)
    targets = [_LABELS.index(name) for name in names]
    found = logits.argmax(axis=1)
    directory = vit[1]
    arguments = [f"--model={directory}/vit", f"--images={directory}/images", "--batch_size=8"]
    assert main([*arguments, f"--mesh={mesh}", f"--out={tmp_path}/out"]) == 0
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert scores["num_images"] == len(names) == 42
    assert scores["accuracy"] == pytest.approx(np.mean(found == targets))
    top5 = sklearn.metrics.top_k_accuracy_score(targets, logits, k=5, labels=range(7))
    assert scores["top5_accuracy"] == pytest.approx(top5)
    rows = [*csv.reader((tmp_path / "out" / "confusion.csv").read_text().splitlines())]
    assert rows[0][1:] == [*_LABELS] == [row[0] for row in rows[1:]]
    confusion = np.array([row[1:] for row in rows[1:]], int)
    np.testing.assert_array_equal(confusion, sklearn.metrics.confusion_matrix(targets, found))
    absent: Any = np.nan
    report: Any = sklearn.metrics.classification_report(
        targets, found, target_names=_LABELS, output_dict=True, zero_division=absent
    )
    for row in csv.DictReader((tmp_path / "out" / "classes.csv").read_text().splitlines()):
        expected = report[row["name"]]
        assert int(row["num_images"]) == expected["support"]
        for key in ("recall", "precision"):
            assert float(row[key]) == pytest.approx(expected[key], nan_ok=True)
    assert (tmp_path / "out" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("42 images: accuracy ")


@pytest.mark.thorough
def test_scores_of_a_run_equal_those_of_training(tmp_path, capsys):
    config = [f"--config={ROOT}/configs/vit.py", f"--workdir={tmp_path}/run"]
    changes = ("train.num_steps=4", "eval.every_steps=0", "log.every_steps=4")
    assert train([*config, *(f"--config.{change}" for change in changes)]) == 0
    logged = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = [entry for entry in map(json.loads, logged) if "eval_loss" in entry][-1]
    assert main([f"--model={tmp_path}/run", f"--out={tmp_path}/out"]) == 0
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    for name in ("accuracy", "top5_accuracy"):
        assert scores[name] == pytest.approx(last[f"eval_{name}"], abs=1e-6)
    capsys.readouterr()


@pytest.mark.parametrize("logit", [0.0, np.nan])
def test_top5_accuracy_of_equal_logits_is_that_of_training(logit):
    class Undecided(nnx.Module):
        def __call__(self, images):
            return jnp.full((len(images), 7), logit, jnp.float32)

    data = DataConfig(
        name="tests.data.images.pictures:uneven_images",
        objective="image_classification",
        global_batch_size=1,
    )
    corpus = load_corpus(data, ImageConfig(size=8, channels=1))
    scores = evaluate_images(Undecided(), corpus, data, (), batch_size=8)
    (batch,) = validation_batches(
        corpus, dataclasses.replace(data, global_batch_size=37), range(37)
    )
    _, weight, hits = label_loss(Undecided()(batch["images"]), batch, smoothing=0.0)
    assert scores.top5_accuracy == pytest.approx(float(hits["top5_accuracy"] / weight))


def test_classes_name_what_they_are_mistaken_for():
    confusion = np.array([[3, 0, 1], [2, 2, 4], [0, 0, 0]])
    scores = ImageScores(labels=("a", "b", "c"), confusion=confusion, num_in_top=9)
    a, b, c = scores.classes()
    assert (a.num_images, a.recall, a.precision, a.mistaken_for) == (4, 0.75, 0.6, "c")
    assert (b.recall, b.precision, b.mistaken_for) == (0.25, 1.0, "c")
    assert c.num_images == 0 and np.isnan(c.recall) and c.mistaken_for == ""
    assert scores.accuracy == 5 / 12 and scores.top5_accuracy == 0.75


def _error(capsys, *arguments: str) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err


def test_unsuitable_requests_end_in_one_sentence(vit, tmp_path, capsys):
    directory = vit[1]
    model = f"--model={directory}/vit"
    assert "is not a run, so it has no images; pass --images" in _error(capsys, model)
    for name in ("dog", "hen"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (12, 12)).save(tmp_path / "images" / name / "0.png")
    other = _error(capsys, model, f"--images={tmp_path}/images")
    assert "the data has a class 'dog', but the model knows 7 others, such as 'wolf'" in other
    odd = _error(capsys, model, "--mesh=data=4", "--batch_size=6")
    assert "batch_size=6 must be a positive multiple of the mesh's 4 replicas" in odd
    assert jax.device_count() >= 4
