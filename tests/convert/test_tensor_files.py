"""Our tensor files compared with the safetensors library and with `transformers`."""

import itertools
import json
import struct

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from convert.tensor_files import DTYPES, ShardWriter, open_safetensors, open_tensors
from tests.limits import limited_resources


@pytest.mark.parametrize("dtype", DTYPES)
def test_library_reads_written_files(dtype, tmp_path):
    shapes = {"a": (3, 5), "b": (0, 2), "c.d": (), "e": (7,)}
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}
    tensors = [(name, DTYPES[dtype], shape) for name, shape in shapes.items()]
    ShardWriter(tmp_path, tensors, max_shard_bytes=2**20).write(values.__getitem__)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert set(theirs.keys()) == set(shapes)
        for name, shape in shapes.items():
            found = theirs.get_tensor(name)
            assert tuple(found.shape) == shape
            assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == values[name].tobytes()
    for name, tensor in open_tensors(tmp_path).items():
        assert tensor.shape == shapes[name] and tensor.dtype == DTYPES[dtype]
        assert tensor.map().tobytes() == values[name].tobytes()


def write_weights(directory, name: str, bias: float) -> None:
    """Write the weights of a tiny GPT-2 as a file, or as an index and the file that it lists."""
    state = tiny_gpt2().state_dict()
    state["transformer.ln_f.bias"] += bias
    file = name
    if name.endswith(".index.json"):
        stem, end = name.removesuffix(".index.json").rsplit(".", 1)
        file = f"{stem}-00001-of-00001.{end}"
        index = {"metadata": {}, "weight_map": dict.fromkeys(state, file)}
        (directory / name).write_text(json.dumps(index))
    if file.endswith(".bin"):
        torch.save(state, directory / file)
    else:
        save_file(state, directory / file, {"format": "pt"})


def tiny_gpt2() -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=3, n_positions=2, n_embd=2, n_layer=1, n_head=1, tie_word_embeddings=False
    )
    return transformers.GPT2LMHeadModel(config)


WEIGHTS = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
]


@pytest.mark.parametrize("names", [*itertools.combinations(WEIGHTS, 2)], ids=" and ".join)
def test_weights_are_read_from_the_same_file_as_by_transformers(names, tmp_path):
    tiny_gpt2().config.save_pretrained(tmp_path)
    for bias, name in enumerate(reversed(names), 1):
        write_weights(tmp_path, name, float(bias))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    expected = theirs.transformer.ln_f.bias.detach().numpy()
    found = open_tensors(tmp_path, allow_pickle_weights=True)["transformer.ln_f.bias"].map()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "shape, reason",
    [
        ([10**99] * 10_000, "is not a dtype, a shape and two offsets"),
        ([1] * 1_000_000, "is not a dtype, a shape and two offsets"),
        ([10**3_999] * 4_000, "has an integer of 4,000 digits"),
    ],
    ids=["many sizes", "a million dimensions", "4,000 digits"],
)
def test_shapes_that_no_array_has_are_refused_at_once(shape, reason, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with limited_resources(), pytest.raises(ValueError, match=reason):
        list(open_safetensors(file))
