"""ViT on one device: classifies handwritten digits.

Hardware: any. With the default size, a 2-core CPU takes a minute or two to reach a validation
accuracy over 97 %.

    python -m train.main --config=configs/vit.py

`--config=configs/vit.py:SIZE` selects a published size, for accelerators and a data set such as
imagenet2012: tiny16, small16, base16, large16, huge14, giant14 or gigantic14; the number is the
patch size in pixels. They use the recipe of Touvron et al. 2020 (arXiv:2012.12877, table 9).
"""

from ml_collections import ConfigDict

from configs import sizes

#: name -> (layers, heads, embed dim, MLP dim, patch size). Dosovitskiy et al. 2020
#: (arXiv:2010.11929), table 1; Touvron et al. 2020; Zhai et al. 2021 (arXiv:2106.04560), table 2.
SIZES = {
    "tiny16": (12, 3, 192, 768, 16),
    "small16": (12, 6, 384, 1536, 16),
    "base16": (12, 12, 768, 3072, 16),
    "large16": (24, 16, 1024, 4096, 16),
    "huge14": (32, 16, 1280, 5120, 14),
    "giant14": (40, 16, 1408, 6144, 14),
    "gigantic14": (48, 16, 1664, 8192, 14),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("vit", size, ("tiny", *SIZES))
    config = sizes.of_images("vit", "image_classification")
    config.model.patch_size = 2
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 64
    config.model.mlp_dim = 256
    config.model.dropout = 0.0
    config.model.drop_path = 0.1  # stochastic depth rate of the last layer; grows linearly from 0
    config.model.label_smoothing = 0.1
    config.optimizer.beta2 = 0.999
    config.optimizer.weight_decay = 0.05
    if size == "tiny":
        sizes.digits(config)
        return config

    sizes.encoder(config, *SIZES[size])
    sizes.imagenet(config)
    return config
