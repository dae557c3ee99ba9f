"""A ViT that starts from a pre-training without labels, on one device: handwritten digits.

All of the encoder is trained on, the layers nearest the image least. `init_from` is a run of
configs/mae.py or configs/moco.py, or a folder of ViTMAE as Hugging Face has it; sizes are those of
the pre-training, and another resolution is learnt with positions interpolated.

Hardware: any; on a 2-core CPU about a minute.

    python -m train.main --config=configs/vit_finetune.py --workdir=runs/finetune \\
        --config.init_from=runs/mae

`--config=configs/vit_finetune.py:SIZE` is the recipe of a published size, for accelerators and a
data set such as imagenet2012: base16, large16 and huge14, as He et al. 2021 (arXiv:2111.06377,
table 9) have it.
"""

from ml_collections import ConfigDict

from configs import sizes, vit

#: name -> (layer decay, drop path, epochs). He et al. 2021, table 9, and their code's settings.
SIZES = {"base16": (0.65, 0.1, 100), "large16": (0.75, 0.2, 50), "huge14": (0.75, 0.3, 50)}
_STEPS_PER_EPOCH = 1251


def get_config(size: str = "tiny") -> ConfigDict:
    """Returns the config; `size` is "tiny" or a key of SIZES."""
    sizes.choose("vit_finetune", size, SIZES)
    config = vit.get_config(size)
    config.model.pool = "mean"
    config.model.positions = "sincos"
    config.optimizer.layer_decay = 0.75
    if size == "tiny":
        return config

    layer_decay, drop_path, epochs = SIZES[size]
    config.model.drop_path = drop_path
    config.optimizer.layer_decay = layer_decay
    config.optimizer.learning_rate = 5e-4 * 1024 / 256
    config.train.num_steps = epochs * _STEPS_PER_EPOCH
    return config
