"""Checkpoints of MaxText compared with the same weights in the Hugging Face format."""

import json
import shutil

import pytest

from convert.from_hf import load
from tests.convert.trainers import models
from tests.convert.trainers.maxtext_layout import write_maxtext


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", ["llama", "llama_tied", "llama3", "qwen2", "qwen3"])
def test_stack_has_the_logits_of_the_hugging_face_model(tmp_path, case):
    model = models.make(case)
    write_maxtext(model, tmp_path)
    models.assert_same_logits(model, tmp_path)


@pytest.mark.parametrize(
    "formats",
    [
        {"is_scanned": False},
        {"use_ocdbt": True, "use_zarr3": True},
        {"use_ocdbt": False, "use_zarr3": False},
    ],
    ids=str,
)
def test_every_format_of_orbax_has_the_same_logits(tmp_path, formats):
    model = models.make("llama")
    write_maxtext(model, tmp_path, **formats)
    models.assert_same_logits(model, tmp_path)


def test_folder_without_config_is_refused(tmp_path):
    write_maxtext(models.make("llama"), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="has no config.json, which MaxText does not write"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gemma2"}, "model_type=gemma2, but of MaxText's models only llama"),
        ({"num_hidden_layers": 3}, "whose second axis must count the layers"),
        ({"intermediate_size": 48}, r"has the shape \[44, 36\], but \[48, 36\] is expected"),
    ],
)
def test_config_of_another_model_is_refused(tmp_path, settings, message):
    write_maxtext(models.make("llama"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_missing_files_are_one_sentence(tmp_path):
    write_maxtext(models.make("llama"), tmp_path, use_ocdbt=True)
    shutil.rmtree(tmp_path / "checkpoints" / "5" / "items" / "d")
    with pytest.raises(ValueError, match="does not have the arrays|cannot be read"):
        load(tmp_path)
