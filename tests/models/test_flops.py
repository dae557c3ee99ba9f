"""Tests of model FLOPs against PyTorch's count of transformers' models, and against formulas."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers
from flax import nnx
from torch.utils.flop_counter import FlopCounterMode

from convert.keys import read
from convert.registry import architectures
from docs.examples.gated_mean import GatedMean, GatedMeanConfig
from models.adapters import add_adapters
from models.flops import num_tokens, train_flops
from models.functions import functions_of
from models.layers.flops import attention_flops
from models.layers.lora import LoraConfig
from models.preference import PreferenceConfig, with_preference
from models.text.causal import CausalModel
from models.text.gpt2 import GPT2, GPT2Config
from models.text.llama import Llama, LlamaConfig
from models.text.modernbert import ModernBert
from models.text.t5 import T5
from models.vision.mae import MAE
from models.vision.moco import MoCo, MoCoConfig
from models.vision.resmlp import ResMLP, ResMLPConfig
from tests.convert import cases, comparison

B = 5
T = 205  # two chunks of tokens would not be equal: one token is padding

#: Cases whose model has a loss.
WITH_LOSS = [name for name in cases.CASES if not name.endswith("base")]


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract(model_class: Any, config: Any, lora: LoraConfig | None = None) -> Any:
    def build() -> nnx.Module:
        model = model_class(config, rngs=nnx.Rngs(0))
        add_adapters(model, lora or LoraConfig(), seed=0)
        return model

    return nnx.eval_shape(build)


def params_of(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.split(model)[1])


def flops_of(model: nnx.Module, batch: dict, **options: Any) -> int:
    return train_flops(functions_of(model, remat="none"), params_of(model), batch, **options)


def text_batch(size: int = B, length: int = T) -> dict:
    ids = struct(size, length, dtype=jnp.int32)
    return {"tokens": ids, "targets": ids, "weights": struct(size, length)}


def image_batch(size: int, side: int, channels: int = 3) -> dict:
    images = struct(size, side, side, channels, dtype=jnp.uint8)
    return {"images": images, "targets": struct(size, dtype=jnp.int32), "weights": struct(size)}


def converted(model_class: str, config: transformers.PretrainedConfig) -> Any:
    """Return our abstract model for a config of transformers."""
    found = architectures()[model_class]
    fields = read(json.loads(config.to_json_string()), found.keys, harmless=found.harmless)
    if "mtp_depths" in fields:
        fields["mtp_depths"] = 0  # transformers' model has no losses of later tokens
    return abstract(found.model_class, found.model_class.Config(**fields, **found.fields))


def training_batch(name: str) -> dict:
    """Return the shapes of a case's inputs, with targets."""
    inputs = {key: struct(*x.shape, dtype=x.dtype) for key, x in comparison.inputs(name).items()}
    rows = len(comparison.inputs(name)[next(iter(inputs))])
    targets = inputs.get("decoder_tokens", inputs.get("tokens"))
    if targets is None or name.endswith("sequence"):
        targets = struct(rows, dtype=jnp.int32)
    inputs |= {"targets": targets, "weights": struct(*targets.shape)}
    if name == "bert_pretraining":
        inputs |= {"labels": struct(rows, dtype=jnp.int32), "label_weights": struct(rows)}
    return {"mask_seeds": struct(rows, dtype=jnp.uint32), **inputs}


def counted_by_torch(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def unneeded_flops(model: Any, batch: dict) -> int:
    """Return the FLOPs of products that only transformers computes: of masked scores, and others.

    Its MAE also predicts the pixels of the class token.
    """
    config = model.config
    if isinstance(model, MAE):
        values = config.patch_size**2 * config.num_channels
        return 2 * batch["images"].shape[0] * config.decoder_embed_dim * values
    if isinstance(model, T5):
        num_layers = config.num_decoder_layers
    elif isinstance(model, CausalModel | ModernBert):
        num_layers = config.num_layers
    else:
        return 0
    rows, length = batch.get("decoder_tokens", batch["tokens"]).shape
    head_dim = getattr(config, "head_dim", config.embed_dim // config.num_heads)
    key_dim = value_dim = head_dim
    if getattr(config, "latent_dim", None):
        key_dim += config.rotary_dim
        value_dim = config.value_dim or head_dim
    types = getattr(config, "types", ("full",) * num_layers)
    total = 0
    for layer_type in types:
        window = config.sliding_window if layer_type == "window" else length
        seen = min(window, length)
        # Per query, rounded down; a diagonal counts half. The 2 FLOPs cancel with that half.
        of_scores = config.num_heads * (key_dim + value_dim)
        sides = 2 if isinstance(model, ModernBert) else 1
        unmasked = (2 * length * seen - seen**2) * sides * of_scores // length
        total += length * (2 * length * of_scores - unmasked)
    return rows * total


@pytest.mark.thorough(but=["gpt2", "gemma3", "deepseek2", "bert_pretraining", "t5", "mae"])
@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", WITH_LOSS)
def test_flops_equal_those_of_transformers_without_masked_products(name):
    class_name, _ = cases.CASES[name]
    theirs = cases.make(name)
    for module in theirs.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1000  # all choices count, even those without room
    model = converted(class_name, theirs.config)
    batch = training_batch(name)
    expected = counted_by_torch(lambda: comparison.their_outputs(theirs, name))
    expected -= unneeded_flops(model, batch)
    assert flops_of(model, batch) == 3 * expected


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_flops_of_pairs_equal_those_of_transformers(name):
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3}
    text = {"vocab_size": 60, "max_position_embeddings": 9, "eos_token_id": 59, **sizes}
    images = {"image_size": 12, "patch_size": 4, **sizes, "num_hidden_layers": 3}
    text |= {"num_hidden_layers": 2} | ({"projection_size": 24} if name == "SiglipModel" else {})
    model_class = getattr(transformers, name)
    options = {"projection_dim": 20} if name == "CLIPModel" else {}
    config = model_class.config_class(text_config=text, vision_config=images, **options)
    config.architectures = [name]
    theirs = model_class(config)
    theirs.set_attn_implementation("eager")
    model = converted(name, config)
    tokens = torch.zeros((B, 9), dtype=torch.long)
    pixels = torch.zeros((B, 3, 12, 12))
    expected = counted_by_torch(lambda: theirs(input_ids=tokens, pixel_values=pixels))
    # Each image with all texts, and each text with all images: transformers transposes the first.
    expected += 2 * B * B * model.config.projection_dim
    if name == "CLIPModel":
        expected -= B * 2 * 9 * (2 * 9 * 24)  # masked half of both products, in both layers
    batch = {"tokens": struct(B, 9, dtype=jnp.int32), **image_batch(B, 12)}
    assert flops_of(model, batch) == 3 * expected


def gpt2(**changes: Any) -> GPT2Config:
    fields = {"vocab_size": 50, "max_positions": 256, "num_layers": 3, "num_heads": 4}
    return GPT2Config(**fields, embed_dim=24, **changes)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (GPT2, gpt2()),
        (GPT2, gpt2(vocab_multiple=1)),
        (
            Llama,
            LlamaConfig(
                vocab_size=50,
                max_positions=256,
                num_layers=3,
                num_heads=4,
                num_kv_heads=2,
                head_dim=6,
                embed_dim=24,
                mlp_dim=40,
            ),
        ),
    ],
)
def test_flops_equal_the_formula_of_palm_with_causal_attention_at_half(model_class, config):
    """6 N + 12 L H Q T per token, PaLM, appendix B; its second term halves."""
    model = abstract(model_class, config)
    leaves = jax.tree_util.tree_leaves_with_path(params_of(model))
    num_kernels = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    num_params = num_kernels + 50 * 24  # the head, without padding
    per_token = 6 * num_params + 12 * 3 * 4 * 6 * T // 2
    assert flops_of(model, text_batch()) == B * T * per_token


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_have_no_flops_and_kernels_no_gradients(use_dora):
    plain = flops_of(abstract(GPT2, gpt2()), text_batch())
    adapted = abstract(GPT2, gpt2(), LoraConfig(rank=2, targets=("*",), use_dora=use_dora))
    assert 3 * flops_of(adapted, text_batch(), has_adapters=True) == 2 * plain


def test_preferences_have_the_flops_of_a_language_model():
    model = abstract(GPT2, gpt2())
    functions = with_preference(functions_of(model, remat="full"), model, PreferenceConfig())
    batch = text_batch() | {
        "answers": struct(B, T, dtype=jnp.int32),
        "weights": struct(B, 2),
        "reference_log_probs": struct(B, 2, 2),
    }
    assert train_flops(functions, params_of(model), batch) == flops_of(model, text_batch())


def test_a_teacher_has_a_forward_pass_only():
    config = MoCoConfig(
        image_size=8,
        num_channels=3,
        patch_size=4,
        num_layers=2,
        num_heads=2,
        embed_dim=8,
        mlp_dim=12,
        hidden_dim=10,
        projection_dim=6,
    )
    model = abstract(MoCo, config)
    batch = {"images": struct(B, 2, 8, 8, 3, dtype=jnp.uint8), "weights": struct(B)}
    patches = 4
    tokens = 1 + patches
    layer = 2 * (4 * 8 * 8 + 2 * 8 * 12) + 4 * tokens * 8
    encoder = patches * 2 * 48 * 8 + tokens * 2 * layer
    projector = 2 * (8 * 10 + 10 * 10 + 10 * 6)
    predictor = 2 * (6 * 10 + 10 * 6)
    keys = 2 * 6 * B  # of the other view of all images
    per_view = 3 * (encoder + projector + predictor + keys) + encoder + projector
    assert flops_of(model, batch) == B * 2 * per_view


def test_linear_layers_across_patches_count():
    config = ResMLPConfig(
        image_size=8,
        patch_size=4,
        num_layers=2,
        embed_dim=8,
        mlp_dim=12,
        layer_scale=0.1,
        num_labels=7,
    )
    patches = 4
    layer = patches * (patches * 8 + 2 * 8 * 12)
    multiplications = patches * 48 * 8 + 2 * layer + 8 * 7
    assert flops_of(abstract(ResMLP, config), image_batch(B, 8)) == 3 * B * 2 * multiplications


def test_a_model_of_ones_own_needs_no_formula():
    config = GatedMeanConfig(vocab_size=50, num_layers=3, embed_dim=24, dropout=0.1)
    per_token = 3 * 3 * 24 * 48 + 24 * 50  # up, gate and down of each layer, and the head
    assert flops_of(abstract(GatedMean, config), text_batch()) == 3 * B * T * 2 * per_token


@pytest.mark.parametrize("window", [1, 4, 16, 100])
def test_window_attention_flops_count_the_band(window):
    length = 16
    seen = min(window, 16)
    # The band is a parallelogram minus a triangle; products on the diagonals count half.
    band = length * seen - seen * seen / 2
    flops = attention_flops(length, 3, 5, is_causal=True, window=window)
    assert flops == int(4 * 3 * 5 * band / length)
    assert attention_flops(length, 3, 5, is_causal=False, window=window) == 2 * flops


def test_attention_flops_count_values_of_another_size():
    assert attention_flops(16, 3, 5, is_causal=False, value_dim=2) == 2 * 16 * 3 * (5 + 2)


def test_tokens_of_encoder_and_decoder_count():
    shapes = {"tokens": struct(2, 5), "decoder_tokens": struct(2, 3), "targets": struct(2, 3)}
    assert num_tokens(shapes) == 16
