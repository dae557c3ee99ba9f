"""Our tensor files compared with the safetensors library."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from convert.tensor_files import DTYPES, ShardWriter, open_tensors


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
