"""Layers that predict tokens after the next are read, written, and equal to `transformers`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from convert import from_hf, to_hf
from convert.source import read_source
from models.functions import functions_of
from tests.convert import cases
from tests.convert.test_round_trip import all_tensors, assert_same_bits

NAMES = ("deepseek3", "glm4_moe")
DEPTHS = 2


def save_with_layers_ahead(name, directory):
    """Write the model of a case with more layers, named as in published files."""
    cases.save(name, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((directory / "config.json").read_text())
    size = config["hidden_size"]
    count = config["num_hidden_layers"]
    last = f"model.layers.{count - 1}."
    generator = torch.Generator().manual_seed(3)
    for number in range(count, count + DEPTHS):
        prefix = f"model.layers.{number}."
        shapes = {
            prefix + key.removeprefix(last): tensor.shape
            for key, tensor in tensors.items()
            if key.startswith(last)
        }
        shapes |= {prefix + f"{norm}.weight": (size,) for norm in ("enorm", "hnorm")}
        shapes |= {prefix + "shared_head.norm.weight": (size,)}
        shapes |= {prefix + "eh_proj.weight": (size, 2 * size)}
        for key, shape in shapes.items():
            mean = float(len(shape) == 1 and "bias" not in key)
            tensors[key] = mean + 0.2 * torch.randn(shape, generator=generator)
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = DEPTHS
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def their_losses(directory, tokens):
    """Return the sums of the losses of each depth, and the gradient of the mean's projection."""
    config = json.loads((directory / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    main = model_class.from_pretrained(directory, **cases.EAGER)
    count = config["num_hidden_layers"]
    # transformers finds the layers of published sizes only.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{count + i}\." for i in range(2)]
    ahead = MtpModel.from_pretrained(main).eval()
    ids = torch.from_numpy(tokens).long()
    sums = []
    with torch.no_grad():
        h = main.model(ids).last_hidden_state
        for depth in range(DEPTHS + 1):
            if depth:
                h = ahead.forward_layer(
                    depth - 1,
                    h[:, :-1],
                    torch.arange(depth, ids.shape[1])[None] - depth,
                    MtpCache(config=main.config.get_mtp_config()),
                    input_ids=ids[:, depth:],
                )
            logits = main.lm_head(h[:, :-1]).flatten(0, 1)
            targets = ids[:, depth + 1 :].flatten()
            sums.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return [float(each) for each in sums]


def our_losses(model, tokens):
    functions = functions_of(model, remat=None)
    parts = functions.split(nnx.to_pure_dict(nnx.split(model)[1]))
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": weights}
    x = functions.embed(parts["non_stack"], batch)
    for name, count in functions.num_layers.items():
        if name in functions.before:
            x = functions.before[name](parts["non_stack"], x, batch)
        for number in range(count):
            layer = jax.tree.map(lambda leaf, n=number: leaf[n], parts["stacks"][name])
            x = functions.blocks[name](layer, x, batch, jnp.int32(number))
    return functions.head(parts["non_stack"], x, batch)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_layers_ahead_equal_transformers(name, tmp_path):
    save_with_layers_ahead(name, tmp_path)
    tokens = np.random.default_rng(0).integers(4, cases.VOCAB, (2, 11), dtype=np.int32)
    model = from_hf.load(tmp_path)
    assert model.config.mtp_depths == DEPTHS
    losses = our_losses(model, tokens)
    main, *ahead = their_losses(tmp_path, tokens)
    # Float32 rounding, accumulated over the layers; the losses are about 5 per token.
    np.testing.assert_allclose(losses["lm_loss"], main, rtol=1e-5)
    expected = model.config.mtp_loss * np.mean(ahead)
    np.testing.assert_allclose(losses["mtp_loss"], expected, rtol=1e-5)


@pytest.mark.thorough(but=["glm4_moe"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_ahead_are_the_same_after_a_round_trip(name, tmp_path):
    save_with_layers_ahead(name, tmp_path / "hf")
    from_hf.convert(tmp_path / "hf", tmp_path / "run")
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    assert_same_bits(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "hf"))
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("hf", "back")]
    assert configs[0] == configs[1]


def test_layers_ahead_are_left_out_with_one_line_if_config_json_has_none(tmp_path, caplog):
    save_with_layers_ahead("glm4_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    count = config["num_hidden_layers"]
    kept = {k: v for k, v in tensors.items() if f"layers.{count + 1}." not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("WARNING"):
        assert read_source(tmp_path).config.mtp_depths == 0
    (line,) = (message for message in caplog.messages if "left out" in message)
    assert f"model.layers.{count}.eh_proj.weight" in line


def test_copy_that_differs_is_refused(tmp_path):
    save_with_layers_ahead("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if "shared_head.head" in key)
    tensors[name] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="shared_head.head.weight and lm_head.weight differ"):
        read_source(tmp_path)
