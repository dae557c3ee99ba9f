"""A linear probe on one device: how much a classifier finds in what a pre-training has learnt.

A ViT starts from a pre-training of configs/moco.py or configs/mae.py, and nothing but a new linear
layer over its activations is trained; without `init_from` the encoder is an untrained one, which is
what a probe is to be compared with.

Hardware: any; on a 2-core CPU about a minute.

    python -m train.main --config=configs/vit_probe.py --workdir=runs/probe \\
        --config.init_from=runs/moco

On digits the optimizer is Adam, which needs no search for a learning rate, and a twentieth of the
labels are used. `--config=configs/vit_probe.py:SIZE` is for a published size on a data set such as
imagenet2012, the number the side of a patch: small16, base16, large16 and huge16, with SGD for 90
epochs, as the code of Chen et al. 2021 (arXiv:2104.02057) does it for MoCo v3: neither weight decay
nor changes of images but crops and flips.
"""

from ml_collections import ConfigDict

from configs import moco, sizes, vit

SIZES = moco.SIZES

#: All but the classifier.
FROZEN = ("patch_embedding.*", "class_token", "position_embedding", "encoder.*", "final_norm.*")


def get_config(size: str = "tiny") -> ConfigDict:
    """Returns the config; `size` is "tiny" or a key of SIZES."""
    sizes.choose("vit_probe", size, SIZES)
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
        config.checkpoint.every_steps = 500
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
