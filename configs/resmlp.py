"""ResMLP on one device: classifies handwritten digits.

Hardware: any. With the default size, a 2-core CPU takes a few minutes to reach a validation
accuracy over 95 %.

    python -m train.main --config=configs/resmlp.py

`--config=configs/resmlp.py:SIZE` selects a published size, for accelerators and a data set such as
imagenet2012: s12, s24, s36 or b24; the number is the number of layers. They use the authors'
recipe, which is in github.com/facebookresearch/deit, issue 106. It gives everything except the
stochastic depth rates of sizes above s12. Issue 117 has 0.1 for 24 layers on other data; s24, s36
and b24 use that.
"""

from ml_collections import ConfigDict

from configs import sizes

#: name -> (layers, embed dim, patch size, layer scale, drop path). Touvron et al. 2021
#: (arXiv:2105.03404), and their resmlp_models.py.
SIZES = {
    "s12": (12, 384, 16, 0.1, 0.05),
    "s24": (24, 384, 16, 1e-5, 0.1),
    "s36": (36, 384, 16, 1e-6, 0.1),
    "b24": (24, 768, 8, 1e-6, 0.1),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("resmlp", size, ("tiny", *SIZES))
    config = sizes.of_images("resmlp", "image_classification")
    config.model.patch_size = 2
    config.model.num_layers = 4
    config.model.embed_dim = 64
    config.model.mlp_dim = 256
    config.model.layer_scale = 0.1  # initial scale of residual branches; smaller for deeper models
    config.model.drop_path = 0.05  # stochastic depth rate, the same in every layer
    config.model.label_smoothing = 0.1
    config.optimizer.beta2 = 0.999
    config.optimizer.weight_decay = 0.05
    if size == "tiny":
        sizes.digits(config)
        return config

    layers, embed, patch, layer_scale, drop_path = SIZES[size]
    config.model.num_layers = layers
    config.model.embed_dim = embed
    config.model.mlp_dim = 4 * embed
    config.model.patch_size = patch
    config.model.layer_scale = layer_scale
    sizes.imagenet(config)
    config.data.global_batch_size = 2048
    config.images.repeats = 3
    config.images.eval_crop = 0.9
    config.model.drop_path = drop_path
    config.optimizer.name = "lamb"
    config.optimizer.learning_rate = 5e-3
    config.optimizer.weight_decay = 0.2
    config.optimizer.warmup_steps = 3125  # 5 epochs
    config.optimizer.final_learning_rate_fraction = 0.002
    config.train.num_steps = 250_000  # 400 epochs
    config.eval.every_steps = 3125
    config.precision.compute = "float32"  # the authors trained in full precision
    return config
