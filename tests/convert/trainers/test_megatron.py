"""Checkpoints of Megatron-LM compared with the same weights in the Hugging Face format."""

import pytest

from tests.convert.trainers import models
from tests.convert.trainers.dist_layout import write_dist
from tests.convert.trainers.megatron_layout import Layout, write


@pytest.mark.parametrize(
    "case", ["gpt2", "gpt2_exact_gelu", "llama", "llama_tied", "llama3", "qwen2", "qwen3"]
)
def test_shards_have_the_logits_of_the_hugging_face_model(tmp_path, case):
    model = models.make(case)
    write(model, tmp_path, Layout())
    models.assert_same_logits(model, tmp_path, allow_pickle_weights=True)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=1, pipeline=1),
        Layout(tensor=2, pipeline=1),
        Layout(pipeline=2, chunks=2),
        Layout(pipeline=4),
        Layout(is_legacy=True),
    ],
    ids=str,
)
def test_every_layout_has_the_same_logits(tmp_path, case, layout):
    model = models.make(case)
    write(model, tmp_path, layout)
    models.assert_same_logits(model, tmp_path, allow_pickle_weights=True)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
@pytest.mark.parametrize("numbers_layers", [False, True])
def test_distributed_format_has_the_same_logits(tmp_path, case, numbers_layers):
    model = models.make(case)
    write_dist(model, tmp_path, numbers_layers=numbers_layers)
    models.assert_same_logits(model, tmp_path, allow_pickle_weights=True)


def test_distributed_format_of_the_newest_version_has_the_same_logits(tmp_path):
    model = models.make("llama")
    write_dist(model, tmp_path, numbers_layers=True, has_common_file=False, names_gates=True)
    models.assert_same_logits(model, tmp_path, allow_pickle_weights=True)
