"""Image runs that start from a checkpoint: a pretraining run, or another image size."""

import json
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from convert import from_hf
from convert.from_hf import load as load_model
from convert.source import read_source
from convert.to_hf import convert as to_hf
from data.corpus import load_corpus
from sharding.mesh import make_mesh
from tests.runs import ROOT
from tests.train.run.test_init_from import losses_of
from tests.train.test_main import error_line, run_main
from train.config.config_files import load
from train.config.inherit_config import inherit_config
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.main import main
from train.run.assemble import assemble_run
from train.run.init_from import start_params

pytestmark = pytest.mark.drawn(4, among="thorough")

MAE, VIT, SWIN = (str(ROOT / "configs" / f"{name}.py") for name in ("mae", "vit", "swin"))
SHORT = (
    "train.num_steps=2",
    "log.every_steps=1",
    "eval.num_batches=1",
    "data.global_batch_size=16",
    "optimizer.warmup_steps=1",
)
SIZES = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embed_dim=16",
    "model.mlp_dim=24",
    "model.decoder_num_layers=1",
    "model.decoder_num_heads=2",
    "model.decoder_embed_dim=8",
    "model.decoder_mlp_dim=12",
)
#: Hugging Face config for digits: their size and channel, and the patches of configs/vit.py.
TINY_VIT = {
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16},
    **{"intermediate_size": 24, "image_size": 8, "patch_size": 2, "num_channels": 1},
}
TINY_SWIN = {
    **{"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4},
    **{"image_size": 16, "patch_size": 2, "num_channels": 1},
}
OF_THE_ENCODER = {"patch_embedding", "class_token", "position_embedding", "encoder", "final_norm"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.fixture(scope="module")
def pretrained(cache, tmp_path_factory):
    """The workdir of an MAE run."""
    workdir = tmp_path_factory.mktemp("mae")
    assert run_main(workdir, (cache, *SHORT, *SIZES), config=MAE) == 0
    return workdir


def save(directory, name, **config):
    """Save a Hugging Face model with random parameters, and return it."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(architectures=[name], **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def run_from(directory, config, *overrides):
    """Return (run, its initial parameters, the checkpoint's parameters)."""
    overrides = (*overrides, f"init_from={directory}")
    given = load(config, overrides)
    source = read_source(directory)
    inherit_config(given, source, Overrides.of(overrides))
    validated = validate_config(given)
    labels = load_corpus(validated.data, validated.images).labels
    run = assemble_run(
        validated, make_mesh(validated.mesh, jax.devices()), vocab_size=None, num_labels=len(labels)
    )
    params = start_params(run, source, labels)
    for found, wanted in zip(
        jax.tree.leaves(params), jax.tree.leaves(run.state_layout.portable.params), strict=True
    ):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert found.sharding == wanted.sharding
    return run, params, nnx.to_pure_dict(nnx.split(load_model(directory))[1])


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
def test_run_can_start_from_a_pretrained_encoder(pretrained, cache, caplog):
    caplog.set_level(logging.INFO, "train")
    own = ("model.pool=mean", "model.drop_path=0.25", "mesh.fsdp=2", "mesh.model=2")
    run, params, theirs = run_from(pretrained, VIT, cache, *own)
    assert OF_THE_ENCODER == params.keys() - {"classifier"} == params.keys() & theirs.keys()
    for name in OF_THE_ENCODER:
        assert_same(params[name], theirs[name])
    assert_same(params["classifier"], run.state_layout.initial().params["classifier"])
    config = run.model_config
    assert (config.pool, config.drop_path, config.num_labels) == ("mean", 0.25, 10)
    assert (config.num_layers, config.embed_dim, config.mlp_dim) == (2, 16, 24)
    assert "init_from: new: classifier.bias, classifier.kernel" in caplog.messages
    (left_out,) = [line for line in caplog.messages if line.startswith("init_from: left out: ")]
    assert "mask_token" in left_out and " encoder." not in left_out


@pytest.mark.thorough
def test_finetuning_works_at_another_image_size(pretrained, cache, tmp_path, capsys):
    overrides = (cache, *SHORT, f"init_from={pretrained}", "model.pool=mean", "images.size=12")
    assert run_main(tmp_path / "one", overrides, config=VIT) == 0
    assert "resized: position_embedding" in capsys.readouterr().err
    many = (*overrides, "mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
    many = (*many, "train.num_microbatches=2")
    assert run_main(tmp_path / "many", many, config=VIT) == 0
    one = losses_of(tmp_path / "one")
    assert len(one) == 2
    np.testing.assert_allclose(one, losses_of(tmp_path / "many"), rtol=1e-5)  # float32
    assert run_main(tmp_path / "one", (*overrides, "train.num_steps=3"), config=VIT) == 0
    assert len(losses_of(tmp_path / "one")) == 3
    assert run_main(tmp_path / "one", (*overrides, "train.init_labels=new"), config=VIT) == 2
    assert "train.init_labels: 'by_name' -> 'new'" in error_line(capsys)


@pytest.mark.thorough
def test_published_pretraining_is_finetuned_and_exported(cache, tmp_path):
    theirs = save(tmp_path / "mae", "ViTMAEForPreTraining", **TINY_VIT, decoder_hidden_size=16)
    preprocessor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.3], image_std=[0.2]
    )
    preprocessor.save_pretrained(tmp_path / "mae")
    _, params, _ = run_from(tmp_path / "mae", VIT, cache)
    table = theirs.vit.embeddings.position_embeddings.detach().numpy()
    np.testing.assert_array_equal(params["position_embedding"], table)
    overrides = (cache, *SHORT, f"init_from={tmp_path / 'mae'}")
    assert run_main(tmp_path / "run", overrides, config=VIT) == 0
    to_hf(tmp_path / "run", tmp_path / "vit")
    back: Any = transformers.ViTForImageClassification.from_pretrained(tmp_path / "vit").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")
    assert back.config.id2label[9] == "9"
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    with torch.no_grad():
        logits = back(**processor(list(images), return_tensors="pt")).logits
    # Float32 in another order.
    np.testing.assert_allclose(load_model(tmp_path / "run")(images), logits, atol=1e-5)


@pytest.mark.thorough(but=["()"])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("mesh.fsdp=2", "mesh.model=2", "memory.zero_stage=1"),
        ("memory.placement=host",),
        ("precision.params=bfloat16", "precision.compute=bfloat16"),
    ],
    ids=str,
)
def test_resized_positions_equal_torch(overrides, cache, tmp_path):
    theirs = save(tmp_path, "ViTForImageClassification", **TINY_VIT, num_labels=10)
    _, params, _ = run_from(tmp_path, VIT, cache, "images.size=14", *overrides)
    table = theirs.vit.embeddings.position_embeddings.detach()
    grid = table[:, 1:].reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(grid, size=(7, 7), mode="bicubic")
    expected = torch.cat([table[:, :1], resized.flatten(2).transpose(1, 2)], dim=1).numpy()
    found = params["position_embedding"]
    # float32 with another order of summation; bfloat16 parameters are also rounded once.
    rtol, atol = (2**-8, 0) if found.dtype == jnp.bfloat16 else (0, 1e-6)
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol, atol)
    np.testing.assert_array_equal(found[:, 0], jnp.asarray(table[:, 0].numpy(), found.dtype))


def test_positions_of_a_distillation_token_are_not_resized(cache, tmp_path):
    name = "DeiTForImageClassificationWithTeacher"
    theirs = save(tmp_path, name, **TINY_VIT, num_labels=10)
    _, params, loaded = run_from(tmp_path, VIT, cache, "images.size=14")
    table = theirs.deit.embeddings.position_embeddings.detach().numpy()
    assert params["position_embedding"].shape == (1, 2 + 49, 16)
    np.testing.assert_array_equal(params["position_embedding"][:, :2], table[:, :2])
    for other in ("distillation_token", "classifier", "distillation_classifier"):
        assert_same(params[other], loaded[other])


def test_equal_number_of_patches_keeps_positions_unchanged(cache, tmp_path):
    save(tmp_path, "ViTForImageClassification", **{**TINY_VIT, "image_size": 9}, num_labels=10)
    _, params, theirs = run_from(tmp_path, VIT, cache)  # 8 pixels and the same number of patches
    assert_same(params, theirs)


@pytest.mark.thorough
def test_pixels_are_normalised_as_stated_by_the_checkpoint(cache, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from configs import vit\n\n\ndef get_config():\n    config = vit.get_config()\n"
        "    config.model.image_mean = (0.25,)\n    return config\n"
    )

    def normalisation(*overrides):
        config = run_from(tmp_path, str(own), cache, *overrides)[0].model_config
        return config.image_mean, config.image_stddev

    save(tmp_path, "ViTForImageClassification", **TINY_VIT, num_labels=10)
    assert normalisation() == ((0.25,), (0.5,))  # the checkpoint does not state its normalization
    from_hf.convert(tmp_path, tmp_path / "converted")
    converted = run_from(tmp_path / "converted", str(own), cache)[0].model_config
    assert converted.image_mean == (0.25,)
    said = {"image_mean": [0.1], "image_std": [0.4], "size": 8}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert normalisation() == ((0.1,), (0.4,))
    with pytest.raises(ValueError, match=r"image_mean=\(0\.75,\), but .* \(0\.1,\); omit"):
        normalisation("model.image_mean=(0.75,)")


@pytest.mark.thorough
def test_weights_across_patches_require_the_same_image_size(cache, tmp_path):
    overrides = (cache, "train.num_steps=1", "checkpoint.every_steps=1", "eval.every_steps=0")
    flags = [f"--config.{override}" for override in overrides]
    resmlp = str(ROOT / "configs" / "resmlp.py")
    assert main([f"--config={resmlp}", f"--workdir={tmp_path}", *flags]) == 0
    with pytest.raises(ValueError, match=r"of 8 pixels, and its parameter encoder\.layers\.ac"):
        run_from(tmp_path, resmlp, cache, "images.size=12")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SwinForImageClassification", "Swinv2ForImageClassification"])
def test_window_size_without_positions_is_rejected(name, cache, tmp_path):
    save(tmp_path, name, **TINY_SWIN, num_labels=10)
    _, params, theirs = run_from(tmp_path, SWIN, cache, "images.size=24")  # the same windows
    assert_same(params, theirs)
    with pytest.raises(ValueError, match=r"\(4, 4\) patches .* images\.size=8 makes them \(4, 2\)"):
        run_from(tmp_path, SWIN, cache, "images.size=8")


@pytest.mark.thorough
def test_window_size_may_change_if_positions_are_relative_to_the_pretraining(cache, tmp_path):
    measured = {"pretrained_window_sizes": [4, 4]}
    save(tmp_path, "Swinv2ForImageClassification", **TINY_SWIN, **measured, num_labels=10)
    run, params, theirs = run_from(tmp_path, SWIN, cache, "images.size=8")
    assert run.model_config.windows == (4, 2)
    assert_same(params, theirs)


@pytest.mark.thorough
def test_pool_is_taken_with_the_classifier(pretrained, cache, tmp_path):
    overrides = (cache, *SHORT, f"init_from={pretrained}", "model.pool=mean")
    assert run_main(tmp_path, overrides, config=VIT) == 0
    assert run_from(tmp_path, VIT, cache)[0].model_config.pool == "mean"
    run, params, theirs = run_from(tmp_path, VIT, cache, "train.init_labels=new")
    assert run.model_config.pool == "class_token"
    assert_same(params["encoder"], theirs["encoder"])
    assert_same(params["classifier"], run.state_layout.initial().params["classifier"])
    with pytest.raises(
        ValueError, match=r"model\.pool='class_token', but the checkpoint init_from=.* 'mean'"
    ):
        run_from(tmp_path, VIT, cache, "model.pool=class_token")


def test_checkpoint_without_the_models_encoder_is_rejected(cache, tmp_path):
    save(tmp_path, "ViTMAEForPreTraining", **TINY_VIT, decoder_hidden_size=16)
    with pytest.raises(
        ValueError, match=r"model\.name='swin', but init_from=.* contains a mae; use"
    ):
        run_from(tmp_path, SWIN, cache)
