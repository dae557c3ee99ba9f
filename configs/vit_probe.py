r"""Linear probe on one device: evaluates the features of a pretrained ViT.

The encoder comes from a run of configs/moco.py or configs/mae.py and is frozen; only a new linear
classifier is trained. Without `init_from` the encoder has random weights, which gives a baseline.

Hardware: any; about a minute on a 2-core CPU.

    python -m train.main --config=configs/vit_probe.py --workdir=runs/probe \
        --config.init_from=runs/moco

On digits it uses Adam, which needs no learning-rate search, and a twentieth of the labels.
`--config=configs/vit_probe.py:SIZE` is for a published size on a data set such as imagenet2012:
small16, base16, large16 or huge16; the number is the patch size in pixels. These use SGD for 90
epochs without weight decay, and no augmentation except crops and flips, like the code of Chen et
al. 2021 (arXiv:2104.02057) for MoCo v3.
"""

from ml_collections import ConfigDict

from configs import moco, sizes, vit

SIZES = moco.SIZES

#: All parameters except the classifier's.
FROZEN = ("patch_embedding.*", "class_token", "position_embedding", "encoder.*", "final_norm.*")


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("vit_probe", size, ("tiny", *SIZES))
    config = vit.get_config()
    config.model.positions = "sincos"
    config.model.drop_path = 0.0
    config.model.label_smoothing = 0.0
    config.optimizer.weight_decay = 0.0
    config.optimizer.frozen = FROZEN
    if size == "tiny":
        config.images.crop_scale = (1.0, 1.0)
        config.images.train_fraction = 0.05
        config.optimizer.learning_rate = 3e-2
        config.train.num_steps = 500
        config.eval.every_steps = 100
        return config

    sizes.encoder(config, *SIZES[size], patch_size=16)
    sizes.imagenet_images(config)
    config.images.crop_scale = (0.08, 1.0)
    config.images.flip = True
    config.data.global_batch_size = 1024
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 12.0  # 3 × 1024 / 256
    config.optimizer.warmup_steps = 0
    config.optimizer.final_learning_rate_fraction = 0.0
    config.optimizer.clip_norm = 0.0
    config.train.num_steps = 112_590
    config.eval.every_steps = 6255  # 5 epochs
    config.checkpoint.every_steps = 1251
    return config
