r"""MoCo v3 on one device: a ViT learns from pairs of views of handwritten digits, without labels.

Hardware: any. With the default size, a 2-core CPU takes a few minutes. Afterwards, train a linear
classifier on the frozen encoder with configs/vit_probe.py:

    python -m train.main --config=configs/moco.py
    python -m train.main --config=configs/vit_probe.py --workdir=runs/probe \
        --config.init_from=runs/moco

`--config=configs/moco.py:SIZE` selects a published size, for accelerators and a data set such as
imagenet2012: small16, base16, large16 or huge16. They use the recipe of Chen et al. 2021
(arXiv:2104.02057, section 5). The contrastive loss compares all examples of a batch, so a batch
must be one microbatch. If it does not fit on a device, split it over mesh.data or mesh.fsdp.
"""

from ml_collections import ConfigDict

from configs import sizes

#: name -> (layers, heads, embed dim, MLP dim). Chen et al. 2021, table 2.
SIZES = {
    "small16": (12, 12, 384, 1536),
    "base16": (12, 12, 768, 3072),
    "large16": (24, 16, 1024, 4096),
    "huge16": (32, 16, 1280, 5120),
}
#: Parameters that keep their initial values: the patch embedding (section 4.2), and the sine-cosine
#: position embedding.
FROZEN = ("patch_embedding.*", "position_embedding")


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("moco", size, ("tiny", *SIZES))
    config = sizes.of_images("moco", "image_contrast")
    config.model.patch_size = 2
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 64
    config.model.mlp_dim = 256
    config.model.hidden_dim = 256  # hidden size of the projection and prediction MLPs
    config.model.projection_dim = 64  # size of the vectors that the loss compares
    config.model.temperature = 0.2
    config.model.dropout = 0.0
    config.model.drop_path = 0.0
    config.optimizer.beta2 = 0.999
    config.optimizer.frozen = FROZEN
    config.train.ema_decay = 0.99  # for the momentum encoder, which computes the keys
    config.train.ema_schedule = "cosine"
    if size == "tiny":
        sizes.digits(config)
        config.data.global_batch_size = 128
        config.images.crop_scale = (0.4, 1.0)
        config.images.jitter = (0.4, 0.4, 0.0, 0.0)
        return config

    sizes.encoder(config, *SIZES[size], patch_size=16)
    config.model.hidden_dim = 4096
    config.model.projection_dim = 256
    sizes.imagenet(config)
    config.data.global_batch_size = 4096
    config.images.randaugment_num = 0
    config.images.erasing = 0.0
    config.images.mixup = 0.0
    config.images.cutmix = 0.0
    config.images.jitter = (0.4, 0.4, 0.2, 0.1)
    config.images.grayscale = 0.2
    config.images.blur = (1.0, 0.1)
    config.images.solarize = (0.0, 0.2)
    config.optimizer.learning_rate = 2.4e-3  # 1.5e-4 × 4096 / 256
    config.optimizer.final_learning_rate_fraction = 0.0
    config.optimizer.warmup_steps = 12_511  # 40 epochs
    config.train.num_steps = 93_835  # 300 epochs
    return config
