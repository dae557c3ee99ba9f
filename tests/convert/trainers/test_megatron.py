"""Checkpoints of Megatron-LM compared with the same weights in the Hugging Face format."""

import argparse
import os
import pickle
from pathlib import Path

import pytest
import torch

from convert.from_hf import load
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


def test_folder_of_an_iteration_is_read(tmp_path):
    model = models.make("gpt2")
    write(model, tmp_path, Layout())
    models.assert_same_logits(model, tmp_path / "iter_0000010", allow_pickle_weights=True)


def test_padding_of_the_vocabulary_is_kept_if_its_size_is_not_known(tmp_path):
    write(models.make("gpt2"), tmp_path, Layout(), vocab_size=None)
    model = load(tmp_path, allow_pickle_weights=True)
    assert model.config.vocab_size == 256


def test_pickles_need_permission(tmp_path):
    write(models.make("gpt2"), tmp_path, Layout())
    with pytest.raises(ValueError, match="if you trust it, add --allow_pickle_weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts=8, but mixtures of experts cannot be read"),
        ({"apply_layernorm_1p": True}, "norms that add 1 to their weight cannot be read"),
        ({"normalization": "RMSNorm"}, "only two kinds of models can be read"),
        ({"position_embedding_type": "none"}, "position_embedding_type=none"),
        ({"num_attention_heads": None}, "num_attention_heads is None, but must be of type int"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, which must be at least 1"),
        ({"num_attention_heads": 8, "kv_channels": 10}, "in a GPT-2 the two numbers"),
        ({"num_layers": 5}, "it lacks"),
        ({"num_layers": 3}, "it has unknown"),
        ({"ffn_hidden_size": 60}, r"has the shape \[40, 52\]|has the shape \[40, 60\]|is expected"),
        ({"tensor_model_parallel_size": 4}, "tensor rank 2 and stage 0 is missing"),
        ({"tensor_model_parallel_size": 1}, "tensor rank 1 and stage 1 is there, too"),
        ({"pipeline_model_parallel_size": "2"}, "args has pipeline_model_parallel_size=2"),
        ({"softmax_type": "off-by-one"}, "softmax_type=off-by-one, not vanilla"),
    ],
    ids=str,
)
def test_other_models_are_refused_in_one_sentence(tmp_path, changes, message):
    write(models.make("gpt2"), tmp_path, Layout(), **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, allow_pickle_weights=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_percent": 0.5}, "rotary_percent=0.5, which must be 1"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "a model with both cannot be read"),
        ({"num_query_groups": 3}, "the first must be a multiple of the second"),
        ({"num_query_groups": 4}, "follows from the settings in"),
    ],
    ids=str,
)
def test_other_llamas_are_refused_in_one_sentence(tmp_path, changes, message):
    write(models.make("llama"), tmp_path, Layout(), **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, allow_pickle_weights=True)


def _edit(file: Path, edit) -> None:
    """Change the content of a rank's file."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(file, weights_only=False)
    edit(state)
    torch.save(state, file)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop("args"), "has no 'args'"),
        (lambda state: state.update(checkpoint_version=1.0), "at least 2.0 is needed"),
        (lambda state: state.pop("model"), "has no 'model' of the chunk 0"),
        (
            lambda state: state["model"].update({"mamba.weight": torch.ones(2)}),
            "has the tensor mamba.weight, which a GPT-2 or LLaMA does not have",
        ),
        (
            lambda state: state["model"].update(
                {"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(41, 26)}
            ),
            "its shards must agree",
        ),
        (
            lambda state: state["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"),
            "but .* does not|it lacks",
        ),
        (lambda state: state.update(evil=os.system), "system, which is refused, because"),
    ],
    ids=["args", "version", "model", "unknown", "sizes", "missing", "code"],
)
def test_damaged_ranks_are_refused_in_one_sentence(tmp_path, edit, message):
    write(models.make("gpt2"), tmp_path, Layout())
    _edit(tmp_path / "iter_0000010" / "mp_rank_00_000" / "model_optim_rng.pt", edit)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, allow_pickle_weights=True)
    assert "\n" not in str(error.value)


def test_tracker_must_name_an_iteration(tmp_path):
    write(models.make("gpt2"), tmp_path, Layout())
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("11")
    with pytest.raises(ValueError, match="names iter_0000011, but there is no"):
        load(tmp_path, allow_pickle_weights=True)
    tracker.write_text("../x")
    with pytest.raises(ValueError, match="must be a number or 'release'"):
        load(tmp_path, allow_pickle_weights=True)


def test_metadata_that_names_other_types_is_refused(tmp_path):
    write_dist(models.make("gpt2"), tmp_path)
    (tmp_path / "iter_0000010" / ".metadata").write_bytes(pickle.dumps(os.system))
    with pytest.raises(ValueError, match="system, which is refused, because"):
        load(tmp_path, allow_pickle_weights=True)


def test_missing_part_is_named(tmp_path):
    write_dist(models.make("gpt2"), tmp_path)
    file = tmp_path / "iter_0000010" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"\.distcp ends before byte"):
        load(tmp_path, allow_pickle_weights=True)
    file.unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing, but .*metadata lists"):
        load(tmp_path, allow_pickle_weights=True)


def test_link_that_leads_out_of_the_checkpoint_is_refused(tmp_path):
    write(models.make("gpt2"), tmp_path / "a", Layout())
    rank = tmp_path / "a" / "iter_0000010" / "mp_rank_01_001"
    rank.rename(tmp_path / "elsewhere")
    rank.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="mp_rank_01_001"):
        load(tmp_path / "a", allow_pickle_weights=True)


def test_folder_of_this_name_without_ranks_is_something_else(tmp_path):
    model = models.make("gpt2")
    model.save_pretrained(tmp_path / "release")
    models.assert_same_logits(model, tmp_path / "release")
