"""Tests of GPT-2 against Hugging Face's, and of properties that training relies on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import GPT2Config as HFConfig
from transformers import GPT2LMHeadModel

from configs import gpt2 as gpt2_config
from models.flops import train_flops
from models.functions import functions_of
from models.stack import run_layers
from models.text.common import padded_vocab
from models.text.gpt2 import GPT2, GPT2Config

# Sizes that are not powers of two, and a vocab that needs padding: 211 -> 256.
LAYERS = 3


HEADS = 3


EMBED = 39


VOCAB = 211


POSITIONS = 24


BATCH = 2


LENGTH = 20


CONFIG = GPT2Config(
    vocab_size=VOCAB,
    max_positions=POSITIONS,
    num_layers=LAYERS,
    num_heads=HEADS,
    embed_dim=EMBED,
    dropout=0.0,
)


def build(config: GPT2Config, seed: int = 0) -> GPT2:
    return GPT2(config, rngs=nnx.Rngs(seed))


@functools.cache
def functions():
    return functions_of(nnx.eval_shape(lambda: build(CONFIG)), remat="none")


@functools.cache
def random_params() -> dict:
    """Return parameters that are all random, including biases and norms (initially 0 and 1)."""
    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: build(CONFIG)))[1])

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(centre + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def batch() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH + 1), dtype=np.int32)
    weights = np.ones((BATCH, LENGTH), np.float32)
    weights[1, 5:9] = 0.0
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def model_with(params: dict) -> GPT2:
    model = build(CONFIG)
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def loss_of(params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Return the sum of losses and the sum of weights."""
    cut = functions().split(params)
    x = functions().embed(cut["non_stack"], batch)
    x = run_layers(functions().blocks["decoder"], cut["stacks"]["decoder"], x, batch)
    loss, weight, metrics = functions().head(cut["non_stack"], x, batch)
    assert metrics == {}
    assert isinstance(loss, jax.Array) and isinstance(weight, jax.Array)
    return loss, weight


def as_hugging_face(params: dict) -> dict[str, np.ndarray]:
    """Return a tree of our parameters, or of their gradients, by Hugging Face's names."""
    named = {
        "transformer.wte.weight": params["token_embedding"][:VOCAB],
        "transformer.wpe.weight": params["position_embedding"],
        "transformer.ln_f.weight": params["final_norm"]["scale"],
        "transformer.ln_f.bias": params["final_norm"]["bias"],
    }
    layers = params["decoder"]["layers"]
    for i in range(LAYERS):
        for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            named[f"transformer.h.{i}.{theirs}.weight"] = layers[ours]["scale"][i]
            named[f"transformer.h.{i}.{theirs}.bias"] = layers[ours]["bias"][i]
        for theirs, linear, shape in (
            ("attn.c_attn", layers["attention"]["qkv"], (EMBED, 3 * EMBED)),
            ("attn.c_proj", layers["attention"]["out"], (EMBED, EMBED)),
            ("mlp.c_fc", layers["mlp"]["up"], (EMBED, 4 * EMBED)),
            ("mlp.c_proj", layers["mlp"]["down"], (4 * EMBED, EMBED)),
        ):
            named[f"transformer.h.{i}.{theirs}.weight"] = linear["kernel"][i].reshape(shape)
            named[f"transformer.h.{i}.{theirs}.bias"] = linear["bias"][i].reshape(shape[1])
    return {name: np.array(value) for name, value in named.items()}


@jax.jit
def logits_of(params: dict, tokens: jax.Array) -> jax.Array:
    return model_with(params)(tokens)


@functools.cache
def loss_and_gradients() -> tuple[tuple[jax.Array, jax.Array], dict]:
    return jax.jit(jax.value_and_grad(loss_of, has_aux=True))(random_params(), batch())


@functools.cache
def hugging_face() -> GPT2LMHeadModel:
    config = HFConfig(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=EMBED,
        n_layer=LAYERS,
        n_head=HEADS,
    )
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config).eval()
    state = {name: torch.tensor(a) for name, a in as_hugging_face(random_params()).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == [] and missing == ["lm_head.weight"]  # which is tied
    return model


def hugging_face_loss(logits: torch.Tensor) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB),
        torch.tensor(batch()["targets"], dtype=torch.long).reshape(-1),
        reduction="none",
    )
    return (losses * torch.tensor(batch()["weights"]).reshape(-1)).sum()


def test_logits_equal_hugging_faces():
    ours = logits_of(random_params(), batch()["tokens"])
    with torch.no_grad():
        theirs = hugging_face()(torch.tensor(batch()["tokens"])).logits.numpy()
    assert ours.dtype == jnp.float32 and ours.shape == (BATCH, LENGTH, VOCAB)
    # Logits of this model reach 20; float32 rounding over 3 layers stays below 1e-5 of that.
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_loss_and_every_gradient_equal_hugging_faces():
    (loss, weight), grads = loss_and_gradients()
    model = hugging_face()
    model.zero_grad()
    expected = hugging_face_loss(model(torch.tensor(batch()["tokens"])).logits)
    expected.backward()
    assert float(weight) == batch()["weights"].sum() == BATCH * LENGTH - 4
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    ours = as_hugging_face(grads)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # The gradient of key biases is rounding error, so compare with the parameter's largest.
        np.testing.assert_allclose(
            ours[name], gradient, atol=1e-3 * np.abs(gradient).max(), rtol=0, err_msg=name
        )


def test_vocab_padding_has_zero_gradient_and_probability():
    (loss, _), grads = loss_and_gradients()
    table = grads["token_embedding"]
    assert table.shape == (256, EMBED)
    assert not np.any(table[VOCAB:]) and np.all(np.any(table[:VOCAB], axis=1))
    louder = dict(random_params())
    louder["token_embedding"] = louder["token_embedding"].at[VOCAB:].mul(1000.0)
    # This is another compiled program: float32 rounding of the sum differs.
    np.testing.assert_allclose(jax.jit(loss_of)(louder, batch())[0], loss, rtol=1e-6)


def test_causality():
    """The output at a position has no gradient with respect to later inputs."""
    cut = functions().split(random_params())
    x_BTD = functions().embed(cut["non_stack"], batch())[:1, :8]
    direction = jax.random.normal(jax.random.key(0), (EMBED,))

    def output(x_BTD, position):
        y_BTD = run_layers(functions().blocks["decoder"], cut["stacks"]["decoder"], x_BTD, {})
        return y_BTD[0, position] @ direction

    grads_PTD = jax.jit(jax.vmap(jax.grad(output), (None, 0)))(x_BTD, jnp.arange(8))[:, 0]
    depends_PT = np.any(grads_PTD, axis=-1)
    np.testing.assert_array_equal(depends_PT, np.tril(np.ones((8, 8), bool)))


def test_positions_matter():
    """Swapping two tokens changes later outputs, so learned positions are in use."""
    tokens = np.array(batch()["tokens"][:1])
    swapped = tokens.copy()
    swapped[0, [2, 3]] = tokens[0, [3, 2]]
    logits = logits_of(random_params(), np.concatenate([tokens, swapped]))
    assert np.abs(logits[0, -1] - logits[1, -1]).max() > 1e-3


@pytest.mark.parametrize(
    "size, published",
    [
        ("small", 124_439_808),
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("xl", 1_557_611_200),
    ],
)
def test_parameter_count_equals_the_published_one_plus_padding(size, published):
    num_layers, num_heads, embed_dim, positions, _ = gpt2_config.SIZES[size]
    config = GPT2Config(
        vocab_size=50257,
        max_positions=positions,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        dropout=0.1,
    )
    params = nnx.split(nnx.eval_shape(lambda: build(config)))[1]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    padding = 50304 - 50257  # rows that pad the token embedding to a multiple of 128
    assert padded_vocab(config.vocab_size, config.vocab_multiple) == 50304
    assert count == published + padding * config.embed_dim


@pytest.mark.parametrize("vocab, multiple, padded", [(256, 128, 256), (257, 128, 384), (5, 1, 5)])
def test_padded_vocab_size_is_the_next_multiple(vocab, multiple, padded):
    assert padded_vocab(vocab, multiple) == padded


@pytest.mark.thorough
def test_initial_standard_deviations_are_gpt2s():
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.split(build(CONFIG))[1]))()
    layers = params["decoder"]["layers"]
    residual = 0.02 / np.sqrt(2 * LAYERS)
    for array, deviation in (
        (params["token_embedding"], 0.02),
        (params["position_embedding"], 0.02),
        (layers["attention"]["qkv"]["kernel"], 0.02),
        (layers["attention"]["out"]["kernel"], residual),
        (layers["mlp"]["up"]["kernel"], 0.02),
        (layers["mlp"]["down"]["kernel"], residual),
    ):
        error = deviation / np.sqrt(2 * array.size)  # error of the estimate; the seed is fixed
        assert abs(array.std() - deviation) < 4 * error
        assert abs(array.mean()) < 4 * deviation / np.sqrt(array.size)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ("bias", "scale"):
            np.testing.assert_array_equal(leaf, 1.0 if path[-1].key == "scale" else 0.0)
    kernels = layers["mlp"]["up"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])  # layers are initialized differently


def test_flops_equal_a_count_by_hand():
    config = GPT2Config(
        vocab_size=10, max_positions=4, num_layers=2, num_heads=2, embed_dim=8, dropout=0.0
    )
    model = nnx.eval_shape(lambda: build(config))
    kernels = 2 * (8 * 24 + 8 * 8 + 8 * 32 + 32 * 8)  # qkv, out, up, down: 1536
    scores = 2 * (4 * 8 + 4 * 8) // 2  # q·k and weights·v over 4 positions, half masked: 64
    head = 2 * 8 * 10  # the vocab without padding
    ids = jax.ShapeDtypeStruct((3, 4), jnp.int32)
    batch = {"tokens": ids, "targets": ids, "weights": ids}
    params = nnx.to_pure_dict(nnx.split(model)[1])
    flops = train_flops(functions_of(model, remat="none"), params, batch)
    assert flops == 3 * 12 * (2 * (kernels + scores) + head) == 3 * 12 * 3360


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 4}, r"model\.num_heads=4 must divide model\.embed_dim=39"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0 must be in \[0, 1\)"),
        ({"num_layers": 0}, r"model\.num_layers=0 must be at least 1"),
        ({"loss": "no_such_module:f"}, r"model\.loss='no_such_module:f': there is no module"),
        ({"loss": "json:__name__"}, r"model\.loss='json:__name__' is not a function"),
    ],
    ids=str,
)
def test_config_errors_contain_name_and_value(changes, message):
    fields = {
        "vocab_size": VOCAB,
        "max_positions": POSITIONS,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "embed_dim": EMBED,
        "dropout": 0.0,
    }
    with pytest.raises(ValueError, match=message):
        GPT2Config(**{**fields, **changes})
