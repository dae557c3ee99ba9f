"""GPT-2 with 2 pipeline stages × tensor parallelism on 4 devices, in two and a half dimensions.

This is `parallel = dict(pipeline=2, tensor=dict(mode='2.5d', depth=1, size=4))` of Colossal-AI,
whose spelling a config may also use. docs/tensor_parallelism.md explains the modes.

Hardware: 8 devices; on a CPU they are simulated, and 2 cores take about 2 minutes.

    python -m train.main --config=configs/gpt2_tensor.py
    python -m train.main --config=configs/gpt2_tensor.py --config.tensor.mode=2d

`--config=configs/gpt2_tensor.py:SIZE` selects a published size; see configs/gpt2.py.
"""

from ml_collections import ConfigDict

from configs import gpt2


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of gpt2.SIZES."""
    config = gpt2.get_config(size)
    config.parallel = {"pipeline": 2, "tensor": {"mode": "2.5d", "depth": 1, "size": 4}}
    if size == "tiny":
        config.train.num_microbatches = 4
    return config
