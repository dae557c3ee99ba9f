"""Sequences that are split over devices, and variants of blocks, equal one device's training.

Combinations are drawn from: text models × ways to split sequences × what else divides the devices ×
what a token sees.
"""

import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest

from data.batches import train_batches
from tests.runs import FLOAT64, ROOT, make_run
from tests.train.meshes import models_on_meshes as measured
from train.config.config_files import load
from train.config.schema import validate_config

#: Losses, and parameters after Adam's division, in float64.
TOLERANCE = 1e-9
NUM_STEPS = 3

SPLITS = {
    "ring of 2": ("mesh.context=2", "mesh.ulysses=1"),
    "heads over 2": ("mesh.context=2", "mesh.ulysses=2"),
    "ring of 4": ("mesh.context=4", "mesh.ulysses=1"),
    "heads over 2, ring of 2": ("mesh.context=4", "mesh.ulysses=2"),
}
COMPANIONS = {
    "alone": (),
    "pipeline=2": ("mesh.pipeline=2",),
    "pipeline=2, vocab shared": ("mesh.pipeline=2", "pipeline.share_vocab=true"),
    "model=2": ("mesh.model=2",),
    "fsdp=2": ("mesh.fsdp=2",),
    "ZeRO 1": ("memory.zero_stage=1",),
    "ZeRO 3": ("mesh.data=2", "memory.zero_stage=3"),
    "zero_bubble, ZeRO 2": (
        "mesh.pipeline=2",
        "pipeline.schedule=zero_bubble",
        "train.remat=none",
        "memory.zero_stage=2",
    ),
}
DOCUMENTS = ("data.isolate_documents=true",)
ROWS = {
    "GPT-2": {"whole": (), "documents": DOCUMENTS},
    "OPT": {"whole": (), "documents": DOCUMENTS},
    "OPT 350m": {"whole": ()},
    "LLaMA": {"whole": (), "documents": DOCUMENTS},
    "Mistral": {"window": (), "window, documents": DOCUMENTS},
    "Qwen 2": {"whole": (), "documents": DOCUMENTS},
    "Qwen 3": {"whole": (), "documents": DOCUMENTS},
    "BERT": {"pairs": ()},
    "BERT, classifier": {"padding": ()},
    "RoBERTa": {"whole": (), "documents": DOCUMENTS},
    "ModernBERT": {"window": (), "window, documents": DOCUMENTS},
    "ModernBERT, classifier": {"window, padding": ()},
    "T5 1.0": {"spans": ()},
    "T5 1.1": {"spans": ()},
}


def fits(model: str, split: str, companion: str) -> bool:
    """Return whether the devices suffice, and the heads can be exchanged."""
    settings = (*SPLITS[split], *COMPANIONS[companion])
    sizes = [int(s.split("=")[1]) for s in settings if re.match(r"mesh\.(?!ulysses)", s)]
    has_two_kv_heads = "model.num_kv_heads=2" in measured.MODELS[model][1]
    splits_heads = "mesh.ulysses=2" in settings and "mesh.model=2" in settings
    return math.prod(sizes) <= 8 and not (has_two_kv_heads and splits_heads)


CASES = [
    (model, rows, split, companion)
    for model, of_model in ROWS.items()
    for rows, split, companion in itertools.product(of_model, SPLITS, COMPANIONS)
    if fits(model, split, companion)
]


@functools.cache
def trained(model: str, more: tuple[str, ...]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return losses and parameters after some steps, in float64."""
    config, overrides = measured.MODELS[model]
    with jax.enable_x64(True):
        where = measured.overrides_of_data(config, overrides)
        run, corpus = make_run(
            (*measured.SHARED, *where, *overrides, *FLOAT64, *more),
            str(ROOT / "configs" / f"{config}.py"),
        )
        state = run.state_layout.initial()
        losses = []
        batches = train_batches(corpus, run.config.data, run.rows, seed=0)
        for _ in range(NUM_STEPS):
            state, metrics = run.compile_train_step()(state, run.place_batch(next(batches)))
            losses.append(float(metrics["loss"]))
        params = run.state_layout.to_portable(state).params
        named = jax.tree_util.tree_leaves_with_path(params)
        return losses, {str(path): np.asarray(leaf) for path, leaf in named}


def check(model: str, rows: tuple[str, ...], mesh: tuple[str, ...]) -> None:
    expected_losses, expected = trained(model, rows)
    losses, params = trained.__wrapped__(model, (*rows, *mesh))
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE, atol=0)
    for name, values in expected.items():
        np.testing.assert_allclose(
            params[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("model", "rows", "split", "companion"), CASES)
def test_training_equals_one_device(model, rows, split, companion):
    check(model, ROWS[model][rows], (*SPLITS[split], *COMPANIONS[companion]))


#: Variants of the block that published models have, by one of these models.
VARIANTS = {
    "Command-R+": ("model.norms=parallel", "model.qk_norm=true", "model.qk_norm_by_head=true"),
    "OLMo 2": ("model.norms=after", "model.qk_norm=true", "model.qk_norm_over_heads=true"),
    "GLM-4": (
        "model.norms=around",
        "model.head_dim=8",
        "model.rotary_fraction=0.5",
        "model.rotary_pairs=neighbours",
    ),
    "Granite": (
        "model.embedding_scale=3.0",
        "model.attention_scale=0.2",
        "model.residual_scale=0.5",
        "model.logit_scale=0.5",
    ),
    "Command-R": ("model.norms=parallel", "model.norm=layer_no_bias", "model.tie_embeddings=true"),
    "Gemma 3": (
        "model.layer_types=('window', 'window', 'full')",
        "model.sliding_window=7",
        "model.window_rope_theta=50.0",
        "model.norm=rms_1p",
        "model.norms=around",
    ),
    "Gemma 2": (
        "model.layer_types=('window', 'full')",
        "model.sliding_window=7",
        "model.attention_softcap=1.5",
        "model.logit_softcap=2.5",
    ),
    "LLaMA 4": ("model.layer_types=('chunked', 'no_positions')", "model.attention_chunk=5"),
    "SmolLM3": ("model.layer_types=('full', 'no_positions')",),
    "DeepSeek-V2": (
        "model.num_kv_heads=4",
        "model.latent_dim=12",
        "model.query_latent_dim=20",
        "model.latent_rotary_dim=4",
        "model.value_dim=6",
        "model.rotary_pairs=neighbours",
    ),
    "Nemotron": ("model.norm=layer_1p", "model.activation=relu2", "model.is_gated=false"),
    "DistilBERT": ("model.num_token_types=0", "model.pooler_activation=relu"),
    "ELECTRA": ("model.token_embed_dim=12",),
    "DeiT": ("images.size=8", "model.patch_size=2", "model.distillation=classifier"),
}
#: Variant -> the model that it changes, if that is not LLaMA.
CHANGED = {"DistilBERT": "BERT, classifier", "ELECTRA": "RoBERTa", "DeiT": "ViT"}


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "mesh",
    [
        measured.MESHES["2×2×2"],
        ("mesh.context=2", "mesh.ulysses=1", "mesh.model=2"),
        ("mesh.context=2", "mesh.ulysses=2", "memory.zero_stage=3"),
    ],
    ids=["2x2x2", "ring of 2, model=2", "heads over 2, ZeRO 3"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_block_equal_one_device(variant, mesh):
    check(CHANGED.get(variant, "LLaMA"), VARIANTS[variant], mesh)


IMAGES = {
    "ViT": (),
    "ViT, mean of patches": (),
    "MAE": ("model.mask_ratio=0.6",),  # 4 of 10 tokens in the encoder
}


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("split", ["ring of 2", "heads over 2"])
@pytest.mark.parametrize("model", IMAGES)
def test_images_whose_patches_and_class_token_divide(model, split):
    """10 tokens: 9 patches and the class token."""
    sizes = ("images.size=6", "model.patch_size=2", *IMAGES[model])
    check(model, sizes, (*SPLITS[split], "mesh.pipeline=2"))


def refusal(config: str, *overrides: str) -> str:
    path = str(ROOT / "configs" / f"{config}.py")
    with pytest.raises(ValueError) as caught:
        make_run(overrides, path)
    return str(caught.value)


def test_sequences_that_do_not_divide_are_refused_with_lengths_that_do():
    shared = ("data.tokenizer=bytes", "mesh.context=4", "mesh.ulysses=1")
    found = refusal("gpt2", *shared, "data.sequence_length=100")
    assert found == (
        "mesh.context=4 splits sequences into 8 equal parts, two chunks for each of 4 in a ring, "
        "but GPT2 has one of 100 tokens; choose 96 or 104 tokens, or set another mesh.context"
    )


def test_images_that_do_not_divide_are_refused_with_sizes_that_do():
    assert refusal("vit", "mesh.context=2").endswith(
        "but ViT has one of 17 tokens; choose images.size=6 or images.size=10, or set another "
        "mesh.context"
    )
    assert "no size of images has one" in refusal("vit", "mesh.context=4")


@pytest.mark.parametrize("config", ["swin", "resmlp", "moco"])
def test_models_that_mix_whole_rows_are_refused_by_name(config):
    found = refusal(config, "mesh.context=2")
    assert re.match(r"mesh\.context=2 splits sequences, but (Swin|ResMLP|MoCo)\w* does not", found)


def test_exchange_of_heads_must_fit():
    shared = ("data.tokenizer=bytes", "mesh.context=4")
    heads = ("model.num_heads=6", "model.embed_dim=48")
    found = refusal("gpt2", *shared, *heads, "mesh.ulysses=4")
    assert "mesh.ulysses=4 must divide mesh.context=4 and the key-value heads of a device (6)" in (
        found
    )
    assert "choose 1 or 2" in found
    with pytest.raises(ValueError, match=r"mesh\.ulysses=3 must divide mesh\.context=4"):
        validate_config(load(str(ROOT / "configs" / "gpt2.py"), (*shared, "mesh.ulysses=3")))
