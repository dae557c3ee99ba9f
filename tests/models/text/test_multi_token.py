"""Multi-token prediction equals an implementation in torch, in float64.

The reference computes every document on its own and every token by its position in the document, so
nothing in it is shifted, packed or masked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from generate.decoder import decoder_of
from models.functions import functions_of
from models.text.llama import Llama, LlamaConfig

VOCAB = 50
HEADS = 4
KV_HEADS = 2
SIZE = 6
#: Float64 rounding, and sums in another order.
TOLERANCE = 1e-12

CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    num_layers=3,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=SIZE,
    embed_dim=24,
    mlp_dim=20,
    max_positions=32,
    init_stddev=0.3,
    mtp_depths=2,
    mtp_loss=0.3,
)


def norm(x, scale):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + CONFIG.rms_norm_epsilon) * scale


def rotated(x):
    """Rotate features i and i + SIZE / 2 of `[T, N, H]` by position · θ_i."""
    half = SIZE // 2
    steps = torch.arange(half, dtype=torch.float64)
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-steps / half)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def block(x, p):
    normal = norm(x, p["attention_norm"]["scale"])
    q, k, v = (
        torch.einsum("td,dnh->tnh", normal, p["attention"][name]["kernel"]) for name in "qkv"
    )
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (rotated(k), v))
    scores = torch.einsum("tnh,snh->nts", rotated(q), k) / SIZE**0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    y = torch.einsum("nts,snh->tnh", shares, v)
    x = x + torch.einsum("tnh,nhd->td", y, p["attention"]["out"]["kernel"])
    normal = norm(x, p["mlp_norm"]["scale"])
    gate, up, down = (p["mlp"][name]["kernel"] for name in ("gate", "up", "down"))
    return x + (torch.nn.functional.silu(normal @ gate) * (normal @ up)) @ down


def losses_of_document(params, tokens, targets, weights):
    """Return the sums of the losses of depth 0, 1 and 2 for the tokens of one document."""
    layers = [tree_at(params["decoder"]["layers"], number) for number in range(3)]
    embedded = params["token_embedding"][tokens]
    h = embedded
    for layer in layers:
        h = block(h, layer)
    h = norm(h, params["final_norm"]["scale"])
    sums = []
    for depth in range(3):
        if depth:
            p = tree_at(params["mtp"]["layers"], depth - 1)
            e = norm(embedded[depth:], p["embedding_norm"]["scale"])
            h = norm(h[: len(e)], p["hidden_norm"]["scale"])
            kernel = p["joint"]["kernel"]
            h = norm(block(e @ kernel[0] + h @ kernel[1], p), p["output_norm"]["scale"])
        logits = h @ params["output_embedding"][:VOCAB].T
        losses = torch.nn.functional.cross_entropy(logits, targets[depth:], reduction="none")
        sums.append((losses * weights[depth:]).sum())
    return torch.stack(sums)


def tree_at(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def packed_batch():
    """Return rows with several documents and padding; some tokens in them have no weight."""
    rng = np.random.default_rng(0)
    ids = np.array([[1] * 7 + [2] * 4 + [0] * 2, [1] * 2 + [2] * 1 + [3] * 10], np.int32)
    tokens = rng.integers(0, VOCAB, ids.shape, dtype=np.int32)
    has_next = np.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (0, 1))) & (ids > 0)
    weights = has_next * rng.integers(0, 3, ids.shape) / 2
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": weights,
        "segment_ids": ids,
    }


def our_losses(params, model, batch):
    functions = functions_of(model, remat="full")
    parts = functions.split(params)
    x = functions.embed(parts["non_stack"], batch)
    for name, count in functions.num_layers.items():
        if name in functions.before:
            x = functions.before[name](parts["non_stack"], x, batch)
        for number in range(count):
            layer = tree_at(parts["stacks"][name], number)
            x = functions.blocks[name](layer, x, batch, jnp.int32(number))
    return functions.head(parts["non_stack"], x, batch)


@pytest.mark.thorough
def test_losses_and_gradients_equal_torch_document_by_document():
    with jax.enable_x64(True):
        model = Llama(CONFIG, rngs=nnx.Rngs(0))
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float64), nnx.to_pure_dict(nnx.split(model)[1])
        )
        batch = packed_batch()

        def loss(params):
            losses, weights, _ = our_losses(params, model, batch)
            assert isinstance(losses, dict) and isinstance(weights, dict)
            assert weights["mtp_loss"] is weights["lm_loss"]
            return sum(losses.values()), (losses, weights["lm_loss"])

        result = jax.jit(jax.grad(loss, has_aux=True))(params)
        gradients, (losses, weight) = jax.tree.map(np.asarray, result)
    theirs = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), requires_grad=True), params)
    sums = torch.zeros(3, dtype=torch.float64)
    for row in range(2):
        for document in np.unique(batch["segment_ids"][row]):
            if document:
                here = batch["segment_ids"][row] == document
                arrays = (batch[name][row, here] for name in ("tokens", "targets", "weights"))
                tokens, targets, weights = map(torch.tensor, arrays)
                sums = sums + losses_of_document(theirs, tokens, targets.long(), weights)
    assert weight == batch["weights"].sum()
    np.testing.assert_allclose(losses["lm_loss"], sums[0].item(), rtol=TOLERANCE)
    expected = 0.3 / 2 * (sums[1] + sums[2])
    np.testing.assert_allclose(losses["mtp_loss"], expected.item(), rtol=TOLERANCE)
    (sums[0] + expected).backward()
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        leaf = theirs
        for key in path:
            leaf = leaf[key.key]
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=TOLERANCE)


@pytest.mark.thorough
def test_blocks_ahead_change_neither_parameters_nor_outputs_of_the_model():
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    model = Llama(CONFIG, rngs=nnx.Rngs(0))
    without = Llama(LlamaConfig(**{**vars(CONFIG), "mtp_depths": 0}), rngs=nnx.Rngs(0))
    assert without.mtp is None
    np.testing.assert_array_equal(model(tokens), without(tokens))
    decoder = decoder_of(model)
    params = decoder.params_of(model)
    assert [*params["stacks"]] == ["decoder"]
    logits, _ = decoder.prefill(params, tokens, jnp.array([8], jnp.int32), 2)
    np.testing.assert_allclose(logits, model(tokens)[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mtp_depths": -1}, "model.mtp_depths=-1 must be 0 or positive"),
        ({"mtp_loss": -0.1}, "model.mtp_loss=-0.1 must be 0 or positive"),
        ({"head": "none"}, "model.mtp_depths=2 needs a loss, but model.head='none'"),
    ],
)
def test_depths_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**{**vars(CONFIG), **changes})
