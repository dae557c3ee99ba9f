"""Checkpoints of LiBai compared with the same weights in the Hugging Face format."""

import pytest

from convert.from_hf import load
from tests.convert.trainers import models
from tests.convert.trainers.libai_layout import write_libai


@pytest.mark.parametrize("has_pickle", [True, False])
def test_folders_have_the_logits_of_the_hugging_face_model(tmp_path, has_pickle):
    model = models.make("gpt2_exact_gelu")
    write_libai(model, tmp_path, has_pickle=has_pickle)
    models.assert_same_logits(model, tmp_path, allow_pickle_weights=has_pickle)


def test_one_checkpoint_is_read_from_its_own_folder(tmp_path):
    model = models.make("gpt2_exact_gelu")
    write_libai(model, tmp_path)
    models.assert_same_logits(model, tmp_path / "model_0000099", allow_pickle_weights=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale_mask_softmax_fusion": False}, "has no causal mask"),
        ({"apply_residual_post_layernorm": True}, "a GPT-2 does not have"),
        ({"hidden_size": "x"}, "model.cfg: hidden_size is 'x', but must be of type int"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, not at least 1"),
        ({"hidden_layers": 5}, "it lacks"),
        ({"hidden_size": 48}, r"has the shape \[120, 40\], but \[144, 40\] follows"),
    ],
)
def test_other_models_are_refused(tmp_path, settings, message):
    write_libai(models.make("gpt2_exact_gelu"), tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, allow_pickle_weights=True)


def test_pickle_needs_permission(tmp_path):
    write_libai(models.make("gpt2_exact_gelu"), tmp_path)
    with pytest.raises(ValueError, match="if you trust it, add --allow_pickle_weights"):
        load(tmp_path)


def test_damaged_files_are_named(tmp_path):
    write_libai(models.make("gpt2_exact_gelu"), tmp_path)
    folder = tmp_path / "model_0000099" / "model" / "global_tensor_3"
    meta = folder / "meta"
    content = meta.read_text()
    meta.write_text(content.replace("kFloat", "kOFRecord"))
    with pytest.raises(ValueError, match="not a shape and one of kFloat"):
        load(tmp_path, allow_pickle_weights=True)
    meta.write_text(content.replace("40", "41", 1))
    with pytest.raises(ValueError, match="out has .* bytes, but .*/meta describes float32"):
        load(tmp_path, allow_pickle_weights=True)
    meta.unlink()
    with pytest.raises(ValueError, match="global_tensor_3/meta is missing"):
        load(tmp_path, allow_pickle_weights=True)


def test_single_pickle_of_newer_versions_is_refused(tmp_path):
    write_libai(models.make("gpt2_exact_gelu"), tmp_path)
    step = tmp_path / "model_0000100"
    step.mkdir()
    (step / "model").write_bytes(b"\x80\x04N.")
    (tmp_path / "last_checkpoint").write_text("model_0000100")
    with pytest.raises(ValueError, match="save_as_external_data=True"):
        load(tmp_path, allow_pickle_weights=True)
