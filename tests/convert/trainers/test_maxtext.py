"""Checkpoints of MaxText compared with the same weights in the Hugging Face format."""

import pytest

from tests.convert.trainers import models
from tests.convert.trainers.maxtext_layout import write_maxtext


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
