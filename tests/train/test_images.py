"""Training on images through the command line: throughput in images, and no tokenizer."""

import itertools
import json
import os
import re

import numpy as np
import pytest

from convert.from_hf import load as load_model
from data.images.folder import FolderImages
from models.vision.resmlp import ResMLP
from tests.data.images.pictures import encoded, plain, write_classes
from tests.data.test_verify import replace
from tests.runs import ROOT, losses, make_run
from train.config.config_files import load
from train.config.schema import validate_config
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(3, among="thorough")]

CONFIG = """
from configs import common
from ml_collections import ConfigDict

def get_config():
    config = common.get_config()
    config.model = ConfigDict(dict(name="tests.train.image_model:Patches", embed_dim=16))
    config.data.name = "digits"
    config.data.objective = "image_classification"
    config.data.global_batch_size = 32
    config.images.crop_scale = (0.6, 1.0)
    config.images.mixup = 0.2
    config.optimizer.learning_rate = 0.01
    config.train.num_steps = 20
    config.log.every_steps = 5
    config.eval.every_steps = 10
    config.checkpoint.every_steps = 10
    return config
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """(path of a config, overrides that give these tests a cache of their own)."""
    directory = tmp_path_factory.mktemp("images")
    (directory / "config.py").write_text(CONFIG)
    return str(directory / "config.py"), (f"data.cache_dir={directory}/cache",)


def run_main(workdir, config, *overrides, flags=()):
    file, cache = config
    arguments = [f"--config.{override}" for override in (*cache, *overrides)]
    return main([f"--config={file}", f"--workdir={workdir}", *arguments, *flags])


def refusal(capsys):
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line


def timeless(workdir):
    """Return the logged metrics without times."""
    entries = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in e.items() if not k.endswith(("_s", "mfu"))} for e in entries]


@pytest.mark.thorough
def test_run_on_images_is_logged_evaluated_and_resumed(config, tmp_path, capsys):
    schedule = ("optimizer.schedule=constant",)
    assert run_main(tmp_path / "whole", config, *schedule) == 0
    printed = capsys.readouterr()
    said = "digits: 1,438 training and 359 validation images of 8 × 8 × 1, 10 classes"
    assert said in printed.err and re.search(r"model   Patches, .* FLOPs an image", printed.err)
    assert re.search(r"step 20/20 .* img/s", printed.out) and "perplexity" not in printed.out
    entries = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    assert all("images_per_s" in e and "tokens_per_s" not in e for e in steps)
    assert steps[0]["images_per_s"] is None and steps[-1]["images_per_s"] > 0
    assert (
        steps[0]["data_wait_s"] is None and 0 < steps[-1]["data_wait_s"] < steps[-1]["step_time_s"]
    )
    evaluated = [entry for entry in entries if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [10, 20]
    assert {"eval_loss", "eval_accuracy", "step"} == evaluated[-1].keys()
    assert evaluated[-1]["eval_loss"] < 2.2
    labels = (tmp_path / "whole" / "hf" / "labels.json").read_text()
    assert labels.startswith('["0", "1"') and not (tmp_path / "whole/hf/tokenizer.json").exists()
    # Stopped after ten steps and resumed with worker processes: the same to the bit.
    assert run_main(tmp_path / "twice", config, *schedule, "train.num_steps=10") == 0
    assert run_main(tmp_path / "twice", config, *schedule, "images.num_workers=2") == 0
    whole = timeless(tmp_path / "whole")
    assert [e for e in timeless(tmp_path / "twice") if e["step"] > 10] == [
        e for e in whole if e["step"] > 10
    ]


@pytest.mark.thorough
def test_run_of_a_model_without_published_files_can_be_loaded(config, tmp_path):
    of_resmlp = str(ROOT / "configs" / "resmlp.py"), config[1]
    tiny = ("train.num_steps=1", "model.embed_dim=8", "model.mlp_dim=8", "model.num_layers=1")
    assert run_main(tmp_path, of_resmlp, *tiny) == 0
    model = load_model(tmp_path)
    assert isinstance(model, ResMLP) and model.config.num_labels == 10


@pytest.mark.thorough
def test_losses_do_not_depend_on_the_mesh(config):
    file, cache = config
    one = losses(*make_run(cache, file), 3)
    many = (*cache, "mesh.data=2", "mesh.model=2", "mesh.pipeline=2", "train.num_microbatches=2")
    assert losses(*make_run(many, file), 3) == pytest.approx(one, rel=1e-5)  # float32


@pytest.mark.thorough
def test_resuming_with_other_images_is_rejected(config, tmp_path, capsys):
    short = ("train.num_steps=2",)
    assert run_main(tmp_path, config, *short) == 0
    assert run_main(tmp_path, config, *short, "images.flip=True") == 2
    assert "images.flip: False -> True" in refusal(capsys)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.tokenizer=bytes",), "data.tokenizer='bytes' is read only for texts"),
        (("data.global_batch_size=31",), "mix the images of a batch in pairs"),
        (("data.global_batch_size=2000",), "has 1438 with"),
        (("data.objective=image_contrast",), "images.mixup=0.2 is read only with"),
        (
            ("data.objective=image_reconstruction", "images.mixup=0"),
            "data.objective='image_reconstruction' does not match",
        ),
        (("data.objective=causal_lm", "data.name=python_stdlib"), "read only for images"),
        (("checkpoint.keep_best=1", "checkpoint.best_metric=eval_perplexity"), "is not a metric"),
    ],
)
def test_incompatible_image_settings_are_rejected(overrides, message, config, tmp_path, capsys):
    assert run_main(tmp_path, config, *overrides) == 2
    assert message in refusal(capsys)


# Broken images, through the command line.


def folder_of_images(directory):
    """Return (overrides to train on a folder of images, path of one of them)."""
    write_classes(directory / "images", ["cat", "große Katze"], num_images=40)
    overrides = ("data.name=image_folder", f"data.paths={directory}/images")
    steps = ("data.global_batch_size=16", "train.num_steps=20", "checkpoint.every_steps=2")
    return (*overrides, *steps, "eval.every_steps=0"), directory / "images" / "cat" / "7.png"


def test_broken_data_is_refused_before_the_first_step(config, tmp_path, capsys):
    overrides, image = folder_of_images(tmp_path)
    image.write_bytes(image.read_bytes()[:50])
    assert run_main(tmp_path / "run", config, *overrides) == 2
    said = refusal(capsys)
    assert "1 of 80 images cannot be used: " in said and f"{image} (" in said
    assert said.endswith("or set images.on_broken='skip' to leave them out")
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_contents_of_images_can_be_verified_from_a_later_start_on(config, tmp_path, capsys):
    overrides, image = folder_of_images(tmp_path)
    overrides = (*overrides, "optimizer.schedule=constant")
    times = (*overrides, "data.verify=times")
    full = (*overrides, "data.verify=full")
    assert run_main(tmp_path / "run", config, *times, "train.num_steps=2") == 0
    assert run_main(tmp_path / "run", config, *full, "train.num_steps=4") == 0
    assert run_main(tmp_path / "run", config, *times, "train.num_steps=6") == 0
    assert run_main(tmp_path / "run", config, *full, "train.num_steps=8") == 0
    assert capsys.readouterr().err.count("resuming from there") == 3
    replace(image, encoded(plain(99), "png"))
    assert run_main(tmp_path / "run", config, *full, "train.num_steps=10") == 2
    assert "has changed since step 8" in refusal(capsys)
    assert run_main(tmp_path / "run", config, *times, "train.num_steps=10") == 0


def breaking(monkeypatch, image):
    """Truncate an image file once the run has read 200 images, i.e. after some steps."""
    read = FolderImages.read
    numbers = itertools.count()

    def read_and_break(self, index):
        if next(numbers) == 200:
            image.write_bytes(image.read_bytes()[:50])
        return read(self, index)

    monkeypatch.setattr(FolderImages, "read", read_and_break)


@pytest.mark.thorough
def test_image_that_breaks_in_a_run_ends_it_and_the_next_start_resumes(
    config, tmp_path, capsys, monkeypatch
):
    overrides, image = folder_of_images(tmp_path)
    content = image.read_bytes()
    status = image.stat()
    with monkeypatch.context() as patch:
        breaking(patch, image)
        assert run_main(tmp_path / "run", config, *overrides) == 1
    assert f"{image} cannot be read: " in refusal(capsys)
    record = json.loads((tmp_path / "run" / "goodput" / "0001.json").read_text())
    assert record["ended"] == "failed" and 0 < record["last_step"] < 20
    assert run_main(tmp_path / "run", config, *overrides) == 2
    assert f"1 of 80 images cannot be used: {image} (" in refusal(capsys)
    image.write_bytes(content)
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run_main(tmp_path / "run", config, *overrides) == 0
    assert run_main(tmp_path / "whole", config, *overrides) == 0
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    names = [path.name for path in tmp_path.rglob("*")]
    assert not [name for name in names if name.endswith((".tmp", ".new", ".tmp.npy"))]


@pytest.mark.thorough
def test_image_that_breaks_in_a_run_is_skipped(config, tmp_path, capsys, monkeypatch):
    overrides, image = folder_of_images(tmp_path)
    breaking(monkeypatch, image)
    assert run_main(tmp_path / "run", config, *overrides, "images.on_broken=skip") == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "cannot be" in line]
    assert said.startswith(str(image)) and said.endswith("left out (1 so far in this process)")
    losses = [entry["loss"] for entry in timeless(tmp_path / "run") if "loss" in entry]
    assert np.isfinite(losses).all()


def test_model_must_accept_the_size_of_the_images(config):
    file, cache = config
    run = validate_config(load(file, cache))
    model = run.model_config(num_labels=10)
    assert (model.image_size, model.num_channels, model.num_labels) == (8, 1, 10)
    sized = validate_config(load_with(file, image_size=16))
    with pytest.raises(ValueError, match=r"model\.image_size=16 must equal images\.size=8; do no"):
        sized.model_config(num_labels=10)
    assert (
        validate_config(load_with(file, num_labels=20)).model_config(num_labels=10).num_labels == 20
    )
    with pytest.raises(ValueError, match=r"model\.num_labels is not set, and data\.objective="):
        run.model_config()
    text = validate_config(load_with(file, name="gpt2", num_layers=1, num_heads=1, dropout=0.0))
    with pytest.raises(
        ValueError, match=r"is not set, and data\.objective='image_classification' does"
    ):
        text.model_config(num_labels=10)


def load_with(file, **model):
    """Return the config with additional keys of the model."""
    config = load(file)
    with config.unlocked():
        config.model.update(model)
    return config
