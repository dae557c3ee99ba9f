"""A linear probe on one device: how much a classifier finds in what a pre-training has learnt.

A ViT starts from a pre-training of configs/moco.py or configs/mae.py, and nothing but a new linear
layer over its activations is trained; without `init_from` the encoder is an untrained one, which is
what a probe is to be compared with.

Hardware: any; on a 2-core CPU about a minute.

    python -m train.main --config=configs/vit_probe.py --workdir=runs/probe \\
        --config.init_from=runs/moco

Source: Chen et al. 2021 (arXiv:2104.02057), section 5: neither weight decay nor changes of images
but crops and flips. The optimizer is Adam, which needs no search for a learning rate.
"""

from ml_collections import ConfigDict

from configs import sizes, vit

#: All but the classifier.
FROZEN = ("patch_embedding.*", "class_token", "position_embedding", "encoder.*", "final_norm.*")


def get_config(size: str = "tiny") -> ConfigDict:
    """Returns the config; `size` is "tiny"."""
    sizes.choose("vit_probe", size, ())
    config = vit.get_config()
    config.images.crop_scale = (1.0, 1.0)
    config.images.train_fraction = 0.05
    config.model.positions = "sincos"
    config.model.drop_path = 0.0
    config.model.label_smoothing = 0.0
    config.optimizer.weight_decay = 0.0
    config.optimizer.learning_rate = 3e-2
    config.optimizer.frozen = FROZEN
    config.train.num_steps = 500
    config.eval.every_steps = 100
    config.checkpoint.every_steps = 500
    return config
