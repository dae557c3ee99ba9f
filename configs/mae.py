"""MAE pretraining on one device: reconstructs handwritten digits from a quarter of their patches.

Hardware: any. With the default size, a 2-core CPU takes a quarter of an hour.

    python -m train.main --config=configs/mae.py
    python -m train.reconstructions runs/mae --out=reconstructions.png

`--config=configs/mae.py:SIZE` selects a published size, for accelerators and a data set such as
imagenet2012: base16, large16 or huge14; the number is the patch size in pixels. They use the recipe
of He et al. 2021 (arXiv:2111.06377, table 8) for 800 epochs; for 1,600 epochs add
`--config.train.num_steps=500456`.
"""

from ml_collections import ConfigDict

from configs import sizes
from configs.vit import SIZES as VIT_SIZES

#: name -> (layers, heads, embed dim, MLP dim, patch size) of the encoder.
SIZES = {name: VIT_SIZES[name] for name in ("base16", "large16", "huge14")}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("mae", size, ("tiny", *SIZES))
    config = sizes.of_images("mae", "image_reconstruction")
    config.model.patch_size = 2
    config.model.num_layers = 4  # encoder layers; the next three keys are the encoder's, too
    config.model.num_heads = 4
    config.model.embed_dim = 64
    config.model.mlp_dim = 256
    config.model.decoder_num_layers = 2
    config.model.decoder_num_heads = 4
    config.model.decoder_embed_dim = 32
    config.model.decoder_mlp_dim = 128
    config.model.mask_ratio = 0.75  # fraction of patches to mask
    config.model.normalise_targets = True  # normalize each target patch by its mean and stddev
    config.model.dropout = 0.0
    config.model.drop_path = 0.0  # stochastic depth of the encoder
    config.optimizer.frozen = ("position_embedding", "decoder_position_embedding")
    config.optimizer.weight_decay = 0.05
    if size == "tiny":
        sizes.digits(config)
        config.train.num_steps = 16_000
        config.eval.every_steps = 2000
        return config

    sizes.encoder(config, *SIZES[size])
    config.model.decoder_num_layers = 8
    config.model.decoder_num_heads = 16
    config.model.decoder_embed_dim = 512
    config.model.decoder_mlp_dim = 2048
    sizes.imagenet_images(config)
    config.images.crop_scale = (0.2, 1.0)
    config.images.flip = True
    config.data.global_batch_size = 4096
    config.optimizer.learning_rate = 1.5e-4 * 4096 / 256
    config.optimizer.warmup_steps = 12_511  # 40 epochs
    config.optimizer.final_learning_rate_fraction = 0.0
    config.optimizer.clip_norm = 0.0
    config.train.num_steps = 250_228
    config.eval.every_steps = 6256  # 20 epochs
    config.checkpoint.every_steps = 1564
    return config
