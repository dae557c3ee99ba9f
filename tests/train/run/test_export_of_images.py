"""Vision models that start from nothing are exported with an image processor, or refused."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from convert.from_hf import load as load_model
from convert.to_hf import convert as to_hf
from tests.runs import ROOT
from tests.train.test_main import run_main

pytestmark = pytest.mark.drawn(2, among="thorough")

SMALL = (
    "data.global_batch_size=32",
    "train.num_steps=2",
    "optimizer.warmup_steps=1",
    "checkpoint.every_steps=2",
    "eval.every_steps=0",
)


@pytest.fixture
def train(tmp_path):
    """Return a function that trains a config for two steps and returns the run's directory."""

    def run(config: str, *overrides: str):
        overrides = (*SMALL, f"data.cache_dir={tmp_path}/cache", *overrides)
        path = str(ROOT / "configs" / f"{config}.py")
        assert run_main(tmp_path / config, overrides, config=path) == 0
        return tmp_path / config

    return run


def their_output(model_class, directory, images_BHWC):
    """Return the output of transformers for raw images, through its image processor."""
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    inputs = processor(list(images_BHWC), input_data_format="channels_last", return_tensors="pt")
    model = model_class.from_pretrained(directory).eval()
    with torch.no_grad():
        return model, model(**inputs)


@pytest.fixture
def images_BHWC():
    return np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)


@pytest.mark.slow(only=["swin"])
@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("config", ["vit", "vit_probe", "swin"])
def test_classifier_gives_the_same_logits(config, train, images_BHWC, tmp_path, warnings):
    run = train(config)
    to_hf(run, tmp_path / "hugging_face")
    automatic = transformers.AutoModelForImageClassification
    model, output = their_output(automatic, tmp_path / "hugging_face", images_BHWC)
    ours = load_model(run)(jnp.asarray(images_BHWC))
    np.testing.assert_allclose(np.asarray(ours), output.logits.numpy(), atol=1e-5)
    assert model.config.id2label == {i: str(i) for i in range(10)}
    assert warnings() == []


@pytest.mark.thorough
def test_masked_autoencoder_is_loaded_for_pretraining(train, images_BHWC, tmp_path, warnings):
    to_hf(train("mae"), tmp_path / "hugging_face")
    automatic = transformers.AutoModelForPreTraining
    model, output = their_output(automatic, tmp_path / "hugging_face", images_BHWC)
    assert isinstance(model, transformers.ViTMAEForPreTraining)
    assert output.logits.shape == (3, 16, 4) and torch.isfinite(output.loss)
    assert output.mask.sum() == 3 * 12
    assert warnings() == []


@pytest.mark.slow(only=["moco"])
@pytest.mark.thorough
@pytest.mark.parametrize("config", ["moco", "resmlp"])
def test_model_without_a_counterpart_is_refused(config, train, tmp_path):
    run = train(config)
    with pytest.raises(ValueError, match=f"model.name='{config}' has no counterpart"):
        to_hf(run, tmp_path / "hugging_face")
    assert not (tmp_path / "hugging_face").exists()


@pytest.mark.thorough
def test_finetuned_autoencoder_is_named_before_training_and_refused(train, tmp_path, capsys):
    encoder = train("mae")
    capsys.readouterr()
    run = train("vit_finetune", f"init_from={encoder}")
    problem = "cannot have model.pool='mean'"
    assert problem in capsys.readouterr().err
    with pytest.raises(ValueError, match=problem):
        to_hf(run, tmp_path / "hugging_face")
