"""Parity: our models, loaded from Hugging Face files, have the outputs and gradients of theirs."""

import functools

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file

from convert.from_hf import load
from convert.source import read_source
from tests.convert import cases, comparison, hf_files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function: case -> directory of its files."""
    return functools.cache(lambda name: cases.save(name, tmp_path_factory.mktemp("hf")))


@pytest.mark.thorough(but=["gpt2", "gpt2_base"])
@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", cases.CASES)
def test_loaded_model_has_the_outputs_and_gradients_of_transformers(name, saved, tmp_path):
    theirs = cases.make(name)
    ours = load(saved(name))
    graph, params = nnx.split(ours)
    params = nnx.to_pure_dict(params)

    def loss(params):
        outputs = comparison.our_outputs(nnx.merge(graph, params), name)
        return comparison.log_loss(
            outputs, name, functools.partial(jax.nn.log_softmax, axis=-1)
        ), outputs

    # Most of the time here is compilation, and fast code is not needed.
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)(params)
    theirs.zero_grad()
    expected = comparison.their_outputs(theirs, name)
    comparison.log_loss(expected, name, functools.partial(torch.log_softmax, dim=-1)).backward()
    counts = comparison.weights(name) > 0
    # 1e-4 is float32 rounding accumulated over the layers, with sums in different orders.
    np.testing.assert_allclose(
        np.asarray(outputs)[counts], expected.detach().numpy()[counts], rtol=0, atol=1e-4
    )
    compare_gradients(saved(name), theirs, gradients, tmp_path)


def compare_gradients(directory, theirs, gradients, tmp_path) -> None:
    """Compare gradients by the name mapping that also loaded the weights."""
    source = read_source(directory)
    flat = {
        ".".join(map(str, path)): value
        for path, value in nnx.traversals.flatten_mapping(gradients).items()
    }
    expected = comparison.their_gradients(theirs, tmp_path)
    shapes = {path: value.shape for path, value in flat.items()}
    assert source.architecture is not None
    for place in source.architecture.tensor_mappings(shapes, vocab_size=cases.VOCAB):
        found = np.asarray(flat[place.ours])[place.place]
        index = tuple(slice(0, size) for size in place.shape)
        gradient = place.read(expected[place.theirs], index)
        if place.kind == "vocab":
            found, gradient = (x[: cases.VOCAB] for x in (found, gradient))
        if place.ours == "token_embedding":  # Theirs has no gradient for the padding token.
            pads = theirs.config.pad_token_id
            found, gradient = (
                np.delete(x, [] if pads is None else pads, 0) for x in (found, gradient)
            )
        scale = np.linalg.norm(gradient)
        if np.linalg.norm(found) < 1e-6 and scale < 1e-6:
            continue  # Zero up to rounding, like the gradient of the bias of keys.
        assert np.linalg.norm(found - gradient) < 1e-3 * scale, place.theirs


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["mae", "mae_odd"])
def test_loss_of_hidden_patches_equals_transformers(name, saved):
    batch = comparison.inputs(name)
    theirs = cases.make(name)
    ours = load(saved(name))
    with torch.no_grad():
        expected = theirs(**comparison.their_images(theirs, name))
    np.testing.assert_array_equal(ours(**batch)[1], expected.mask.numpy() > 0)
    x = ours.encoder(ours.embed(batch), batch)
    x = ours.decoder(ours.before_decoder(x, batch), batch)
    loss, weight, _ = ours.head(x, batch | {"weights": np.ones(3, np.float32)})
    # Float32 rounding; the squared errors are about 10.
    np.testing.assert_allclose(loss / weight, expected.loss.numpy(), rtol=1e-5)


def test_loss_of_replaced_tokens_equals_transformers(saved):
    name = "electra_pretraining"
    batch = comparison.inputs(name)
    theirs = cases.make(name)
    ours = load(saved(name))
    is_replaced = np.random.default_rng(3).integers(0, 2, batch["tokens"].shape, dtype=np.int32)
    tokens, mask, types, labels = (
        torch.from_numpy(x).long()
        for x in (batch["tokens"], batch["attention_mask"], batch["token_types"], is_replaced)
    )
    with torch.no_grad():
        expected = theirs(tokens, mask, types, labels=labels).loss
    ours_batch = {
        "tokens": batch["tokens"],
        "segment_ids": batch["attention_mask"],
        "token_types": batch["token_types"],
        "targets": is_replaced,
        "weights": batch["attention_mask"].astype(np.float32),
    }
    loss, weight, _ = ours.head(ours.encoder(ours.embed(ours_batch), ours_batch), ours_batch)
    np.testing.assert_allclose(loss / weight, expected.numpy(), rtol=1e-5)  # float32 rounding


def test_decoder_names_written_by_the_library_are_read(saved, tmp_path):
    cases.make("mae").save_pretrained(tmp_path)
    assert "decoder.decoder_encoder.layer.2.output.dense.bias" in load_file(
        tmp_path / "model.safetensors"
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        hf_files.parameters(tmp_path),
        hf_files.parameters(saved("mae")),
    )


def test_loaded_model_can_be_jitted_with_scaled_positions(saved):
    model = load(saved("llama_llama3"))
    tokens = comparison.inputs("llama_llama3")["tokens"]
    found = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(found, model(tokens), rtol=0, atol=1e-4)  # Float32 rounding.


@pytest.mark.parametrize("name", ["gpt2_base", "opt_base", "llama_base", "bert_base"])
def test_model_without_a_head_has_no_loss(name, saved):
    model = load(saved(name))
    with pytest.raises(ValueError, match="model.head='none' gives activations and no loss"):
        model.head(np.zeros((1, 2, model.config.embed_dim), np.float32), {})
