"""Settings that the config files share: small runs on digits, and runs of published sizes."""

from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def at_scale(
    config: ConfigDict, *, sequence_length: int, vocab_size: int, learning_rate: float
) -> None:
    """Set the training settings of published sizes of text models: a long run on accelerators."""
    config.data.vocab_size = vocab_size
    config.data.sequence_length = sequence_length
    config.data.global_batch_size = 512
    config.train.num_microbatches = 16
    config.train.num_steps = 100_000
    config.train.remat = "auto"
    config.optimizer.learning_rate = learning_rate
    config.optimizer.warmup_steps = 2000
    config.eval.every_steps = 1000
    config.checkpoint.every_steps = 1000
    config.precision.compute = "bfloat16"
    config.log.every_steps = 10


def decoder_at_scale(
    config: ConfigDict,
    values: tuple[int, int, int, int, int, int, float, dict[str, Any]],
) -> None:
    """Set a published size of a decoder, and its training settings.

    Args:
        config: config of the small size.
        values: layers, heads, key-value heads, head dim, embed dim, mlp dim, learning rate, and
            other keys of `model`, which include `vocab_size` and `max_positions`.
    """
    layers, heads, kv_heads, head_dim, embed, mlp, learning_rate, rest = values
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.num_kv_heads = kv_heads
    config.model.head_dim = head_dim
    config.model.embed_dim = embed
    config.model.mlp_dim = mlp
    config.model.update(rest)
    positions = min(rest["max_positions"], 8192)
    vocab_size = rest["vocab_size"]
    at_scale(config, sequence_length=positions, vocab_size=vocab_size, learning_rate=learning_rate)


#: How `from_published` trains: all parameters, or only adapters.
TUNINGS = ("full", "lora")


def from_published(config: ConfigDict, tuning: str, learning_rate: float) -> None:
    """Set the settings for published weights of a text model: their tokenizer, length and dtype.

    Args:
        config: config without a section `model`; its keys come from `init_from`.
        tuning: one of TUNINGS.
        learning_rate: peak learning rate.
    """
    config.model = ConfigDict()
    # None: from the init_from checkpoint, like all keys of `model` that are not set here.
    config.model.name = placeholder(str)
    config.data.tokenizer = "init_from"
    config.data.sequence_length = 0  # the model's
    config.data.global_batch_size = 8
    config.optimizer.learning_rate = learning_rate
    config.optimizer.warmup_steps = 10
    config.optimizer.schedule = "linear"
    config.optimizer.weight_decay = 0.0
    config.precision.compute = "bfloat16"
    config.train.remat = "auto"
    if tuning == "lora":
        config.lora.rank = 16
        config.precision.frozen = "bfloat16"


def of_images(model: str, objective: str) -> ConfigDict:
    """Return the base config of an image model, on handwritten digits.

    Args:
        model: `model.name`.
        objective: `data.objective`.
    """
    config = common.get_config()
    config.data.name = "digits"
    config.data.objective = objective
    config.model = ConfigDict()
    config.model.name = model
    if objective == "image_classification":
        config.model.head = "labels"  # labels | none
    return config


def encoder(
    config: ConfigDict, layers: int, heads: int, embed_dim: int, mlp_dim: int, patch_size: int
) -> None:
    """Set the sizes of a ViT, or of the encoder of a model that pretrains one."""
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.embed_dim = embed_dim
    config.model.mlp_dim = mlp_dim
    config.model.patch_size = patch_size


def digits(config: ConfigDict) -> None:
    """Set the training settings of small image models: a few minutes on handwritten digits."""
    config.data.global_batch_size = 64
    config.images.crop_scale = (0.8, 1.0)
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 50
    config.train.num_steps = 1000
    config.eval.every_steps = 200
    config.checkpoint.every_steps = 500
    config.log.every_steps = 20


def imagenet_images(config: ConfigDict) -> None:
    """Set the data settings of published image model sizes: ImageNet at 224 pixels."""
    config.data.name = "imagenet2012"
    config.images.size = 224
    config.images.channels = 3
    config.images.eval_crop = 0.875
    config.images.num_workers = 16
    config.model.image_mean = (0.485, 0.456, 0.406)
    config.model.image_stddev = (0.229, 0.224, 0.225)
    config.precision.compute = "bfloat16"
    config.log.every_steps = 50


def imagenet(config: ConfigDict) -> None:
    """Set the training settings of published classifiers: 300 epochs of ImageNet.

    Source: Touvron et al. 2020 (arXiv:2012.12877), table 9, without its repeated augmentation.
    """
    imagenet_images(config)
    config.data.global_batch_size = 1024
    config.images.crop_scale = (0.08, 1.0)
    config.images.flip = True
    config.images.randaugment_num = 2
    config.images.randaugment_magnitude = 9.0
    config.images.erasing = 0.25
    config.images.mixup = 0.8
    config.images.cutmix = 1.0
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 6255  # 5 epochs
    config.optimizer.final_learning_rate_fraction = 0.01
    config.optimizer.clip_norm = 0.0
    config.train.num_steps = 375_300
    config.eval.every_steps = 6255
    config.checkpoint.every_steps = 1251


def choose(config: str, name: str, names: Iterable[str]) -> None:
    """Check that `name`, the text after the colon of `--config`, is one that a config file has.

    Raises:
        ValueError: it is another.
    """
    if name not in names:
        raise ValueError(f"configs/{config}.py:{name} does not exist; choose {', '.join(names)}")
