"""Swin on one device: classifies handwritten digits.

Hardware: any. With the default size, a 2-core CPU takes a few minutes to reach a validation
accuracy over 97 %.

    python -m train.main --config=configs/swin.py

`--config=configs/swin.py:SIZE` selects a published size, for accelerators and a data set such as
imagenet2012: tiny1, small1, base1 or large1 for Swin, and tiny2 to large2 for Swin V2. They use the
recipe of Liu et al. 2021 (arXiv:2103.14030, section A2.1).
"""

from ml_collections import ConfigDict

from configs import sizes

_TINY = (2, 2, 6, 2)
_SMALL = (2, 2, 18, 2)
#: name -> (embed dim, depths, heads, window, pixels, drop path, version). Swin: Liu et al. 2021
#: (arXiv:2103.14030), section 3.3. Swin V2: Liu et al. 2021 (arXiv:2111.09883), section A.1.
SIZES = {
    "tiny1": (96, _TINY, (3, 6, 12, 24), 7, 224, 0.2, 1),
    "small1": (96, _SMALL, (3, 6, 12, 24), 7, 224, 0.3, 1),
    "base1": (128, _SMALL, (4, 8, 16, 32), 7, 224, 0.5, 1),
    "large1": (192, _SMALL, (6, 12, 24, 48), 7, 224, 0.2, 1),
    "tiny2": (96, _TINY, (3, 6, 12, 24), 8, 256, 0.2, 2),
    "small2": (96, _SMALL, (3, 6, 12, 24), 8, 256, 0.3, 2),
    "base2": (128, _SMALL, (4, 8, 16, 32), 8, 256, 0.5, 2),
    "large2": (192, _SMALL, (6, 12, 24, 48), 12, 192, 0.2, 2),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("swin", size, ("tiny", *SIZES))
    config = sizes.of_images("swin", "image_classification")
    config.model.patch_size = 1
    config.model.embed_dim = 32
    config.model.depths = (2, 2)  # blocks per stage of the network, even numbers
    config.model.num_heads = (2, 4)  # per stage of the network
    config.model.window_size = 4  # patches per side
    config.model.dropout = 0.0
    config.model.drop_path = 0.1  # stochastic depth rate of the last block; grows linearly from 0
    config.model.label_smoothing = 0.1
    config.optimizer.beta2 = 0.999
    config.optimizer.weight_decay = 0.05
    if size == "tiny":
        sizes.digits(config)
        return config

    embed, depths, heads, window, pixels, drop_path, version = SIZES[size]
    config.model.version = version
    config.model.patch_size = 4
    config.model.embed_dim = embed
    config.model.depths = depths
    config.model.num_heads = heads
    config.model.window_size = window
    sizes.imagenet(config)
    config.images.size = pixels
    config.model.drop_path = drop_path
    config.optimizer.clip_norm = 5.0
    config.optimizer.warmup_steps = 25_000  # 20 epochs
    return config
