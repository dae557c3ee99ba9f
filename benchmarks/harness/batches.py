"""Random batches for benchmarks."""

import numpy as np

from data.shapes import example_shapes
from train.run.run import Run

#: Largest value + 1 of integers whose range does not depend on the model.
_HIGHS = {"images": 256, "mask_seeds": 2**32, "labels": 2, "token_types": 2}
_VOCAB = ("tokens", "decoder_tokens")


def random_batch(run: Run) -> dict[str, np.ndarray]:
    """Return a global batch of random tokens or images, identical on all processes.

    Every row of text is one document, and every weight is 1.
    """
    data = run.config.data
    size = data.global_batch_size
    rng = np.random.default_rng(0)
    has_labels = data.reads_images or data.objective == "classification"
    batch: dict[str, np.ndarray] = {"index": np.arange(size, dtype=np.uint32)}
    for name, (shape, dtype) in example_shapes(data, run.config.images).items():
        shape = (size, *shape)
        if dtype == np.float32 or name.endswith("segment_ids"):
            batch[name] = np.ones(shape, dtype)
        elif name == "positions":
            batch[name] = np.broadcast_to(np.arange(shape[1], dtype=dtype), shape)
        else:
            is_token = name in _VOCAB or (name == "targets" and not has_labels)
            model_high = run.model_config.vocab_size if is_token else None
            high = _HIGHS.get(name) or model_high or getattr(run.model_config, "num_labels", 1)
            batch[name] = rng.integers(high, size=shape, dtype=dtype)
    return batch
