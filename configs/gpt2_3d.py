"""GPT-2 on a 2×2×2 mesh: 2 pipeline stages × 2 data replicas × 2-way tensor parallelism.

Hardware: 8 devices; on a CPU they are simulated. With the default size, a 2-core CPU takes about
2 minutes to reach the validation loss of gpt2.py, about 3.95 nats per token (7.65 at the start).

    python -m train.main --config=configs/gpt2_3d.py

`--config=configs/gpt2_3d.py:SIZE` selects a published size; see configs/gpt2.py. Size xl uses
data=4, model=1, because its 25 heads cannot be split in two.
"""

from ml_collections import ConfigDict

from configs import gpt2


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of gpt2.SIZES."""
    config = gpt2.get_config(size)
    config.mesh.pipeline = 2
    config.mesh.data = 2
    config.mesh.model = 2
    if config.model.num_heads % 2:  # xl has 25 heads
        config.mesh.data = 4
        config.mesh.model = 1
    if size == "tiny":
        config.train.num_microbatches = 4
    return config
