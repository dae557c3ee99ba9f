"""Training CLIP and SigLIP on images with captions, through the command line and on meshes."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from tests.runs import FLOAT64, ROOT, losses, make_run
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_steps")

CONFIG = str(ROOT / "configs" / "clip.py")
_COLORS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220), "white": (255,) * 3}
_SIZES = (
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "images.size=16",
    "model.embed_dim=32",
    "model.mlp_dim=48",
    "model.text_embed_dim=24",
    "model.text_mlp_dim=32",
    "optimizer.learning_rate=0.001",
    "optimizer.warmup_steps=2",
    "log.every_steps=1",
)
_SIGLIP = (
    "model.pool=attention",
    "model.text_pool=last",
    "model.eos_id=None",
    "model.contrast=sigmoid",
    "model.projection_dim=32",
)
MODELS = {"CLIP": ("model.projection_dim=20",), "SigLIP": _SIGLIP}


def write_images(directory, count: int = 24) -> tuple[str, ...]:
    """Write images of a color with captions that name it; return the overrides to read them."""
    rng = np.random.default_rng(0)
    folder = directory / "images"
    (folder / "all").mkdir(parents=True)
    lines = []
    for number in range(count):
        name = [*_COLORS][number % len(_COLORS)]
        noise = rng.integers(-30, 30, (20, 24, 3))
        pixels = np.clip(np.array(_COLORS[name]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "all" / f"{number}.png")
        lines.append({"file_name": f"all/{number}.png", "text": f"{name} {number}"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return (f"data.paths={folder}", f"data.cache_dir={directory}/cache")


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """Overrides of a small folder of images with captions."""
    return write_images(tmp_path_factory.mktemp("captioned"))


def run_main(workdir, *overrides):
    return main(
        [f"--config={CONFIG}", f"--workdir={workdir}", *(f"--config.{x}" for x in overrides)]
    )


@pytest.mark.thorough
def test_training_learns_to_retrieve_texts_and_images(where, tmp_path):
    steps = ("train.num_steps=80", "eval.every_steps=80", "checkpoint.every_steps=80")
    assert run_main(tmp_path, *where, *_SIZES, *MODELS["CLIP"], *steps) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    train = [row for row in rows if "loss" in row]
    # log 8 = 2.08 by chance; about log 2 if only the color of an image is known.
    assert np.mean([row["loss"] for row in train[-10:]]) < 1.4
    for name in ("image_to_text_accuracy", "text_to_image_accuracy"):
        # By chance 1/8; a quarter of the images has the same color.
        assert np.mean([row[name] for row in train[-10:]]) > 0.3
    assert train[0]["logit_scale"] == pytest.approx(1 / 0.07, rel=1e-4)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["data=4", "fsdp=4", "model=2", "pipeline=2", "2x2x2"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_equal_on_all_meshes(model, mesh, where):
    sizes = ("pipeline=2", "data=2", "model=2") if mesh == "2x2x2" else (mesh,)
    axes = tuple(f"mesh.{size}" for size in sizes)
    with jax.enable_x64(True):
        expected, found = (
            losses(*make_run((*where, *_SIZES, *MODELS[model], *FLOAT64, *on), CONFIG), 3)
            for on in ((), axes)
        )
    assert len(set(expected)) == 3  # it learns
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.thorough
def test_tokenizer_of_another_end_of_text_is_refused(where, tmp_path, capsys):
    assert run_main(tmp_path, *where, *_SIZES, "model.eos_id=7") == 2
    assert "model.eos_id=7, but texts end with token 256" in capsys.readouterr().err
