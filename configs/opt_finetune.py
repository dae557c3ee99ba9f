"""Fine-tunes an OPT, or another causal language model, from published weights.

Hardware: any that holds the model; set the keys of `mesh` to use more than one device.

    python -m train.main --config=configs/opt_finetune.py --config.init_from=PATH --workdir=runs/opt

PATH is the directory of a Hugging Face model: config.json, *.safetensors and tokenizer.json. The
architecture, its sizes and the tokenizer are read from there. Set `data.name` or `data.paths` to
your text.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> ConfigDict:
    """Return the config."""
    config = common.get_config()
    config.model = ConfigDict()
    # None: from the init_from checkpoint, like all keys of `model` that are not set here.
    config.model.name = placeholder(str)
    config.model.dropout = placeholder(float)
    config.model.head = "lm"  # a checkpoint of a base model has no head
    config.data.tokenizer = "init_from"
    config.data.sequence_length = 512
    config.data.global_batch_size = 8
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 10
    config.optimizer.schedule = "linear"
    config.optimizer.weight_decay = 0.0
    config.train.num_steps = 200
    config.train.remat = "stage,dots"
    return config
