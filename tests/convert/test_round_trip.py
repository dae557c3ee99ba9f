"""Round trips: a Hugging Face model that is imported and exported again is identical to the bit."""

import json
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
import yaml
from flax import nnx
from safetensors.torch import load_file, save_file

from checkpoint.config import CheckpointConfig
from checkpoint.manager import Checkpoints
from convert import from_hf, to_hf
from convert.from_hf import load
from convert.source import read_source
from sharding.mesh import MeshConfig, make_mesh
from tests.convert import cases, comparison


class Warnings(logging.Handler):
    """A logging handler that collects messages of level WARNING or above."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def all_tensors(directory) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        bits = (x.reshape(-1).view(torch.uint8) for x in (found[name], tensor))
        assert found[name].shape == tensor.shape and torch.equal(*bits), name


def read_back(directory):
    """Return (the model as transformers loads it, all warnings of transformers)."""
    config = json.loads((directory / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    heard = Warnings()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.WARNING)  # Another test may have silenced transformers.
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, info = model_class.from_pretrained(
                directory, **cases.EAGER, output_loading_info=True
            )
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    for weight in model.parameters():
        # PyTorch's sums depend on where in memory weights begin, which in a file may be anywhere.
        weight.data = weight.data.clone()
    messages = [*heard.messages, *(str(w.message) for w in caught)]
    return model.eval(), [*messages, *(f"{k}: {v}" for k, v in info.items() if v)]


@pytest.mark.thorough(but=["gpt2", "gpt2_base", "opt"])
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", cases.CASES)
def test_round_trip_preserves_every_tensor(name, tmp_path):
    cases.save(name, tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("theirs", "back")]
    assert configs[0] == configs[1]
    model, complaints = read_back(tmp_path / "back")
    if name in cases.UNTIED_T5:
        # transformers ties T5 by default, finds two different weights in the files, and warns that
        # it unties them.
        assert len(complaints) == 1 and "we will NOT tie them" in complaints.pop()
    assert complaints == []
    with torch.no_grad():
        found = comparison.their_outputs(model, name)
        assert torch.equal(found, comparison.their_outputs(cases.make(name), name))


@pytest.mark.thorough(but=["gpt2", "gpt2_base", "opt"])
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", cases.CASES)
def test_config_is_created_if_there_is_none_to_keep(name, tmp_path):
    cases.save(name, tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    for file in (tmp_path / "ours" / "hf").iterdir():
        file.unlink()
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    if name not in cases.WRITTEN_AS_LLAMA:
        assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "theirs"))
    model, complaints = read_back(tmp_path / "back")
    # Without a config to keep, MAE's encoder becomes a ViT, and transformers misses its pooler.
    assert complaints == [] or name in (*cases.UNTIED_T5, "mae_base")
    with torch.no_grad():
        found = comparison.their_outputs(model, name)
        expected = comparison.their_outputs(cases.make(name), name)
    if name in cases.WRITTEN_AS_LLAMA:  # whose products have other shapes
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


@pytest.mark.thorough(but=["gpt2-dtype0", "gpt2-dtype1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5_v1.1"])
def test_round_trip_of_narrow_dtypes_in_shards_is_exact(name, dtype, tmp_path):
    cases.save(name, tmp_path / "theirs", dtype)
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back", max_shard_bytes=9000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "theirs"))
    # Convert again, because this time the source has shards.
    from_hf.convert(tmp_path / "back", tmp_path / "again")
    to_hf.convert(tmp_path / "again", tmp_path / "once_more")
    assert_same_bits(all_tensors(tmp_path / "once_more"), all_tensors(tmp_path / "theirs"))
    assert len(list((tmp_path / "once_more").glob("*.safetensors"))) == 1
    model, complaints = read_back(tmp_path / "back")
    assert model.dtype == dtype and (complaints == [] or name in cases.UNTIED_T5)


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    directory = cases.save("llama", tmp_path / "theirs")
    tensors = load_file(directory / "model.safetensors")
    # Also if the layers of one stack have different dtypes.
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    from_hf.convert(directory, tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(all_tensors(tmp_path / "back"), tensors)


def test_from_hf_writes_a_run_described_by_its_own_files(tmp_path):
    directory = cases.save("mistral", tmp_path / "theirs")
    (directory / "tokenizer.json").write_text("{}")
    args = [str(directory), str(tmp_path / "ours"), "--config.mesh.fsdp=2", "--config.mesh.model=2"]
    assert from_hf.main(args) == 0
    files = {
        path.relative_to(tmp_path / "ours").as_posix() for path in (tmp_path / "ours").iterdir()
    }
    assert files == {"checkpoints", "config.yaml", "hf"}
    section = yaml.safe_load((tmp_path / "ours" / "config.yaml").read_text())["model"]
    assert section["name"] == "llama" and section["sliding_window"] == 5
    source = read_source(tmp_path / "ours")
    assert source.tokenizer == tmp_path / "ours" / "hf" / "tokenizer.json"
    assert to_hf.main([str(tmp_path / "ours" / "checkpoints" / "0"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_to_hf_reads_checkpoints_of_training(tmp_path):
    """Float32 weights next to an optimizer state, in chunks that follow the shards of a mesh."""
    directory = cases.save("llama", tmp_path / "theirs", torch.bfloat16)
    from_hf.convert(directory, tmp_path / "run")
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, model=2), jax.devices()[:4])):
        params = nnx.to_pure_dict(nnx.split(load(directory))[1])
    state = {"step": jnp.int32(7), "params": params, "opt_state": {"mu": params}}
    config = CheckpointConfig(every_steps=1, max_to_keep=3)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", config)
    checkpoints.save(7, state, {"batches": 7})
    checkpoints.close()
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(directory))
    to_hf.convert(tmp_path / "run", tmp_path / "wide", dtype="float32")
    wide = {name: tensor.float() for name, tensor in all_tensors(directory).items()}
    assert_same_bits(all_tensors(tmp_path / "wide"), wide)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.thorough
def test_to_hf_writes_the_average_by_default(tmp_path):
    directory = cases.save("gpt2", tmp_path / "theirs")
    from_hf.convert(directory, tmp_path / "run")
    params = nnx.to_pure_dict(nnx.split(load(directory))[1])
    average = jax.tree.map(lambda x: 2 * x, params)
    average["token_embedding"] = None  # A frozen parameter is its own average.
    state = {"params": params, "opt_state": ((), (), {"count": jnp.int32(3), "average": average})}
    checkpoints = Checkpoints(
        tmp_path / "run" / "checkpoints", CheckpointConfig(every_steps=1, max_to_keep=3)
    )
    checkpoints.save(3, state, {"batches": 3})
    checkpoints.close()
    assert to_hf.main([str(tmp_path / "run"), str(tmp_path / "raw"), "--raw"]) == 0
    original = all_tensors(directory)
    assert_same_bits(all_tensors(tmp_path / "raw"), original)
    assert to_hf.main([str(tmp_path / "run"), str(tmp_path / "averaged")]) == 0
    doubled = {k: x if "wte" in k else 2 * x for k, x in original.items()}
    assert_same_bits(all_tensors(tmp_path / "averaged"), doubled)


@pytest.mark.parametrize("name", ["qwen2_windowed", "stablelm_qk_norm", *cases.EVEN])
def test_load_on_a_mesh_equals_load_on_one_device(name, tmp_path):
    directory = cases.save(name, tmp_path / "theirs")
    alone = nnx.to_pure_dict(nnx.split(load(directory))[1])
    mesh = make_mesh(MeshConfig(fsdp=2, model=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        spread = nnx.to_pure_dict(nnx.split(load(directory))[1])
    table = spread["token_embedding"]
    assert table.sharding.shard_shape(table.shape) == (table.shape[0] // 2, table.shape[1] // 2)
    jax.tree.map(np.testing.assert_array_equal, spread, alone)


def test_load_accepts_a_mesh_with_some_of_the_axes(tmp_path):
    directory = cases.save("gpt2_even", tmp_path / "theirs")
    axis_types = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((4,), ("model",), axis_types, devices=jax.devices()[:4])):
        table = load(directory).token_embedding[...]
    assert table.sharding.shard_shape(table.shape) == (table.shape[0] // 4, table.shape[1])


def test_load_refuses_a_mesh_with_explicit_axes_and_names_the_remedy(tmp_path):
    directory = cases.save("gpt2_even", tmp_path / "theirs")
    with jax.set_mesh(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])):
        with pytest.raises(ValueError, match=r"explicit axes \(model\).*AxisType\.Auto,\) \* 1 to"):
            load(directory)


def test_tokenizer_is_copied(tmp_path):
    directory = cases.save("gpt2", tmp_path / "theirs")
    text = "a tokenizer and its vocab, carried along"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    bpe.train_from_iterator([text], trainer)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", eos_token="</s>"
    )
    theirs.save_pretrained(directory)
    from_hf.convert(directory, tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back(text)["input_ids"] == theirs(text)["input_ids"]
    assert back.eos_token == "</s>"


def test_load_reads_a_run_and_other_dtypes(tmp_path):
    directory = cases.save("opt_350m", tmp_path / "theirs")
    from_hf.convert(directory, tmp_path / "ours")
    first, second = (
        nnx.to_pure_dict(nnx.split(load(path))[1]) for path in (directory, tmp_path / "ours")
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    narrow = nnx.to_pure_dict(nnx.split(load(directory, dtype="bfloat16"))[1])
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), first, narrow
    )
