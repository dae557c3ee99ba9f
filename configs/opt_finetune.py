"""Goes on training an OPT, or another causal language model, from published weights.

Hardware: any that holds the model; see `mesh` for more than one device.

    python -m train.main --config=configs/opt_finetune.py --config.init_from=PATH --workdir=runs/opt

PATH is a folder of Hugging Face's: config.json, *.safetensors and tokenizer.json. The model, its
sizes and the tokenizer are read from it. Set `data.name` or `data.paths` to your text.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = placeholder(str)  # None: that of init_from, as all that is not here
    config.model.dropout = placeholder(float)
    config.model.head = "lm"  # which a checkpoint of the base model alone has not
    config.data.tokenizer = "init_from"
    config.data.sequence_length = 512
    config.data.global_batch_size = 8
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 10
    config.optimizer.schedule = "linear"
    config.optimizer.weight_decay = 0.0
    config.train.num_steps = 200
    config.train.remat = "dots"
    return config
