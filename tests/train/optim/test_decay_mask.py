"""Which parameters weight decay applies to, compared with `transformers` and published code."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors.torch import load_file

from convert.source import read_source
from models.stack import Stack
from models.vision.swin import Swin, SwinConfig
from models.vision.vit import ViT, ViTConfig
from sharding.mesh import make_mesh
from tests.convert.cases import VOCAB, save
from tests.runs import CONFIG, ROOT
from train.config.config_files import load
from train.config.schema import validate_config
from train.optim.optimizer import decay_mask
from train.optim.per_layer import one_layer
from train.run.assemble import assemble_run


def test_decay_mask_of_gpt2_selects_matrices_and_embeddings():
    config = validate_config(load(CONFIG))
    run = assemble_run(config, make_mesh(config.mesh, jax.devices()), vocab_size=257)
    mask = decay_mask(one_layer(run.state_layout.abstract.params, ("decoder",)))
    decays = jax.tree_util.tree_leaves_with_path(mask)
    names = {".".join(key.key for key in path): decayed for path, decayed in decays}
    decayed = {name for name, is_decayed in names.items() if is_decayed}
    assert decayed == {
        "token_embedding",
        "position_embedding",
        *(f"decoder.layers.attention.{name}.kernel" for name in ("qkv", "out")),
        *(f"decoder.layers.mlp.{name}.kernel" for name in ("up", "down")),
    }
    kept = {name.rpartition(".")[2] for name in names.keys() - decayed}
    assert kept == {"bias", "scale"} and len(names.keys() - decayed) == 10


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama_biases", "qwen3", "bert_pretraining"])
def test_decay_mask_exempts_every_vector_of_transformers(name, tmp_path):
    """A bias of heads has two dims here and one there; a stack has one tensor per layer there."""
    source = read_source(save(name, tmp_path))
    model = source.abstract()
    params = nnx.to_pure_dict(nnx.split(model)[1])
    decays = {
        ".".join(key.key for key in path): is_decayed
        for path, is_decayed in jax.tree.leaves_with_path(
            decay_mask(one_layer(params, stacks(model)))
        )
    }
    assert source.architecture is not None
    mappings = source.architecture.tensor_mappings(source.shapes(), vocab_size=VOCAB)
    theirs = load_file(tmp_path / "model.safetensors")
    for mapping in mappings:
        assert decays[mapping.ours] == (theirs[mapping.theirs].ndim > 1), mapping


def stacks(model: Any) -> list[str]:
    return [name for name, value in vars(model).items() if isinstance(value, Stack)]


def not_decayed_of(model: Any) -> set[str]:
    params = nnx.to_pure_dict(nnx.split(model)[1])
    mask = jax.tree_util.tree_leaves_with_path(
        decay_mask(one_layer(params, stacks(model)), not_decayed=model.not_decayed)
    )
    names = {".".join(key.key for key in path) for path, is_decayed in mask if not is_decayed}
    return {name for name in names if not name.endswith((".bias", ".scale"))}


def test_image_models_do_not_decay_tokens_positions_and_scales():
    """Match `no_weight_decay` and `no_weight_decay_keywords` of the models' published code."""
    vit: dict[str, Any] = {
        name: 4 for name in ("image_size", "num_layers", "num_heads", "embed_dim", "mlp_dim")
    }
    swin: dict[str, Any] = {
        "image_size": 8,
        "embed_dim": 4,
        "depths": (2,),
        "num_heads": (2,),
        "window_size": 4,
    }
    build = nnx.eval_shape
    assert not_decayed_of(build(lambda: ViT(ViTConfig(**vit, patch_size=2), rngs=nnx.Rngs(0)))) == {
        "class_token",
        "position_embedding",
    }
    first = build(lambda: Swin(SwinConfig(**swin), rngs=nnx.Rngs(0)))
    blocks = [f"stage0.layers.{block}" for block in ("first", "second")]
    assert not_decayed_of(first) == {f"{block}.bias.table" for block in blocks}
    second = build(lambda: Swin(SwinConfig(**swin, version=2), rngs=nnx.Rngs(0)))
    of_block = ("bias.up.kernel", "bias.down.kernel", "attention.q_norm.log_scale")
    assert not_decayed_of(second) == {f"{block}.{name}" for block in blocks for name in of_block}


@pytest.mark.thorough
def test_run_does_not_decay_parameters_named_by_the_model():
    config = validate_config(load(str(ROOT / "configs" / "vit.py"), ["optimizer.warmup_steps=0"]))
    run = assemble_run(config, make_mesh(config.mesh, jax.devices()), num_labels=10)
    params = run.state_layout.initial().params
    zeros: Any = jax.tree.map(jnp.zeros_like, params)
    updates: Any = run.optimizer.update(zeros, run.optimizer.init(params), params)[0]
    largest = jax.tree.map(lambda x: float(jnp.abs(x).max()), updates)
    assert largest["class_token"] == largest["position_embedding"] == 0
    assert largest["classifier"]["kernel"] > 0


def test_dora_magnitudes_are_not_decayed():
    """In PEFT a magnitude is a vector, which the usual rule exempts; A and B are matrices."""
    layers = {"a": (3, 8, 4), "b": (3, 4, 2, 5), "magnitude": (3, 2, 5)}
    lora = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in layers.items()}
    for params in ({"layers": {"up": {"lora": lora}}}, {"classifier": {"lora": lora}}):
        mask = decay_mask(one_layer({"blocks": params}, ("blocks",)))
        decayed = [path[-1].key for path, decays in jax.tree.leaves_with_path(mask) if decays]
        assert decayed == ["a", "b"]
