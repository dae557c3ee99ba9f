r"""Fine-tunes a self-supervised ViT on one device: classifies handwritten digits.

The whole encoder is trained, with layer-wise learning-rate decay: the layers closest to the input
change least. `init_from` is a run of configs/mae.py or configs/moco.py, or the directory of a
Hugging Face ViTMAE model. The model's sizes are read from it. At another resolution, the position
embeddings are interpolated.

Hardware: any; about a minute on a 2-core CPU.

    python -m train.main --config=configs/vit_finetune.py --workdir=runs/finetune \
        --config.init_from=runs/mae

`--config=configs/vit_finetune.py:SIZE` selects the recipe for a published size, for accelerators
and a data set such as imagenet2012: base16, large16 or huge14. Recipe: He et al. 2021
(arXiv:2111.06377, table 9), with the settings that their code has for each size.
"""

from ml_collections import ConfigDict

from configs import sizes, vit

#: name -> (learning rate per 256 images of a batch, layer decay, drop path, epochs).
SIZES = {
    "base16": (5e-4, 0.65, 0.1, 100),
    "large16": (1e-3, 0.75, 0.2, 50),
    "huge14": (1e-3, 0.75, 0.3, 50),
}
_STEPS_PER_EPOCH = 1251


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("vit_finetune", size, ("tiny", *SIZES))
    config = vit.get_config(size)
    config.model.pool = "mean"
    config.model.positions = "sincos"
    config.optimizer.layer_decay = 0.75
    if size == "tiny":
        return config

    base_rate, layer_decay, drop_path, epochs = SIZES[size]
    learning_rate = base_rate * config.data.global_batch_size / 256
    config.model.drop_path = drop_path
    config.optimizer.layer_decay = layer_decay
    config.optimizer.learning_rate = learning_rate
    config.optimizer.final_learning_rate_fraction = 1e-6 / learning_rate
    config.train.num_steps = epochs * _STEPS_PER_EPOCH
    return config
