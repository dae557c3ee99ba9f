"""Fine-tunes an OPT, or another causal language model, from published weights.

Hardware: any that holds the model; set the keys of `mesh` to use more than one device.

    python -m train.main --config=configs/opt_finetune.py --config.init_from=PATH --workdir=runs/opt

PATH is the directory of a Hugging Face model, or `OWNER/NAME` on the hub. The architecture, its
sizes and the tokenizer are read from there. `opt_finetune.py:lora` trains only adapters. Set
`data.name` or `data.paths` to your text; chat_finetune.py is for conversations.
"""

from ml_collections import ConfigDict

from configs import common, sizes

#: Peak learning rates.
_RATES = {"full": 2e-5, "lora": 2e-4}


def get_config(tuning: str = "full") -> ConfigDict:
    """Return the config; `tuning` is one of `configs.sizes.TUNINGS`."""
    sizes.choose("opt_finetune", tuning, sizes.TUNINGS)
    config = common.get_config()
    sizes.from_published(config, tuning, _RATES[tuning])
    config.model.head = "lm"  # a checkpoint of a base model has no head
    config.train.num_steps = 200
    return config
